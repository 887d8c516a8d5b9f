"""What a directory's JSON says about its linears, to be compared with what its tensors are.

The scheme of a linear is read off its tensors (schemes.py). JSON can say what they do not show: integers where floats
are expected, inputs in another format. So both have to agree, for each linear. Which inputs are rotated at run time is
read in rotations.py.

    claims_of(directory)          which layout, and what is said of all linears; refuses quantizations we do not have
    claims.problem(module, its)   how the scheme found for one linear contradicts the JSON, in words
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dcp_adapters.hf.files.config_sections import said_of_quantization
from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.files.patterns import bounded
from dcp_adapters.hf.layouts.compressed_tensors import COMPRESSED_TENSORS
from dcp_adapters.hf.layouts.fp8 import FP8
from dcp_adapters.hf.layouts.gpt_oss import GPT_OSS
from dcp_adapters.hf.layouts.layout import KINDS, LAYOUTS, Layout, Scheme
from dcp_adapters.hf.layouts.modelopt import MODELOPT
from dcp_adapters.hf.layouts.plain_claims import FP8Claims, GptOssClaims
from dcp_adapters.plain.words import short, short_each
from qtensor.spec.recipes import Recipe

WEIGHTS = ("num_bits", "type", "strategy", "group_size", "symmetric")  # what decides how weights decode
KV_CACHE = ("FP8", None)  # None: nothing is said


class Claims(Protocol):
    """What the JSON says."""

    @property
    def layout(self) -> Layout:
        """The layout whose names the tensors have."""

    @property
    def kinds(self) -> Mapping[str, Recipe]:
        """The recipe of each kind, as far as the JSON tells it."""

    @property
    def kv_cache(self) -> str | None:
        """Why the KV cache is not quantized as FP8; None where it is, or where nothing is said."""

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """How the scheme found for a module contradicts what is said of it; None where it does not."""

    def said_of(self, module: str) -> str:
        """What is said of a module's weights, in few words; "" where nothing is."""


def claims_of(directory: Directory) -> Claims | None:
    """What is said of the quantized linears; None where the directory says that nothing is quantized.

    Raises:
        ValueError: a quantization that the library does not have.
    """
    said = said_of_quantization(directory.config)
    if said is None and directory.quantization is None:
        return None
    if said is not None and not isinstance(said, Mapping):
        raise ValueError(
            f"{directory.path}: the quantization_config of config.json is {short(said)}, expected an object"
        )
    method = MODELOPT.name if said is None else said.get("quant_method")
    if method == COMPRESSED_TENSORS.name:
        return _CompressedTensors.of(directory, said or {})
    if method == MODELOPT.name:
        return _ModelOpt.of(directory, said)
    if method == FP8.name:
        return FP8Claims.of(directory, said or {})
    if method == GPT_OSS.name:
        return GptOssClaims.of(directory, said or {})
    raise ValueError(
        f"{directory.path}: its quant_method is {short(method)}, which the library does not read; it reads "
        f"{', '.join(LAYOUTS)}, and dense directories. Dequantize it with the tool that wrote it"
    )


def _differing(said: Mapping[str, Any], expected: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """What is said otherwise than expected, of the keys that both have; None counts as not said."""
    return [
        f"{key} {short(said[key])}, expected {short(expected[key])}"
        for key in keys
        if said.get(key) is not None and expected.get(key) is not None and said[key] != expected[key]
    ]


# -- compressed-tensors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """A group's target: a module's name, `re:` and a pattern for its start, or a class of modules."""

    group: Mapping[str, Any]
    name: str
    pattern: re.Pattern[str] | None

    def rank(self, module: str) -> int | None:
        """How exactly it means a module: 0 by name, 1 by pattern, 2 by class; None where it does not mean it."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        return 0 if self.name == module else 2 if "." not in self.name else None


@dataclass(frozen=True)
class _CompressedTensors:
    """Groups of linears, each with a scheme."""

    targets: list[_Target]
    kv_cache: str | None
    layout: Layout = COMPRESSED_TENSORS
    kinds: Mapping[str, Recipe] = field(default_factory=lambda: KINDS)

    @staticmethod
    def of(directory: Directory, said: Mapping[str, Any]) -> "_CompressedTensors":
        """The claims of a quantization_config. Raises ValueError for sparse and malformed ones."""
        where = f"{directory.path}: the quantization_config of config.json"
        sparse = said.get("sparsity_config") or {}
        if not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense":
            raise ValueError(f"{where} says that weights are stored sparsely; the library reads dense ones")
        groups = said.get("config_groups")
        if not isinstance(groups, Mapping) or not all(_is_group(group) for group in groups.values()):
            raise ValueError(f"{where} has no config_groups, expected weights and targets in each")
        longest = max(map(len, directory.tensors), default=0)
        try:
            targets = [
                _Target(group, name, bounded(name[3:], longest) if name.startswith("re:") else None)
                for group in groups.values()
                for name in group["targets"]
            ]
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{where} has a target that is no pattern: {error}; name the modules") from error
        except ValueError as error:
            raise ValueError(f"{where} has a target that is not used: {error}; name the modules") from error
        return _CompressedTensors(targets, _kv_scheme(said.get("kv_cache_scheme")))

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """The most exact targets decide."""
        ranked = [(rank, target.group) for target in self.targets if (rank := target.rank(module)) is not None]
        if not ranked:
            return "no group of config.json has it as a target"
        best = min(rank for rank, _ in ranked)
        problems = [self._against(group, scheme) for rank, group in ranked if rank == best]
        return None if None in problems else problems[0]

    def said_of(self, module: str) -> str:
        """What the first of the most exact targets says."""
        ranked = [(rank, target) for target in self.targets if (rank := target.rank(module)) is not None]
        if not ranked:
            return ""
        weights = min(ranked, key=lambda pair: pair[0])[1].group["weights"]
        return ", ".join(f"{key} {short(weights[key])}" for key in WEIGHTS[:4] if weights.get(key) is not None)

    def _against(self, group: Mapping[str, Any], scheme: Scheme) -> str | None:
        expected, inputs = self.layout.schemes[scheme].config, group.get("input_activations")
        weights = group["weights"]
        problems = [f"weights of {each}" for each in _differing(weights, expected["weights"], WEIGHTS)]
        problems += [
            f"weights with {key} {short_each(weights.get(key))}"
            for key in ("actorder", "block_structure")
            if (_sizes(weights.get(key)) or None) != expected["weights"].get(key)
        ]
        if group.get("output_activations"):
            problems.append("quantized outputs")
        static = scheme.inputs == "static"
        if not inputs:
            problems += ["no quantized inputs, and an input scale is there"] if static else []
        elif inputs.get("dynamic") is True and static:
            problems.append("inputs quantized on the fly, and an input scale is there")
        elif inputs.get("dynamic") is not True and not static:
            problems.append("inputs under a calibrated scale, and none is there")
        else:
            wanted = expected["input_activations"] or expected["weights"]  # without any: as the weights, or not at all
            problems += [f"inputs of {each}" for each in _differing(inputs, wanted, ("num_bits", "type"))]
        return f"config.json says {'; '.join(problems)}" if problems else None


def _sizes(said: Any) -> Any:
    """[128, 128] for "128x128", as older tools write it; anything else as it is."""
    is_text = isinstance(said, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", said)
    return [int(size) for size in said.split("x")] if is_text else said


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, Mapping)
        and isinstance(group.get("weights"), Mapping)
        and isinstance(group.get("input_activations"), Mapping | None)
        and isinstance(group.get("targets"), list)
        and all(isinstance(name, str) for name in group["targets"])
    )


def _kv_scheme(said: Any) -> str | None:
    """Why a kv_cache_scheme is not the FP8 one."""
    if not isinstance(said, Mapping):
        return None
    problems = _differing(said, {"num_bits": 8, "type": "float", "symmetric": True}, WEIGHTS)
    return f"the kv_cache_scheme says {'; '.join(problems)}" if problems else None


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModelOpt:
    """One algorithm for all, or one for each layer; in hf_quant_config.json, in config.json, or in both."""

    said: list[tuple[str, Any]]  # file, its record
    kv_cache: str | None
    layout: Layout = MODELOPT
    kinds: Mapping[str, Recipe] = field(default_factory=lambda: KINDS)

    @staticmethod
    def of(directory: Directory, config: Mapping[str, Any] | None) -> "_ModelOpt":
        """The claims of both files. Raises ValueError where one of them names no algorithm."""
        said: list[tuple[str, Any]] = [] if config is None else [("config.json", config)]
        if directory.quantization is not None:
            said.append(("hf_quant_config.json", directory.quantization.get("quantization") or {}))
        kv_cache: str | None = None
        for file, record in said:
            if not isinstance(record, Mapping) or not isinstance(record.get("quant_algo"), str):
                raise ValueError(f"{directory.path}: {file} says no quant_algo, expected the name of one")
            layers = record.get("quantized_layers") or {}
            if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
                raise ValueError(f"{directory.path}: {file} has quantized_layers that are no objects, expected some")
            if record.get("kv_cache_quant_algo") not in KV_CACHE:
                kv_cache = f"{file} says kv_cache_quant_algo {short(record['kv_cache_quant_algo'])}"
            kv_cache = _kv_scheme(record.get("kv_cache_scheme")) or kv_cache
        return _ModelOpt(said, kv_cache)

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """Each file must name the scheme's algorithm."""
        expected = self.layout.schemes[scheme].config
        for file, record in self.said:
            layers = record.get("quantized_layers") or {}
            own = _nearest(layers, module) if layers else record
            if own is None:
                return f"it is none of the quantized_layers of {file}"
            problems = _differing(own, expected, ("quant_algo", "group_size"))
            if "quant_algo" not in own:
                problems.append("no quant_algo")
            if problems:
                return f"{file} says {'; '.join(problems)}"
        return None

    def said_of(self, module: str) -> str:
        """Its algorithm."""
        record = self.said[0][1]
        layers = record.get("quantized_layers") or {}
        own = (_nearest(layers, module) if layers else None) or record
        return short(own.get("quant_algo"))


def _nearest(layers: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """What is said of a module, or of the nearest module around it."""
    while module:
        if module in layers:
            found: Mapping[str, Any] = layers[module]
            return found
        module = module.rpartition(".")[0]
    return None
