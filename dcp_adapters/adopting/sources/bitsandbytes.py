"""bitsandbytes: the linears of QLoRA (4 bits) and of LLM.int8() (8 bits).

    Linear4bit    weight uint8 [N * K / 2, 1], quant_state: code [16], absmax of blocks along all rows    code * absmax
    Linear8bitLt  weight int8 [N, K], SCB fp32 [N]                                            weight * SCB * fp32(1/127)

Two codes a byte, the high one first; ours have the low one first. Blocks run on over the ends of rows: a block is taken
in pieces of 32, 64 or 128 under its scale, of which K has to be a multiple. With double quantization scales are codes
of 8 bits themselves, `code2[absmax] * absmax2 + offset`, with an `absmax2` for 256 of them; both operations round to
fp32, as bitsandbytes rounds them, and the result is our scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.source import Source, qualified
from qtensor.formats.int8 import Int8RowScaling
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.formats.nf4 import BLOCKS, NF4BlockScaling
from qtensor.spec.codecs.nf4 import TABLE
from qtensor.spec.registry import APPEARANCE_DTYPES
from qtensor.tensor.quantized_tensor import QuantizedTensor

MODULES = "bitsandbytes.nn.modules"
NESTED = "bitsandbytes quantized its scales, too; here they are what it decodes them to, in fp32"
INPUTS = "bitsandbytes quantized its inputs, but for columns of outliers; here they stay as they are"
FACTORS = "bitsandbytes multiplies a code by SCB and by 1/127, here both are one scale: fp32 values differ by roundings"
UNEVEN = (
    "its blocks run on over the ends of rows, which bitsandbytes' decoder for CPUs does not follow (0.50): its values "
    "are others there, and not those that were quantized"
)
REORDERED = (
    "its bytes are in the order in which a CPU's kernel reads them, since it ran on one; take its state_dict() before, "
    "which puts them in order"
)


def take_4bit(module: nn.Module) -> Mapping[str, Outcome]:
    """Return what the weight of a Linear4bit becomes."""
    linear: Any = module
    if qualified(type(module)) not in FOUR_BITS.classes:
        return {"weight": Refused(reason=f"a {type(module).__name__} is made of Linear4bit, and may compute otherwise")}
    weight = linear._parameters["weight"]
    state = getattr(weight, "quant_state", None) or linear.quant_state
    if state is None:
        return {"weight": Refused(reason="its weight is not quantized yet; move it to a device first")}
    if getattr(state, "packing_format_for_cpu", False):
        return {"weight": Refused(reason=REORDERED)}
    if state.dtype not in APPEARANCE_DTYPES or len(state.shape) != 2:
        return {"weight": Refused(reason=f"a weight {tuple(state.shape)} that appears in {state.dtype}")}
    return {"weight": _blocks(weight.detach().reshape(-1).view(torch.uint8), state)}


def _blocks(packed: Tensor, state: Any) -> Outcome:
    rows, columns = state.shape
    scale = scales_of(state)
    block = next((size for size in sorted(BLOCKS, reverse=True) if not (state.blocksize % size or columns % size)), 0)

    def values() -> Tensor:
        codes = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten()[: rows * columns]
        spread = scale.repeat_interleave(state.blocksize)[: rows * columns]
        dense: Tensor = state.code.to(torch.float32)[codes.to(torch.int32)] * spread
        return dense.view(rows, columns).to(state.dtype)

    fits = MXFP8BlockScaling() if columns % 32 == 0 else None
    near = NF4BlockScaling(block=block) if block else fits

    def refused(reason: str) -> Refused:
        return Refused(reason=reason, values=values, nearest=near)

    if state.code.tolist() != list(TABLE):
        return refused(f"elements of the table {state.quant_type}, where those of 4 bits here are NF4, E2M1 and INT4")
    if not block:
        return refused(
            f"blocks of {state.blocksize} over rows of {columns}, where NF4 here has {', '.join(map(str, BLOCKS))}"
        )
    each = scale.repeat_interleave(state.blocksize // block)[: rows * columns // block]
    parts = {
        "payload": (packed >> 4 | packed << 4).view(rows, columns // 2),
        "scale": each.reshape(rows, columns // block).contiguous(),
    }
    made = QuantizedTensor.from_parts(parts, NF4BlockScaling(block=block), state.dtype)
    notes = (NESTED if state.nested else "", UNEVEN if columns % state.blocksize else "")
    return Taken(weight=made, note="; ".join(filter(None, notes)))


def scales_of(state: Any) -> Tensor:
    """Return the scales of a quant_state, fp32 [blocks], without double quantization."""
    scale: Tensor = state.absmax.detach()
    if state.nested:
        wide = state.state2.absmax.detach().float().repeat_interleave(state.state2.blocksize)[: scale.numel()]
        scale = (
            state.state2.code.detach().float()[scale.flatten().to(torch.int32)] * wide + state.offset.detach().float()
        )
    return scale.flatten().to(torch.float32)


def take_8bit(module: nn.Module) -> Mapping[str, Outcome]:
    """Return what the weight of a Linear8bitLt becomes."""
    linear: Any = module
    if qualified(type(module)) not in EIGHT_BITS.classes:
        return {
            "weight": Refused(reason=f"a {type(module).__name__} is made of Linear8bitLt, and may compute otherwise")
        }
    weight, state = linear._parameters["weight"], linear.state
    largest = next((one for one in (getattr(weight, "SCB", None), state.SCB) if one is not None), None)
    if weight.dtype != torch.int8 or largest is None:
        reason = "its weight is dense, and quantized in each forward (has_fp16_weights), or not quantized yet"
        return {"weight": Refused(reason=reason)}
    codes, largest = weight.detach(), largest.detach().float().view(-1, 1)
    bias = linear._parameters.get("bias")

    def values() -> Tensor:
        dense: Tensor = codes * largest * (1 / 127)
        return dense

    # in fp64, as backends divide by a constant in their own ways
    scale = (largest.double() / 127).to(torch.float32)
    dtype = torch.float16 if bias is None else bias.dtype
    try:
        made = QuantizedTensor.from_parts({"payload": codes.contiguous(), "scale": scale}, Int8RowScaling(), dtype)
    except ValueError as error:
        return {"weight": Refused(reason=str(error))}
    note = f"{INPUTS}; {FACTORS}"
    return {"weight": Taken(weight=made, values=values, exact=False, note=note, dtype_known=bias is not None)}


def stays(module: nn.Module) -> Mapping[str, Outcome]:
    """Refuse what belongs to no nn.Linear."""
    return {"weight": Refused(reason=f"a {type(module).__name__}, and quantized weights here belong to nn.Linear")}


def _linear(module: nn.Module) -> type[nn.Module]:
    return nn.Linear


FOUR_BITS = Source(
    library="bitsandbytes",
    classes=frozenset(f"{MODULES}.{name}" for name in ("Linear4bit", "LinearNF4", "LinearFP4")),
    take=take_4bit,
    drops=("compute_dtype", "compute_type_is_set", "quant_state", "quant_storage", "support_avx512bf16_for_cpu"),
    becomes=_linear,
)
EIGHT_BITS = Source(
    library="bitsandbytes",
    classes=frozenset({f"{MODULES}.Linear8bitLt"}),
    take=take_8bit,
    drops=("state", "index"),
    becomes=_linear,
)
OTHERS = Source(
    library="bitsandbytes",
    classes=frozenset(f"{MODULES}.{name}" for name in ("Params4bit", "Int8Params", "Embedding4bit", "Embedding8bit")),
    take=stays,
)
