"""Models that other libraries quantized, by name; each with the values that the library itself decodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

IN, INNER, OUT = 256, 160, 96  # 160 and 96 rows: neither is a multiple of 128, and all of 32
LAYERS = ("0", "2")
POWER_OF_TWO = 2.0**14  # a global scale whose reciprocal is exact; 2688 / amax is a little less


@dataclass(frozen=True)
class Foreign:
    """A model that a library quantized.

    model: it. values: of each weight, by the library's own decoder, in the dtype that this computes in. recipe: what
    the weights become, as its repr begins.
    """

    model: nn.Module
    values: Mapping[str, Tensor]
    recipe: str


def dense(*, dtype: torch.dtype = torch.bfloat16, inner: int = INNER, out: int = OUT) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(IN, inner, dtype=dtype), nn.ReLU(), nn.Linear(inner, out, bias=False, dtype=dtype))


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(7, IN, generator=torch.Generator().manual_seed(5), dtype=torch.float32).to(dtype)


def linears(model: nn.Module) -> dict[str, Any]:
    return {name: model.get_submodule(name) for name in LAYERS}


# -- torchao -----------------------------------------------------------------------------------------------------------


def _torchao(config: Callable[[], Any], recipe: str, *, sizes: Mapping[str, int] | None = None) -> Foreign:
    from torchao.quantization import quantize_

    model = dense(**(sizes or {}))
    quantize_(model, config())
    # Its 4-bit whole numbers decode in the dtype that they appear in.
    whole = "Intx" in type(model[0].weight).__name__
    args = () if whole else (torch.float32,)
    values = {name: linear.weight.dequantize(*args) for name, linear in linears(model).items()}
    return Foreign(model, values, recipe)


def _float8_only() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig()


def _float8_of(granularity: str, *args: Any) -> Foreign:
    """Float8Tensors whose configuration asks for a GPU: made by the class's own constructor."""
    from torchao.quantization import Float8Tensor
    from torchao.quantization import granularity as granularities

    blocks = granularity == "PerBlock"
    model = dense(inner=256, out=128) if blocks else dense()
    for linear in linears(model).values():
        made = Float8Tensor.from_hp(linear.weight.detach(), granularity=getattr(granularities, granularity)(*args))
        linear.weight = nn.Parameter(made, requires_grad=False)
    values = {name: linear.weight.dequantize(torch.float32) for name, linear in linears(model).items()}
    recipe = "Float8BlockScaling" if blocks else "Float8CurrentScaling(element='e4m3', granularity='tensor'"
    return Foreign(model, values, recipe)


def _nvfp4(*, two_levels: bool) -> Any:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=two_levels)


def _mx(element: torch.dtype, mode: str = "RCEIL") -> Any:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    return MXDynamicActivationMXWeightConfig(
        activation_dtype=element,
        weight_dtype=element,
        kernel_preference=KernelPreference.EMULATED,
        scaling_mode=getattr(ScaleCalculationMode, mode),
    )


def _int4(group: int) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group))


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(version=2)


def _int8_of_tensor() -> Foreign:
    from torchao.quantization import PerTensor
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    model = dense()
    for linear in linears(model).values():
        linear.weight = nn.Parameter(Int8Tensor.from_hp(linear.weight.detach(), PerTensor()), requires_grad=False)
    values = {name: linear.weight.dequantize(torch.float32) for name, linear in linears(model).items()}
    return Foreign(model, values, "Int8RowScaling")


# -- transformers ------------------------------------------------------------------------------------------------------


def _fp8_linears(*, blocks: bool, ue8m0: bool = False) -> Foreign:
    """FP8Linears by their class; from_pretrained makes them on GPUs alone. Its own operations quantize and decode."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    model = dense(inner=256, out=128)
    size = (128, 128) if blocks else None
    config = FineGrainedFP8Config(weight_block_size=size, scale_fmt="ue8m0" if ue8m0 else "float")
    quantizer = type("Quantizer", (), {"quantization_config": config})()
    values: dict[str, Tensor] = {}
    for name, linear in linears(model).items():
        weight = linear.weight.detach()
        made: Any = FP8Linear(
            *(weight.shape[1], weight.shape[0]),
            block_size=size,
            scale_fmt=config.scale_fmt,
            has_bias=linear.bias is not None,
        )
        found = Fp8Quantize(quantizer).convert({f"{name}.weight": weight})
        codes = found[f"{name}.weight"]
        scale = next(value for key, value in found.items() if key.endswith("scale_inv")).reshape(
            made.weight_scale_inv.shape
        )
        made.weight = nn.Parameter(codes, requires_grad=False)
        made.weight_scale_inv = nn.Parameter(scale.to(made.weight_scale_inv.dtype), requires_grad=False)
        if linear.bias is not None:
            made.bias = linear.bias
        decoder = Fp8Dequantize(quantizer)
        values[name] = decoder._dequantize_one(codes, made.weight_scale_inv.detach(), torch.float32)
        model.set_submodule(name, made)
    recipe = "Float8BlockScaling" if blocks else "Float8CurrentScaling(element='e4m3', granularity='tensor'"
    return Foreign(model, values, recipe)


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def compressed(
    scheme: str, recipe: str, *, dense_again: bool = False, wide: float | None = None, **sizes: int
) -> Foreign:
    """A model of compressed modules, or decompressed ones with their scales; `wide`: the global scale of NVFP4."""
    from compressed_tensors.compressors.base import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = dense(**sizes)
    made = preset_name_to_scheme(scheme, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": made}))
    values = {}
    for name, linear in linears(model).items():
        _calibrate(linear, wide)
        compress_module(linear)
        decoded: Any = linear if dense_again else copy.deepcopy(linear)
        decompress_module(decoded)
        values[name] = decoded.weight.detach().clone()
    return Foreign(model, values, recipe)


def _calibrate(linear: Any, given: float | None) -> None:
    """Set the scales of a weight as its observers would: from amaxes, by the library's own functions."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = linear.quantization_scheme.weights
    weight = linear.weight.detach().float()
    wide = None
    if args.strategy == "tensor_group":
        wide = generate_gparam(weight.min(), weight.max()) if given is None else torch.tensor(given)
        linear.weight_global_scale.data = wide.reshape(linear.weight_global_scale.shape).to(
            linear.weight_global_scale.dtype
        )
    if args.strategy in ("group", "tensor_group"):
        tiles = weight.unflatten(-1, (-1, args.group_size))
        low, high = tiles.amin(-1), tiles.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    elif args.strategy == "block":
        size = args.block_structure[0]
        rows, columns = (-(-side // size) for side in weight.shape)
        padded = nn.functional.pad(weight, (0, columns * size - weight.shape[1], 0, rows * size - weight.shape[0]))
        tiles = padded.reshape(rows, size, columns, size)
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        low, high = weight.min(), weight.max()
    scale, _ = calculate_qparams(low, high, args, global_scale=wide)
    linear.weight_scale.data = scale.reshape(linear.weight_scale.shape).to(linear.weight_scale.dtype)


def weights_of(kind: Any, **args: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return kind(targets=["Linear"], weights=QuantizationArgs(**args))


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


def _modelopt(config: str, recipe: str, **sizes: int) -> Foreign:
    import modelopt.torch.quantization as mtq

    model = dense(**sizes)
    batch = inputs()
    mtq.quantize(model, getattr(mtq, config), lambda net: net(batch))
    mtq.compress(model)
    values = {}
    for name, linear in linears(model).items():
        quantizer = linear.weight_quantizer
        axes = {axis: size for axis, size in (quantizer.block_sizes or {}).items() if isinstance(axis, int)}
        values[name] = (
            linear.weight.get_qtensor()
            .dequantize(
                torch.float32,
                scale=quantizer._scale,
                double_scale=getattr(quantizer, "_double_scale", None),
                block_sizes=axes or None,
            )
            .reshape(linear.out_features, linear.in_features)
        )
    return Foreign(model, values, recipe)


def _left_behind() -> Foreign:
    """A forward that a calibration of ModelOpt put into its modules and took away: that of the class stays there."""
    from modelopt.torch.utils.network import bind_forward_method, unpatch_forward_method

    foreign = _modelopt("FP8_DEFAULT_CFG", FP8_TENSOR)
    for linear in linears(foreign.model).values():
        bind_forward_method(linear, lambda self, x: x, "_kept")
        unpatch_forward_method(linear, "_kept")
        assert "forward" in vars(linear)
    return foreign


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def bitsandbytes_4bit(recipe: str, *, kind: str = "nf4", block: int = 64, nested: bool = False) -> Foreign:
    """Linear4bits; K of both is a multiple of their blocks. The library's decoder gives values in fp32."""
    import bitsandbytes as bnb

    model, values = dense(inner=256), {}
    for name, linear in linears(model).items():
        weight = linear.weight.detach()
        made: Any = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], linear.bias is not None, quant_type=kind)
        packed, state = bnb.functional.quantize_4bit(weight, None, None, block, nested, kind)
        made.weight = bnb.nn.Params4bit(packed, False, state, block, nested, kind, bnb_quantized=True, module=made)
        made.bias = linear.bias
        wide = copy.copy(state)
        wide.dtype = torch.float32
        values[name] = bnb.functional.dequantize_4bit(packed, wide)
        model.set_submodule(name, made)
    return Foreign(model, values, recipe)


def bitsandbytes_8bit() -> Foreign:
    import bitsandbytes as bnb

    model, values = dense(), {}
    for name, linear in linears(model).items():
        weight = linear.weight.detach()
        made: Any = bnb.nn.Linear8bitLt(weight.shape[1], weight.shape[0], linear.bias is not None, False)
        made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
        made.bias = linear.bias
        values[name] = bnb.functional.int8_vectorwise_dequant(made.weight.data, made.weight.SCB)
        model.set_submodule(name, made)
    return Foreign(model, values, "Int8RowScaling")


FP8_TENSOR = "Float8CurrentScaling(element='e4m3', granularity='tensor'"
FP8_ROW = "Float8CurrentScaling(element='e4m3', granularity='row'"
FOREIGN: dict[str, Callable[[], Foreign]] = {
    "torchao Float8 row": partial(_torchao, _float8_only, FP8_ROW),
    "torchao Float8 tensor": partial(_float8_of, "PerTensor"),
    "torchao Float8 128x128": partial(_float8_of, "PerBlock", [128, 128]),
    "torchao Float8 1x128": partial(_float8_of, "PerBlock", [1, 128]),
    "torchao NVFP4 two levels": partial(_torchao, partial(_nvfp4, two_levels=True), "NVFP4BlockScaling"),
    "torchao NVFP4 one level": partial(_torchao, partial(_nvfp4, two_levels=False), "NVFP4BlockScaling"),
    "torchao MXFP8": partial(_torchao, partial(_mx, torch.float8_e4m3fn), "MXFP8BlockScaling"),
    "torchao MXFP8 floor": partial(_torchao, partial(_mx, torch.float8_e4m3fn, "FLOOR"), "MXFP8BlockScaling"),
    "torchao MXFP8 even": partial(_torchao, partial(_mx, torch.float8_e4m3fn, "EVEN"), "MXFP8BlockScaling"),
    "torchao MXFP4": partial(_torchao, partial(_mx, torch.float4_e2m1fn_x2), "MXFP4BlockScaling"),
    "torchao INT4 32": partial(_torchao, partial(_int4, 32), "Int4GroupScaling(group=32)"),
    "torchao INT4 256": partial(_torchao, partial(_int4, 256), "Int4GroupScaling(group=128)", sizes={"inner": 256}),
    "torchao INT8": partial(_torchao, _int8, "Int8RowScaling"),
    "torchao INT8 tensor": _int8_of_tensor,
    "bitsandbytes NF4": partial(bitsandbytes_4bit, "NF4BlockScaling(block=64)"),
    "bitsandbytes NF4 nested": partial(bitsandbytes_4bit, "NF4BlockScaling(block=64)", nested=True),
    "bitsandbytes NF4 256": partial(bitsandbytes_4bit, "NF4BlockScaling(block=128)", block=256, nested=True),
    "transformers FP8 blocks": partial(_fp8_linears, blocks=True),
    "transformers FP8 tensor": partial(_fp8_linears, blocks=False),
    "transformers FP8 E8M0": partial(_fp8_linears, blocks=True, ue8m0=True),
    "compressed-tensors FP8": partial(compressed, "FP8", FP8_TENSOR),
    "compressed-tensors FP8 dynamic": partial(compressed, "FP8_DYNAMIC", FP8_ROW),
    "compressed-tensors FP8 blocks": partial(compressed, "FP8_BLOCK", "Float8BlockScaling"),
    "compressed-tensors MXFP8": partial(compressed, "MXFP8", "MXFP8BlockScaling"),
    "compressed-tensors NVFP4": partial(compressed, "NVFP4A16", "NVFP4BlockScaling", wide=POWER_OF_TWO),
    "compressed-tensors MXFP4": partial(compressed, "MXFP4A16", "MXFP4BlockScaling"),
    "compressed-tensors INT4": partial(compressed, "W4A16", "Int4GroupScaling(group=128)", inner=256),
    "compressed-tensors INT8": partial(compressed, "W8A8", "Int8RowScaling"),
    "compressed-tensors FP8 dense": partial(compressed, "FP8_DYNAMIC", FP8_ROW, dense_again=True),
    "compressed-tensors INT4 dense": partial(
        compressed, "W4A16", "Int4GroupScaling(group=128)", dense_again=True, inner=256
    ),
    "compressed-tensors MXFP4 dense": partial(compressed, "MXFP4A16", "MXFP4BlockScaling", dense_again=True),
    "ModelOpt FP8": partial(_modelopt, "FP8_DEFAULT_CFG", FP8_TENSOR),
    "ModelOpt FP8 patched": _left_behind,
    "ModelOpt FP8 row": partial(_modelopt, "FP8_PER_CHANNEL_PER_TOKEN_CFG", FP8_ROW),
    "ModelOpt FP8 blocks": partial(
        _modelopt, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "Float8BlockScaling", inner=256, out=128
    ),
    "ModelOpt MXFP8": partial(_modelopt, "MXFP8_DEFAULT_CFG", "MXFP8BlockScaling"),
    "ModelOpt MXFP4": partial(_modelopt, "MXFP4_DEFAULT_CFG", "MXFP4BlockScaling"),
    "ModelOpt NVFP4": partial(_modelopt, "NVFP4_DEFAULT_CFG", "NVFP4BlockScaling"),
}
