"""The layout of compressed-tensors, which llm-compressor writes and vLLM, SGLang and transformers read.

One group of linears for each scheme. Global scales are stored as reciprocals, tensor-wide ones with one element. Inputs
that are rotated at run time stand in its `transform_config`.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.files.patterns import bounded
from dcp_adapters.hf.layouts.forms import HEADS, ONE, ONE_A_BLOCK, ONE_OVER, WORDS
from dcp_adapters.hf.layouts.layout import (
    GROUPS_OF_INPUTS,
    INPUT_SCALE,
    SHAPE,
    Claims,
    Layout,
    Linears,
    Scheme,
    SchemeEntry,
    StoredAs,
    differing,
)
from dcp_adapters.hf.layouts.registry import register_layout
from dcp_adapters.hf.layouts.rotations import transform_config
from dcp_adapters.plain.words import few_of, names_in, short, short_each
from qtensor.formats.int4 import GROUPS

WEIGHTS = ("num_bits", "type", "strategy", "group_size", "symmetric")  # what decides how weights decode
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_TENSOR = {**FP8, "strategy": "tensor", "dynamic": False}
FP8_HEAD = {**FP8, "strategy": "attn_head", "dynamic": False}
FP8_TOKEN = {**FP8, "strategy": "token", "dynamic": True}
FP8_ROW = {**FP8, "strategy": "channel", "dynamic": False}
FP8_BLOCK = {**FP8, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
FP8_GROUP = {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}
MXFP8 = {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False}

INT8_ROW = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _entry(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *stored: StoredAs) -> SchemeEntry:
    config = {"format": form, "weights": weights, "input_activations": inputs, "output_activations": None}
    return SchemeEntry(stored, config)


_FP8 = StoredAs("payload", "weight")
_STATIC = StoredAs(INPUT_SCALE, "input_scale", ONE)
_NVFP4 = (
    StoredAs("payload", "weight_packed"),
    StoredAs("scale", "weight_scale"),
    StoredAs("global_scale", "weight_global_scale", ONE_OVER),
)
_INT4 = (
    StoredAs("payload", "weight_packed", WORDS),
    StoredAs("scale", "weight_scale"),
    StoredAs(SHAPE, "weight_shape"),
)
SCHEMES = {
    Scheme("fp8_tensor", "dynamic"): _entry(
        "float-quantized", FP8_TENSOR, FP8_TOKEN, _FP8, StoredAs("scale", "weight_scale", ONE)
    ),
    Scheme("fp8_tensor", "static"): _entry(
        "float-quantized", FP8_TENSOR, FP8_TENSOR, _FP8, StoredAs("scale", "weight_scale", ONE), _STATIC
    ),
    Scheme("fp8_row", "dynamic"): _entry(
        "float-quantized", FP8_ROW, FP8_TOKEN, _FP8, StoredAs("scale", "weight_scale")
    ),
    Scheme("fp8_row", "static"): _entry(
        "float-quantized", FP8_ROW, FP8_TENSOR, _FP8, StoredAs("scale", "weight_scale"), _STATIC
    ),
    Scheme("fp8_block", "dynamic"): _entry(
        "float-quantized", FP8_BLOCK, FP8_GROUP, _FP8, StoredAs("scale", "weight_scale", ONE_A_BLOCK)
    ),
    Scheme("mxfp8", "dynamic"): _entry(
        "mxfp8-quantized",
        {**MXFP8, "dynamic": False},
        {**MXFP8, "dynamic": True},
        _FP8,
        StoredAs("scale", "weight_scale"),
    ),
    Scheme("nvfp4", "none"): _entry("nvfp4-pack-quantized", {**NVFP4, "dynamic": False}, None, *_NVFP4),
    Scheme("nvfp4", "static"): _entry(
        "nvfp4-pack-quantized",
        {**NVFP4, "dynamic": False},
        {**NVFP4, "dynamic": "local"},
        *_NVFP4,
        StoredAs(INPUT_SCALE, "input_global_scale", ONE_OVER),
    ),
    Scheme("mxfp4", "none"): _entry(
        "mxfp4-pack-quantized",
        {**MXFP4, "scale_dtype": "torch.uint8"},
        None,
        StoredAs("payload", "weight_packed"),
        StoredAs("scale", "weight_scale"),
    ),
    **{
        Scheme(f"int4_{group}", "none"): _entry("pack-quantized", {**INT4, "group_size": group}, None, *_INT4)
        for group in GROUPS
    },
    Scheme("int8_row", "dynamic"): _entry(
        "int-quantized", INT8_ROW, INT8_TOKEN, StoredAs("payload", "weight"), StoredAs("scale", "weight_scale")
    ),
}


class CompressedTensors(Layout):
    """The JSON has groups of linears, each with a scheme."""

    def json(self, linears: Linears) -> dict[str, Any]:
        """Return one group for each scheme; if there are several, each names its modules."""
        kinds = linears.kinds
        groups = {
            f"group_{number}": {
                "targets": ["Linear"] if len(kinds) == 1 else linears.names(linears.modules(scheme)),
                **self.schemes[scheme].config,
            }
            for number, scheme in enumerate(kinds)
        }
        forms = {str(group["format"]) for group in groups.values()}
        quantization = {
            "quant_method": self.name,
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": {"tensor": FP8_TENSOR, "head": FP8_HEAD, None: None}[linears.kv_cache],
            "ignore": linears.names(linears.ignored),
            "config_groups": groups,
        }
        if linears.rotated:
            _check_rotated(linears)
            quantization["transform_config"] = transform_config(linears.rotated)
        return {"config.json": quantization}

    def claims(self, directory: Directory, said: Mapping[str, Any]) -> "CompressedTensorsClaims":
        """Read the groups; refuse sparse weights and malformed groups."""
        where = f"{directory.path}: the quantization_config of config.json"
        sparse = said.get("sparsity_config") or {}
        if not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense":
            raise ValueError(f"{where} says that weights are stored sparsely; the library reads dense ones")
        groups = said.get("config_groups")
        if not isinstance(groups, Mapping) or not all(_is_group(group) for group in groups.values()):
            raise ValueError(f"{where} has no config_groups, expected weights and targets in each")
        # Patterns come from the directory, which is not trusted: one that could match for ever is refused.
        longest = max(map(len, directory.tensors), default=0)
        try:
            targets = [_Target.of(name, longest, group) for group in groups.values() for name in group["targets"]]
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{where} has a target that is no pattern: {error}; name the modules") from error
        except ValueError as error:
            raise ValueError(f"{where} has a target that is not used: {error}; name the modules") from error
        kv_cache = kv_cache_problem(said.get("kv_cache_scheme"))
        return CompressedTensorsClaims(
            layout=self, kv_cache=kv_cache, targets=targets, left=names_in(said.get("ignore")), longest=longest
        )


def _check_rotated(linears: Linears) -> None:
    """Refuse rotated inputs of linears with two names: which of them an engine looks up is not known."""
    renamed = [module for module in linears.rotated if module in linears.also]
    if renamed:
        raise ValueError(
            f"{few_of(renamed)}: the inputs are rotated at run time, and the module is {linears.also[renamed[0]]} in "
            "memory; engines find it by one of both names or by none, so the layout cannot say it: leave such linears "
            "out of online= of layerwise.rotate_"
        )


@dataclass(frozen=True)
class _Target:
    """A group's target: a module's name, `re:` and a pattern for its start, or a class of modules."""

    group: Mapping[str, Any]
    name: str
    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, name: str, longest: int, group: Mapping[str, Any]) -> "_Target":
        """Return a target by its name; `longest`: characters of a name that it is compared with."""
        return cls(group, name, bounded(name[3:], longest) if name.startswith("re:") else None)

    def rank(self, module: str) -> int | None:
        """Return how exactly it means a module: 0 by name, 1 by pattern, 2 by class; None if it does not mean it."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        # Files do not say of which class a module is, so any class may mean it, after names and patterns.
        return 0 if self.name == module else 2 if "." not in self.name else None


@dataclass(frozen=True, kw_only=True)
class CompressedTensorsClaims(Claims):
    """What the groups say of the modules that are their targets.

    Attributes:
        targets: of all groups.
        left: the names and patterns of `ignore`, as they stand there.
        longest: characters of the longest name of a tensor.
    """

    targets: list[_Target]
    left: list[str]
    longest: int

    @functools.cached_property
    def ignored(self) -> list[_Target]:
        """What `left` means; a pattern that could take for ever raises ValueError, for whoever asks."""
        try:
            return [_Target.of(name, self.longest, {}) for name in self.left]
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            raise ValueError(
                f"the quantization_config of config.json has a name in `ignore` that is not used: {error}; name the "
                "modules"
            ) from error

    def problem(self, module: str, scheme: Scheme) -> str | None:
        """Compare the scheme with the groups of the most exact targets, which decide."""
        ranked = [(rank, target.group) for target in self.targets if (rank := target.rank(module)) is not None]
        if not ranked:
            return "no group of config.json has it as a target"
        best = min(rank for rank, _ in ranked)
        problems = [self._compare(group, scheme) for rank, group in ranked if rank == best]
        return None if None in problems else problems[0]

    def left_alone_by(self, module: str) -> str | None:
        """Return the name of `ignore`, or the pattern, that means the module; names of classes are not known here."""
        exact = (0, 1)
        return next((target.name for target in self.ignored if target.rank(module) in exact), None)

    def means_linear(self, module: str) -> bool:
        """Return whether a group has it as a target, and it is not left alone."""
        meant = any(target.rank(module) is not None for target in self.targets)
        return meant and self.left_alone_by(module) is None

    def said_of(self, module: str) -> str:
        """Return what the first of the most exact targets says."""
        ranked = [(rank, target) for target in self.targets if (rank := target.rank(module)) is not None]
        if not ranked:
            return ""
        weights = min(ranked, key=lambda pair: pair[0])[1].group["weights"]
        return ", ".join(f"{key} {short(weights[key])}" for key in WEIGHTS[:4] if weights.get(key) is not None)

    def _compare(self, group: Mapping[str, Any], scheme: Scheme) -> str | None:
        expected, inputs = self.layout.schemes[scheme].config, group.get("input_activations")
        weights = group["weights"]
        problems = [f"weights of {each}" for each in differing(weights, expected["weights"], WEIGHTS)]
        # Compared also if only one side says them: an order of columns, or blocks, changes what the codes mean.
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
            problems += [f"inputs of {each}" for each in differing(inputs, wanted, ("num_bits", "type"))]
        return f"config.json says {'; '.join(problems)}" if problems else None


def _sizes(said: Any) -> Any:
    """Return [128, 128] for "128x128", as older tools write it; anything else as it is."""
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


def kv_cache_problem(said: Any) -> str | None:
    """Say why a kv_cache_scheme is not the FP8 one; None if it is, or if there is none."""
    if not isinstance(said, Mapping):
        return None
    problems = differing(said, {"num_bits": 8, "type": "float", "symmetric": True}, WEIGHTS)
    return f"the kv_cache_scheme says {'; '.join(problems)}" if problems else None


COMPRESSED_TENSORS = CompressedTensors(
    name="compressed-tensors",
    schemes=SCHEMES,
    kv_scales={"k_scale": "k_scale", "v_scale": "v_scale"},
    kv_form=ONE,
    kv_heads=HEADS,
    rotates=True,
    lacks={Scheme("fp8_block", "static"): GROUPS_OF_INPUTS},
)
register_layout(COMPRESSED_TENSORS)
