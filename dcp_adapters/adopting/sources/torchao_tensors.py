"""Weights of ours as torchao's tensors: what `release` gives back. torchao is imported when a weight is asked for."""

import importlib
from typing import Any

import torch
from torch import Tensor

from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling
from qtensor.formats.int4 import Int4GroupScaling
from qtensor.formats.int8 import Int8RowScaling
from qtensor.formats.mxfp4 import MXFP4BlockScaling
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.formats.nvfp4 import NVFP4BlockScaling
from qtensor.products.dynamic import swizzle
from qtensor.spec.codecs.nibbles import unpacked
from qtensor.tensor.quantized_tensor import QuantizedTensor

EXPORT = "write a directory by export_hf instead"
MODES = {"up": "RCEIL", "floor": "FLOOR"}  # of torchao's ScaleCalculationMode
TENSOR_CORES_OF_MX = (10, 0)  # compute capability from which torchao's MX products run


def _torchao(module: str) -> Any:
    return importlib.import_module(f"torchao.{module}")


def give(weight: QuantizedTensor) -> Tensor:
    """Return torchao's tensor with the bytes of a weight [N, K].

    Raises:
        ValueError: torchao has none that computes the same.
    """
    recipe: Any = weight.recipe
    made: Tensor
    if isinstance(recipe, MXFP8BlockScaling | MXFP4BlockScaling):
        made = _mx(weight, recipe)
    elif recipe.activations is not None:
        raise ValueError(f"torchao quantizes the inputs of such weights by other formulas than {recipe} does; {EXPORT}")
    elif isinstance(recipe, Float8CurrentScaling | Float8BlockScaling):
        made = _float8(weight, recipe)
    elif isinstance(recipe, NVFP4BlockScaling):
        made = _nvfp4(weight)
    elif isinstance(recipe, Int4GroupScaling):
        made = _int4(weight, recipe)
    elif isinstance(recipe, Int8RowScaling):
        made = _int8(weight)
    else:
        raise ValueError(f"torchao has no tensor for {recipe}; {EXPORT}")
    return made


def _int8(weight: Any) -> Tensor:
    kind = _torchao("quantization.quantize_.workflows.int8.int8_tensor").Int8Tensor
    parts = weight.parts()
    zeros = torch.zeros(parts["scale"].shape, dtype=torch.int8, device=weight.device)
    return kind(parts["payload"], parts["scale"], [1, weight.shape[1]], weight.dtype, zeros)  # type: ignore[no-any-return]


def _float8(weight: Any, recipe: Any) -> Tensor:
    rows, columns = weight.shape
    parts = weight.parts()
    scale = parts["scale"]
    if isinstance(recipe, Float8BlockScaling):
        size = [BLOCK if recipe.blocks == "square" else 1, BLOCK]
        if rows % size[0] or columns % size[1]:
            raise ValueError(f"a weight {(rows, columns)}, whose last blocks of {size} are smaller; {EXPORT}")
        scale = scale[:: size[0]]
    elif recipe.granularity == "row":
        size = [1, columns]
    else:
        size, scale = [rows, columns], scale.reshape(1, 1)
    kind = _torchao("quantization").Float8Tensor
    return kind(parts["payload"], scale.contiguous(), block_size=size, dtype=weight.dtype)  # type: ignore[no-any-return]


def _mx(weight: Any, recipe: Any) -> Tensor:
    """Return an MXTensor that quantizes its inputs: torchao has no product of MX weights with others."""
    if recipe.activations is None:
        raise ValueError(f"torchao multiplies MX weights by quantized inputs alone, and {recipe} leaves them; {EXPORT}")
    mx, common = _torchao("prototype.mx_formats.mx_tensor"), _torchao("quantization.quantize_.common")
    config = _torchao("prototype.mx_formats.config")
    parts, packed = weight.parts(), isinstance(recipe, MXFP4BlockScaling)
    element = torch.float4_e2m1fn_x2 if packed else parts["payload"].dtype
    fast = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= TENSOR_CORES_OF_MX
    kernels = common.KernelPreference.AUTO if fast else common.KernelPreference.EMULATED
    inputs = mx.QuantizeTensorToMXKwargs(
        elem_dtype=element,
        block_size=32,
        kernel_preference=kernels,
        is_swizzled_scales=True,
        scaling_mode=getattr(config.ScaleCalculationMode, MODES[recipe.scale_rounding]),
    )
    scale = _tiles(parts["scale"]).view(torch.float8_e8m0fnu)
    return mx.MXTensor(parts["payload"], scale, element, 32, weight.dtype, kernels, inputs, True)  # type: ignore[no-any-return]


def _nvfp4(weight: Any) -> Tensor:
    kind, parts = _torchao("prototype.mx_formats.nvfp4_tensor").NVFP4Tensor, weight.parts()
    return kind(  # type: ignore[no-any-return]
        parts["payload"],
        _tiles(parts["scale"]),
        16,
        weight.dtype,
        per_tensor_scale=parts["global_scale"],
        is_swizzled_scales=True,
    )


def _int4(weight: Any, recipe: Int4GroupScaling) -> Tensor:
    parts = weight.parts()
    scale = parts["scale"].to(weight.dtype)
    if not torch.equal(scale.float().nan_to_num(), parts["scale"].float().nan_to_num()):
        raise ValueError(f"scales that {weight.dtype} does not hold; {EXPORT}")
    kind = _torchao("quantization").IntxUnpackedToInt8Tensor
    zeros = torch.zeros(scale.shape, dtype=torch.int8, device=scale.device)
    codes = unpacked(parts["payload"]).to(torch.int8) - 8
    element = getattr(torch, "int4")  # noqa: B009 - types of torch do not know it
    return kind(codes, scale, zeros, element, (1, recipe.group), weight.dtype, None)  # type: ignore[no-any-return]


def _tiles(scale: Tensor) -> Tensor:
    """Return scales of blocks as tensor cores read them, in the shape that torchao gives to that."""
    rows, blocks = scale.shape
    return swizzle(scale).view(-(-rows // 128) * 32, -(-blocks // 4) * 16)
