"""The layout of NVIDIA ModelOpt, which TensorRT-LLM, vLLM and SGLang read.

`hf_quant_config.json` beside config.json names one algorithm for all linears, or one for each of them. Scales are
stored as they are: tensor-wide ones have no dims, those of rows one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.compressed_tensors import kv_cache_problem
from dcp_adapters.hf.layouts.forms import FLAT
from dcp_adapters.hf.layouts.layout import (
    INPUT_SCALE,
    Claims,
    Layout,
    Linears,
    Scheme,
    SchemeEntry,
    StoredAs,
    differing,
)
from dcp_adapters.hf.layouts.registry import register_layout
from dcp_adapters.plain.words import names_in, short

_WEIGHT = StoredAs("payload", "weight")
_SCALE = StoredAs("scale", "weight_scale")
_STATIC = StoredAs(INPUT_SCALE, "input_scale")
_GLOBAL = StoredAs("global_scale", "weight_scale_2")
# Engines look for this name before they read on (TensorRT-LLM, and vLLM in some cases), so it names whose layout it is;
# `written_by` names who wrote the file. The version is that of the ModelOpt whose own converter writes the same.
OF_LAYOUT = {"name": "modelopt", "version": "0.47.0"}
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
SAID = ("quant_algo", "group_size")  # of each linear
IGNORED = ("exclude_modules", "ignore")  # names of modules; of hf_quant_config.json, and of config.json
KV_CACHE = ("FP8", None)  # None: nothing is said
SCHEMES = {
    Scheme("fp8_tensor", "static"): SchemeEntry(
        (_WEIGHT, _SCALE, _STATIC),
        {"quant_algo": "FP8", "group": {"weights": FP8, "input_activations": FP8}, "mixes": True},
    ),
    Scheme("fp8_row", "dynamic"): SchemeEntry(
        (_WEIGHT, StoredAs("scale", "weight_scale", FLAT)), {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    ),
    Scheme("mxfp8", "dynamic"): SchemeEntry((_WEIGHT, _SCALE), {"quant_algo": "MXFP8", "group_size": 32}),
    Scheme("nvfp4", "none"): SchemeEntry(
        (_WEIGHT, _SCALE, _GLOBAL),
        {"quant_algo": "W4A16_NVFP4", "group_size": 16, "group": {"weights": NVFP4}, "mixes": True},
    ),
    Scheme("nvfp4", "static"): SchemeEntry(
        (_WEIGHT, _SCALE, _GLOBAL, _STATIC),
        {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "group": {"weights": NVFP4, "input_activations": NVFP4},
            "mixes": True,
        },
    ),
}
_STATIC_FP8 = (
    'its engines divide by the input_scale: calibrate one (inputs="static"), or use layout="compressed-tensors"'
)
_NOT_ITS = 'use layout="compressed-tensors"'
_ROWS = 'its engines scale each token: leave the input scales out, or use layout="compressed-tensors"'
_BLOCKS = 'it has such blocks for weights alone (FP8_PB_WO), use layout="fp8" or layout="compressed-tensors"'


class ModelOpt(Layout):
    """The JSON names one algorithm for all linears, or one for each layer."""

    def json(self, linears: Linears) -> dict[str, Any]:
        """Return hf_quant_config.json, and the same in config.json, which newer engines read."""
        _check_ignored(self, linears)
        kinds = linears.kinds
        configs = {scheme: self.schemes[scheme].config for scheme in kinds}
        first = configs[kinds[0]]
        told: dict[str, Any] = {"quant_algo": first["quant_algo"]}
        sizes = {config["group_size"] for config in configs.values() if "group_size" in config}
        if len(kinds) > 1:
            for scheme in kinds:
                if not configs[scheme].get("mixes"):
                    raise ValueError(
                        f"{linears.modules(scheme)[0]}: engines read {scheme} in the layout {self.name} only where all "
                        'linears have them; use layout="compressed-tensors", or one recipe for all'
                    )
            told = {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    module: {key: configs[scheme][key] for key in SAID if key in configs[scheme]}
                    for module, scheme in linears.schemes.items()
                },
            }
        kv_cache = "FP8" if linears.kv_cache else None
        legacy = {
            **told,
            "kv_cache_quant_algo": kv_cache,
            "group_size": sizes.pop() if len(sizes) == 1 else None,
            "exclude_modules": list(linears.ignored),
        }
        config: dict[str, Any] = {"quant_method": self.name, **told, "ignore": list(linears.ignored)}
        # Some algorithms have no words in config_groups; then the name of the algorithm has to be enough.
        if all("group" in each for each in configs.values()):
            config["config_groups"] = {
                f"group_{number}": {
                    **configs[scheme]["group"],
                    "targets": ["Linear"] if len(kinds) == 1 else linears.modules(scheme),
                }
                for number, scheme in enumerate(kinds)
            }
        if linears.kv_cache:
            config["kv_cache_scheme"] = FP8
        producer = {**OF_LAYOUT, "written_by": f"{linears.producer['name']} {linears.producer['version']}"}
        return {
            "config.json": {**config, "producer": producer},
            "hf_quant_config.json": {"producer": producer, "quantization": legacy},
        }

    def describes(self, said: Mapping[str, Any] | None) -> bool:
        """Return whether a directory is of this layout; hf_quant_config.json alone may say it."""
        return said is None or super().describes(said)

    def claims(self, directory: Directory, said: Mapping[str, Any]) -> "ModelOptClaims":
        """Read both files; refuse one that names no algorithm."""
        records: list[tuple[str, Any]] = [("config.json", said)] if said else []
        if directory.quantization is not None:
            records.append(("hf_quant_config.json", directory.quantization.get("quantization") or {}))
        kv_cache: str | None = None
        for file, record in records:
            if not isinstance(record, Mapping) or not isinstance(record.get("quant_algo"), str):
                raise ValueError(f"{directory.path}: {file} says no quant_algo, expected the name of one")
            layers = record.get("quantized_layers") or {}
            if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
                raise ValueError(f"{directory.path}: {file} has quantized_layers that are no objects, expected some")
            if record.get("kv_cache_quant_algo") not in KV_CACHE:
                kv_cache = f"{file} says kv_cache_quant_algo {short(record['kv_cache_quant_algo'])}"
            kv_cache = kv_cache_problem(record.get("kv_cache_scheme")) or kv_cache
        return ModelOptClaims(layout=self, kv_cache=kv_cache, said=records)


def _check_ignored(layout: Layout, linears: Linears) -> None:
    """Refuse an ignored module whose name occurs in a quantized one's: engines look for it anywhere in a name."""
    # One search in one text: models have thousands of both, and no name holds a line break.
    quantized = "\n".join(linears.schemes)
    for ignored in linears.ignored:
        if ignored in quantized:
            module = next(name for name in linears.schemes if ignored in name)
            raise ValueError(
                f"{module}: engines that read the layout {layout.name} would take it for a part of "
                f"{ignored or 'the model itself'}, which is not quantized, as its name holds that name; quantize both "
                'or neither, or use layout="compressed-tensors"'
            )


@dataclass(frozen=True, kw_only=True)
class ModelOptClaims(Claims):
    """What hf_quant_config.json says, config.json, or both: pairs of a file and its record."""

    said: list[tuple[str, Any]]

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """Compare the scheme with each file, which must name its algorithm."""
        expected = self.layout.schemes[scheme].config
        for file, record in self.said:
            layers = record.get("quantized_layers") or {}
            own = _nearest(layers, module) if layers else record
            if own is None:
                return f"it is none of the quantized_layers of {file}"
            problems = differing(own, expected, SAID)
            if "quant_algo" not in own:
                problems.append("no quant_algo")
            if problems:
                return f"{file} says {'; '.join(problems)}"
        return None

    def left_alone_by(self, module: str) -> str | None:
        """Return a name that occurs in the module's, or a pattern (with *) that fits it."""
        names = [name for _, record in self.said for key in IGNORED for name in names_in(record.get(key))]
        return next((name for name in names if _passes_over(name, module)), None)

    def means_linear(self, module: str) -> bool:
        """Return whether it is one of the layers, if these are named, and not left alone."""
        layers = self.said[0][1].get("quantized_layers")
        return self.left_alone_by(module) is None and (not layers or _nearest(layers, module) is not None)

    def said_of(self, module: str) -> str:
        """Return its algorithm."""
        record = self.said[0][1]
        layers = record.get("quantized_layers") or {}
        own = (_nearest(layers, module) if layers else None) or record
        return short(own.get("quant_algo"))


def _passes_over(ignored: str, module: str) -> bool:
    return fnmatchcase(module, ignored) if "*" in ignored else ignored in module


def _nearest(layers: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Return what is said of a module, or of the nearest module around it."""
    while module:
        if module in layers:
            found: Mapping[str, Any] = layers[module]
            return found
        module = module.rpartition(".")[0]
    return None


MODELOPT = ModelOpt(
    name="modelopt",
    schemes=SCHEMES,
    kv_scales={"k_scale": "k_proj.k_scale", "v_scale": "v_proj.v_scale"},
    lacks={
        Scheme("fp8_tensor", "dynamic"): _STATIC_FP8,
        Scheme("fp8_row", "static"): _ROWS,
        Scheme("fp8_block", "dynamic"): _BLOCKS,
        Scheme("fp8_block", "static"): _BLOCKS,
        **{Scheme(kind, "none"): _NOT_ITS for kind in ("mxfp4", "int4_32", "int4_64", "int4_128")},
        Scheme("int8_row", "dynamic"): _NOT_ITS,
    },
)
register_layout(MODELOPT)
