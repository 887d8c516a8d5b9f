"""The layout of compressed-tensors, which llm-compressor writes and vLLM, SGLang and transformers read.

One group of linears for each scheme. Global scales are stored as reciprocals, tensor-wide ones with one element. Inputs
that are rotated at run time stand in its `transform_config`.
"""

from typing import Any

from dcp_adapters.hf.layouts.layout import (
    GROUPS_OF_INPUTS,
    HEADS,
    INPUT_SCALE,
    ONE,
    ONE_A_BLOCK,
    ONE_OVER,
    SHAPE,
    WORDS,
    Layout,
    Linears,
    Scheme,
    SchemeEntry,
    StoredAs,
    register_layout,
)
from dcp_adapters.hf.layouts.rotations import transform_config
from dcp_adapters.plain.words import few_of
from qtensor.formats.int4 import GROUPS

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
}


def _json(layout: Layout, linears: Linears) -> dict[str, Any]:
    """One group for each scheme; if there are several, each names its modules."""
    kinds = linears.kinds
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if len(kinds) == 1 else linears.names(linears.modules(scheme)),
            **layout.schemes[scheme].config,
        }
        for number, scheme in enumerate(kinds)
    }
    forms = {str(group["format"]) for group in groups.values()}
    quantization = {
        "quant_method": layout.name,
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


def _check_rotated(linears: Linears) -> None:
    """Refuse rotated inputs of linears with two names: which of them an engine looks up is not known."""
    renamed = [module for module in linears.rotated if module in linears.also]
    if renamed:
        raise ValueError(
            f"{few_of(renamed)}: the inputs are rotated at run time, and the module is {linears.also[renamed[0]]} in "
            "memory; engines find it by one of both names or by none, so the layout cannot say it: leave such linears "
            "out of online= of layerwise.rotate_"
        )


COMPRESSED_TENSORS = Layout(
    name="compressed-tensors",
    schemes=SCHEMES,
    kv_scales={"k_scale": "k_scale", "v_scale": "v_scale"},
    kv_form=ONE,
    kv_heads=HEADS,
    json=_json,
    rotates=True,
    lacks={Scheme("fp8_block", "static"): GROUPS_OF_INPUTS},
)
register_layout(COMPRESSED_TENSORS)
