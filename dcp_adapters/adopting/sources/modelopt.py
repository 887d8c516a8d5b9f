"""ModelOpt: linears whose weights `mtq.compress` packed, and refusals of those that only simulate.

weight: QTensorWrapper, with metadata {qtensor_class, shape, dtype}; its scales are in module.weight_quantizer

FP8QTensor     E4M3; _scale [] | [N, 1] | blocks of 128                value = code * _scale
MXFP8QTensor   E4M3; _scale E8M0 [N, K / 32]                           value = code * 2^(_scale - 127)
MXFP4QTensor   packed, the low nibble first; _scale E8M0               value = code * 2^(_scale - 127)
NVFP4QTensor   packed, the low nibble first; _scale E4M3, _double_scale    value = code * (_scale * _double_scale)
INT4QTensor    packed, the high nibble first; _scale = 7 / amax        value = code / _scale
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.source import Source
from dcp_adapters.adopting.sources.packing import groups_of, int4_taken
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.formats.float8_blocks import BLOCK, Float8BlockScaling
from qtensor.formats.mxfp4 import MXFP4BlockScaling
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.formats.nvfp4 import NVFP4BlockScaling
from qtensor.spec.recipes import Recipe
from qtensor.tensor.quantized_tensor import QuantizedTensor

QUANTIZED = "modelopt.torch.quantization"
QUANTIZERS = ("weight_quantizer", "input_quantizer", "output_quantizer")
INPUTS = "ModelOpt quantized its inputs; here they stay as they are"


class _Packed:
    """A packed weight with what its quantizer holds. codes: as stored, row by row. shape: [N, K], logical."""

    def __init__(self, module: Any) -> None:
        quantizer, self.packed = module.weight_quantizer, module.weight
        self.kind: str = self.packed.metadata["qtensor_class"].__name__
        self.shape = tuple(self.packed.metadata["shape"])
        self.dtype: torch.dtype = self.packed.metadata["dtype"]
        self.codes: Tensor = self.packed.detach().as_subclass(Tensor)
        buffers = quantizer._buffers
        self.scale, self.wide = buffers["_scale"], buffers.get("_double_scale")
        sizes = quantizer.block_sizes or {}
        self.block: int = sizes.get(-1) or 0
        self.block_sizes = {axis: size for axis, size in sizes.items() if isinstance(axis, int)}

    def values(self) -> Tensor:
        """Return the values by its own formula, in the dtype that the weight appears in."""
        values: Tensor = self.packed.get_qtensor().dequantize(
            self.dtype, scale=self.scale, double_scale=self.wide, block_sizes=self.block_sizes or None
        )
        return values.reshape(self.shape)

    def refused(self, reason: str, nearest: Recipe | None = None) -> Refused:
        """Refuse it, with its values."""
        return Refused(reason=reason, values=self.values, nearest=nearest)


def _fp8(one: _Packed) -> Outcome:
    rows, columns = one.shape
    scale = one.scale.float()
    recipe: Recipe
    if one.block_sizes:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        if {axis % 2: size for axis, size in one.block_sizes.items()} != {0: BLOCK, 1: BLOCK} or scale.shape != blocks:
            return one.refused(f"scales of blocks of {one.block_sizes}", Float8BlockScaling())
        recipe, scale = Float8BlockScaling(), scale.repeat_interleave(BLOCK, dim=0)[:rows]
    elif scale.numel() == 1:
        recipe, scale = Float8CurrentScaling(granularity="tensor"), scale.reshape(())
    else:
        recipe = Float8CurrentScaling()
    return _taken({"payload": one.codes, "scale": scale}, recipe, one)


def _mxfp8(one: _Packed) -> Outcome:
    return _taken({"payload": one.codes, "scale": one.scale.reshape(one.shape[0], -1)}, MXFP8BlockScaling(), one)


def _mxfp4(one: _Packed) -> Outcome:
    if one.block != 32:
        return one.refused(f"blocks of {one.block}, where MXFP4 has 32", MXFP4BlockScaling())
    return _taken({"payload": one.codes, "scale": one.scale.reshape(one.shape[0], -1)}, MXFP4BlockScaling(), one)


def _nvfp4(one: _Packed) -> Outcome:
    if one.block != 16 or one.scale.dtype != torch.float8_e4m3fn or one.wide is None or one.wide.numel() != 1:
        return one.refused(f"scales in {one.scale.dtype} of blocks of {one.block}", NVFP4BlockScaling())
    scale = one.scale.reshape(one.shape[0], -1)
    parts = {"payload": one.codes, "scale": scale, "global_scale": one.wide.float().reshape(())}
    return _taken(parts, NVFP4BlockScaling(), one)


def _int4(one: _Packed) -> Outcome:
    """Take scales whose reciprocals bf16 holds, so that a product is the quotient; most are not so, and are refused."""
    rows, columns = one.shape
    nearest = groups_of(columns, one.block)
    if columns % one.block:
        return one.refused(f"{columns} columns, padded to groups of {one.block}", nearest)
    divisor = one.scale.float().reshape(rows, -1)
    ours = divisor.reciprocal()
    codes = torch.arange(-8, 8, dtype=torch.float32, device=divisor.device)
    if not torch.equal(codes / divisor[..., None], codes * ours[..., None]):
        return one.refused("values that are divided by their scales, which no scale in bf16 multiplies to", nearest)
    swapped = (one.codes >> 4) | (one.codes << 4)
    return int4_taken(lambda: swapped, ours, one.block, one.dtype, lambda reason: one.refused(reason, nearest))


def _taken(parts: Mapping[str, Tensor], recipe: Recipe, one: _Packed) -> Outcome:
    whole = {name: part.detach().contiguous() for name, part in parts.items()}
    try:
        return Taken(weight=QuantizedTensor.from_parts(whole, recipe, one.dtype))
    except ValueError as error:
        return one.refused(str(error), recipe)


TAKES: Mapping[str, Callable[[_Packed], Outcome]] = {
    "FP8QTensor": _fp8,
    "MXFP8QTensor": _mxfp8,
    "MXFP4QTensor": _mxfp4,
    "NVFP4QTensor": _nvfp4,
    "INT4QTensor": _int4,
}


def take(module: nn.Module) -> Mapping[str, Outcome]:
    """Return what the weight of a packed linear becomes."""
    linear: Any = module
    if linear.input_quantizer.pre_quant_scale is not None:
        reason = "its inputs are multiplied by a pre_quant_scale, which an nn.Linear does not do"
        return {"weight": Refused(reason=reason)}
    quantizers = (linear.weight_quantizer, linear.input_quantizer)
    if any(getattr(one, "rotate_is_enabled", False) or getattr(one, "bias", None) for one in quantizers):
        reason = "it rotates or shifts what it quantizes, which an nn.Linear does not do"
        return {"weight": Refused(reason=reason)}
    if "_forward_pre_dm" in vars(linear):
        reason = "its forward was replaced before ModelOpt took it, which calls that, and an nn.Linear would not"
        return {"weight": Refused(reason=reason)}
    if hasattr(linear.weight_quantizer, "_svdquant_lora_a"):
        return {"weight": Refused(reason="it has factors of SVDQuant beside it, which an nn.Linear does not have")}
    one = _Packed(linear)
    found = TAKES.get(one.kind)
    if found is None or len(one.shape) != 2:
        outcome: Outcome = one.refused(f"a {one.kind} {one.shape}, which no recipe here holds")
    else:
        outcome = found(one)
    if isinstance(outcome, Taken):
        return {"weight": Taken(weight=outcome.weight, note=_note(linear))}
    return {"weight": outcome}


def _note(linear: Any) -> str:
    notes = []
    if linear.input_quantizer.is_enabled:
        amax = linear.input_quantizer._buffers.get("_amax")
        calibrated = "" if amax is None else f" (calibrated amax {float(amax.max()):.9g})"
        notes.append(f"{INPUTS}{calibrated}")
    if linear.output_quantizer.is_enabled:
        notes.append("its outputs were quantized; here they are not")
    return "; ".join(notes)


def simulates(module: nn.Module) -> Mapping[str, Outcome]:
    """Refuse a module whose dense weight is quantized in each forward; leave one alone whose quantizers do nothing."""
    quantizer: Any = module._modules.get("weight_quantizer")
    if quantizer is None or not getattr(quantizer, "is_enabled", True):
        return {}
    reason = "its weight is dense, and quantized in each forward; call mtq.compress(model) first"
    return {"weight": Refused(reason=reason)}


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before ModelOpt made another of it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("modelopt."))


LINEARS = Source(
    library="modelopt",
    classes=frozenset({f"{QUANTIZED}.qtensor.base_qtensor.QTensorWrapper"}),
    take=take,
    drops=(
        *QUANTIZERS,
        *("_dm_attribute_manager", "_enable_weight_quantization", "_parallel_state", "_load_from_state_dict"),
        *("_use_real_quant_gemm", "_real_quant_gemm_impl"),
        "forward",  # that of its class, which some calibrations leave behind
    ),
    becomes=own_class,
)
OTHERS = Source(
    library="modelopt",
    classes=frozenset({f"{QUANTIZED}.nn.modules.quant_module.QuantModule"}),
    take=simulates,
    becomes=own_class,
)
