"""torchao: the tensors that `torchao.quantization.quantize_` puts into nn.Linear; torchao_tensors.py: the way back.

    Float8Tensor              qdata [N, K], scale fp32 [N, 1] | [1, 1] | blocks     qdata * scale
    MXTensor                  qdata [N, K] or packed, scale E8M0                    qdata * 2^(scale - 127)
    NVFP4Tensor               qdata packed, scale E4M3, per_tensor_scale or None    qdata * (scale * per_tensor_scale)
    IntxUnpackedToInt8Tensor  qdata int8 [N, K], scale, zero_point [N, K / group]   (qdata - zero_point) * scale
    Int8Tensor                qdata int8 [N, K], scale fp32 [N, 1] | [1, 1]         (qdata - zero_point) * scale
    Int4Tensor                qdata packed, scale, zero_point [K / group, N]        qdata * scale + zero_point

Packed: two codes a byte, the low one first, as ours. Scales of blocks may be swizzled for tensor cores; here they never
are. MX inputs are quantized by our formulas, bit for bit, where the scaling mode is FLOOR or RCEIL; those of Float8 and
NVFP4 have scales of other formulas.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.source import Source, qualified
from dcp_adapters.adopting.sources.packing import groups_of, int4_taken, packed_int4
from dcp_adapters.adopting.sources.torchao_tensors import give
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling
from qtensor.formats.int8 import Int8RowScaling
from qtensor.formats.mxfp4 import MXFP4BlockScaling
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.formats.nvfp4 import NVFP4BlockScaling
from qtensor.spec.codecs.fp8 import ELEMENTS
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES
from qtensor.tensor.quantized_tensor import QuantizedTensor

ELEMENT_OF = {dtype: element for element, (dtype, _) in ELEMENTS.items()}
ROUNDING_OF = {"FLOOR": "floor", "RCEIL": "up"}  # of torchao's ScaleCalculationMode
INPUTS = "torchao quantized its inputs by other formulas; here they stay as they are"
OF_INPUTS = ("act_quant_kwargs", "act_quant_scale", "activation_quantization")  # of its tensors, where it does so


def unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the scales of blocks [rows, blocks] that tensor cores read in tiles (the inverse of `swizzle`)."""
    tiles = -(-rows // 128), -(-blocks // 4)
    tiled = scale.contiguous().view(torch.uint8).reshape(*tiles, 32, 4, 4)  # [.., .., r % 32, r // 32, block]
    whole = tiled.permute(0, 3, 2, 1, 4).reshape(tiles[0] * 128, tiles[1] * 4)
    return whole[:rows, :blocks].contiguous().view(scale.dtype)


def _float8(weight: Any) -> Outcome:
    element = ELEMENT_OF.get(weight.qdata.dtype)
    size = tuple(weight.block_size or weight.shape)
    if element is None:
        return Refused(reason=f"elements {weight.qdata.dtype}", values=weight.dequantize)
    note = "" if weight.act_quant_kwargs is None else INPUTS
    scale = weight.scale
    recipe: Recipe
    if size == (1, weight.shape[1]):
        recipe = Float8CurrentScaling(element=element)
    elif size == tuple(weight.shape):
        recipe, scale = Float8CurrentScaling(element=element, granularity="tensor"), scale.reshape(())
    elif size == (1, BLOCK):
        recipe = Float8BlockScaling(element=element, blocks="row")
    elif size == (BLOCK, BLOCK):
        recipe, scale = Float8BlockScaling(element=element), scale.repeat_interleave(BLOCK, dim=0)
    else:
        return Refused(
            reason=f"scales of blocks of {size}, where Float8 has those of rows, tensors and blocks of {BLOCK}",
            values=weight.dequantize,
            nearest=Float8CurrentScaling(element=element),
            note=note,
        )
    return _taken({"payload": weight.qdata, "scale": scale}, recipe, weight, note)


def _mx(weight: Any) -> Outcome:
    kwargs = weight.act_quant_kwargs
    mode = getattr(getattr(kwargs, "scaling_mode", None), "name", None)
    same = kwargs is not None and kwargs.elem_dtype == weight.elem_dtype and kwargs.block_size == weight.block_size
    dynamic = same and mode in ROUNDING_OF
    note = "" if dynamic or kwargs is None else f"{INPUTS} (scaling mode {mode})"
    options = {"scale_rounding": ROUNDING_OF[str(mode)], "activations": "dynamic"} if dynamic else {}
    packed = weight.elem_dtype == torch.float4_e2m1fn_x2
    if weight.block_size != 32 or not (packed or weight.elem_dtype in ELEMENT_OF):
        return Refused(
            reason=f"{weight.elem_dtype} in blocks of {weight.block_size}, where MX here has E4M3, E5M2 and E2M1 in 32",
            values=weight.dequantize,
            nearest=MXFP8BlockScaling(),
            note=note,
        )
    scale = _scale(weight, 32).view(torch.uint8)
    if packed:
        parts = {"payload": weight.qdata.view(torch.uint8), "scale": scale}
        return _taken(parts, MXFP4BlockScaling(**options), weight, note)
    recipe = MXFP8BlockScaling(element=ELEMENT_OF[weight.elem_dtype], **options)
    return _taken({"payload": weight.qdata, "scale": scale}, recipe, weight, note)


def _nvfp4(weight: Any) -> Outcome:
    wide = weight.per_tensor_scale
    if weight.block_size != 16 or (wide is not None and wide.numel() != 1):
        return Refused(
            reason=f"blocks of {weight.block_size} under {0 if wide is None else wide.numel()} global scales",
            values=weight.dequantize,
            nearest=NVFP4BlockScaling(),
        )
    wide = torch.ones((), dtype=torch.float32, device=weight.qdata.device) if wide is None else wide.reshape(())
    note = "" if weight.act_quant_kwargs is None else INPUTS
    if weight.act_per_tensor_scale is not None:
        note = f"{INPUTS}; their calibrated scale {float(weight.act_per_tensor_scale):.9g} is left out"
    parts = {"payload": weight.qdata.view(torch.uint8), "scale": _scale(weight, 16), "global_scale": wide}
    return _taken(parts, NVFP4BlockScaling(), weight, note)


def _scale(weight: Any, block: int) -> Tensor:
    """Return the scales of blocks row by row; as they are if their tiles are not those of this shape, none of a weight.

    A transposed weight has the tiles of the other shape: as many bytes if it is square, and in another order.
    """
    rows, columns = weight.shape
    scale: Tensor = weight.scale
    blocks = columns // block
    tiles = -(-rows // 128) * 32, -(-blocks // 4) * 16
    return unswizzled(scale, rows, blocks) if weight.is_swizzled_scales and scale.shape == tiles else scale


def _intx(weight: Any) -> Outcome:
    note = "" if weight.activation_quantization is None else INPUTS
    group = tuple(weight.block_size)[-1]

    def refused(reason: str) -> Refused:
        near = groups_of(weight.shape[1], group)
        return Refused(reason=reason, values=weight.dequantize, nearest=near, note=note)

    if weight.target_dtype is not getattr(torch, "int4", None):  # types of torch do not know it
        return refused(f"{weight.target_dtype}, where whole numbers here have 4 bits")
    if tuple(weight.block_size)[:-1] != (1,):
        return refused(f"scales of blocks of {tuple(weight.block_size)}, where INT4 has those of groups in a row")
    if bool((weight.zero_point != 0).any()):
        return refused("zero points, which INT4 here does not have")
    return int4_taken(lambda: packed_int4(weight.qdata), weight.scale, group, weight.dtype, refused, note)


def _int4(weight: Any) -> Outcome:
    """Read the signed nibbles of mslk's `pack_int4`; the class has no `dequantize`."""
    note = "" if weight.activation_dtype == torch.bfloat16 else INPUTS
    group = tuple(weight.block_size)[-1]
    payload = weight.qdata.view(torch.uint8) ^ 0x88  # -8 .. 7 in two's complement -> q + 8
    scale, zero = (part.t().contiguous() for part in (weight.scale, weight.zero_point))  # [N, K / group]

    def values() -> Tensor:
        codes = torch.stack((payload & 0xF, payload >> 4), dim=-1).flatten(-2).float() - 8
        groups = codes.unflatten(-1, (-1, group))
        whole: Tensor = (groups * scale.float()[..., None] + zero.float()[..., None]).flatten(-2)
        return whole.to(weight.dtype)

    def refused(reason: str) -> Refused:
        return Refused(reason=reason, values=values, nearest=groups_of(weight.shape[1], group), note=note)

    if bool((zero != 0).any()):
        return refused("zero points, which INT4 here does not have")
    return int4_taken(lambda: payload, scale, group, weight.dtype, refused, note)


def _int8(weight: Any) -> Outcome:
    note = "" if weight.act_quant_kwargs is None and weight.act_quant_scale is None else INPUTS
    rows, columns = weight.shape
    size = tuple(weight.block_size)

    def refused(reason: str) -> Refused:
        return Refused(reason=reason, values=weight.dequantize, nearest=Int8RowScaling(), note=note)

    if weight.act_pre_scale is not None:
        return Refused(reason="inputs are multiplied by act_pre_scale, which an nn.Linear here does not do")
    if size not in {(1, columns), (rows, columns)}:
        return refused(f"scales of blocks of {size}, where INT8 here has those of rows")
    if weight.zero_point is not None and bool((weight.zero_point != 0).any()):
        return refused("zero points, which INT8 here does not have")
    scale = weight.scale.reshape(-1, 1).to(torch.float32).expand(rows, 1)
    return _taken({"payload": weight.qdata, "scale": scale}, Int8RowScaling(), weight, note)


def _taken(parts: Mapping[str, Tensor], recipe: Recipe, weight: Any, note: str) -> Outcome:
    whole = {name: part.detach().contiguous() for name, part in parts.items()}
    try:
        return Taken(weight=QuantizedTensor.from_parts(whole, recipe, weight.dtype), note=note)
    except ValueError as error:  # transposed, say
        return Refused(reason=str(error), values=weight.dequantize, nearest=recipe, note=note)


TAKES: Mapping[str, Callable[[Any], Outcome]] = {
    "torchao.quantization.Float8Tensor": _float8,
    "torchao.prototype.mx_formats.mx_tensor.MXTensor": _mx,
    "torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor": _nvfp4,
    "torchao.quantization.IntxUnpackedToInt8Tensor": _intx,
    "torchao.quantization.Int4Tensor": _int4,
    "torchao.quantization.Int8Tensor": _int8,
}


def take(module: nn.Module) -> Mapping[str, Outcome]:
    """Return what the weight of an nn.Linear becomes."""
    weight: Any = module._parameters["weight"]
    found = TAKES.get(qualified(type(weight)))  # a class made of one of these may decode in another way
    if found is None:
        return take_other(module)
    if weight.dtype not in APPEARANCE_DTYPES or weight.ndim != 2:
        return {"weight": Refused(reason=f"a weight {tuple(weight.shape)} that appears in {weight.dtype}")}
    return {"weight": _scaled_inputs(weight) or found(weight)}


def _scaled_inputs(weight: Any) -> Refused | None:
    """Refuse weights of AWQ and SmoothQuant: their values are those of the layer only beside a factor of the inputs."""
    if getattr(weight, "act_pre_scale", None) is None:
        return None
    return Refused(reason="inputs are multiplied by act_pre_scale, which an nn.Linear here does not do")


def take_other(module: nn.Module) -> Mapping[str, Outcome]:
    """Refuse what no source knows."""
    weight: Any = module._parameters.get("weight")
    if (scaled := _scaled_inputs(weight)) is not None:
        return {"weight": scaled}
    # every tensor of torch has a `dequantize`, which decodes none of these
    its = any("dequantize" in vars(kind) for kind in type(weight).__mro__ if kind.__module__.startswith("torchao."))
    reason = "no recipe here is known to hold it"
    if not its:
        reason += "; if it simulates quantization, convert it first (torchao.quantization)"
        return {"weight": Refused(reason=reason)}
    note = INPUTS if any(getattr(weight, name, None) is not None for name in OF_INPUTS) else ""
    if getattr(weight, "output_act_quant_kwargs", None) is not None:
        note = "; ".join(filter(None, (note, "its outputs were quantized; here they are not")))
    near = Float8CurrentScaling()
    return {"weight": Refused(reason=reason, values=weight.dequantize, nearest=near, note=note)}


TENSORS = Source(library="torchao", classes=frozenset(TAKES), take=take, drops=("extra_repr",), give=give)
OTHERS = Source(library="torchao", classes=frozenset({"torchao."}), take=take_other, drops=("extra_repr",))
