"""The layout "fp8": Float8 in blocks of 128 x 128, as DeepSeek's files have it; vLLM, SGLang and transformers read it.

A scale for each block, `weight_scale_inv` fp32 [ceil(N / 128), ceil(K / 128)], by which the weight is multiplied. Files
by others may hold scales that are powers of two in 8 bits, or one scale for a whole weight; such files are read, and
never written.
"""

from typing import Any

from dcp_adapters.hf.layouts.layout import (
    GROUPS_OF_INPUTS,
    INPUT_SCALE,
    ONE_A_BLOCK,
    Layout,
    Linears,
    Scheme,
    SchemeEntry,
    StoredAs,
    register_layout,
)
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling

POWERS_OF_TWO = "ue8m0"  # what scale_fmt says
IGNORED = ("modules_to_not_convert", "ignored_layers")  # names of modules; this writes the first
_WEIGHT = StoredAs("payload", "weight")
_WHOLE = 'engines call such a scale by different names; use layout="compressed-tensors"'
BLOCKS = SchemeEntry(
    (_WEIGHT, StoredAs("scale", "weight_scale_inv", ONE_A_BLOCK, also=frozenset({"F8_E8M0"}))),
    {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
)


def _whole(scale: str, *inputs: str) -> tuple[Scheme, SchemeEntry]:
    """A weight with one scale, under the name that a tool gives it."""
    scheme = Scheme("fp8_tensor", "static" if inputs else "dynamic")
    stored = (_WEIGHT, StoredAs("scale", scale), *(StoredAs(INPUT_SCALE, name) for name in inputs))
    return scheme, SchemeEntry(stored, {"activation_scheme": scheme.inputs, "weight_block_size": None})


def _json(layout: Layout, linears: Linears) -> dict[str, Any]:
    """The quantization_config; scales that are powers of two are announced where all of them are."""
    _check_ignored(linears)
    told: dict[str, Any] = {"quant_method": layout.name, "fmt": "e4m3", **BLOCKS.config}
    recipes = [recipe for recipe in linears.recipes if isinstance(recipe, Float8BlockScaling)]
    if recipes and all(recipe.power_of_two for recipe in recipes):
        told["scale_fmt"] = POWERS_OF_TWO
    return {"config.json": {**told, IGNORED[0]: linears.names(linears.ignored)}}


def _check_ignored(linears: Linears) -> None:
    """Refuse an ignored module whose name ends a quantized one's, or is that of a module around it."""
    every = linears.names(linears.ignored)
    for module in linears.names(linears.schemes):
        ignored = next((name for name in every if is_meant(name, module)), None)
        if ignored is not None:
            raise ValueError(
                f"{module}: engines that read the layout {FP8.name} would take it for {ignored or 'the model itself'}, "
                "which is not quantized, as its name ends with that name, or begins with it and a dot; quantize both "
                'or neither, or use layout="compressed-tensors"'
            )


def is_meant(ignored: str, module: str) -> bool:
    """Whether a module is one that engines leave alone by this name."""
    return module.endswith(ignored) or module.startswith(f"{ignored}.")


FP8 = Layout(
    name="fp8",
    schemes={Scheme("fp8_block", "dynamic"): BLOCKS},
    kv_scales={"k_scale": "k_scale", "v_scale": "v_scale"},
    json=_json,
    lacks={
        Scheme("fp8_block", "static"): GROUPS_OF_INPUTS,
        Scheme("fp8_tensor", "static"): _WHOLE,
        Scheme("fp8_tensor", "dynamic"): _WHOLE,
    },
    also_reads=(
        _whole("weight_scale_inv"),
        _whole("weight_scale"),
        _whole("weight_scale_inv", "activation_scale"),
        _whole("weight_scale", "input_scale"),
    ),
)
register_layout(FP8)
