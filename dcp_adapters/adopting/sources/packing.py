"""What sources of several libraries share: whole numbers of 4 bits in groups with symmetric scales."""

from collections.abc import Callable

import torch
from torch import Tensor

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from qtensor.formats.int4 import GROUPS, Int4GroupScaling
from qtensor.formats.mxfp8 import MXFP8BlockScaling
from qtensor.spec.codecs.nibbles import packed
from qtensor.spec.recipes import Recipe
from qtensor.tensor.quantized_tensor import QuantizedTensor


def packed_int4(codes: Tensor) -> Tensor:
    """Return whole numbers -8 .. 7, int8 [N, K], as a payload of INT4: [N, K // 2]."""
    return packed((codes + 8).to(torch.uint8))


def groups_of(columns: int, group: int) -> Recipe | None:
    """Return the INT4 recipe closest to groups of this size; MXFP8 where no group of ours fits; None: neither does."""
    fitting = [size for size in GROUPS if columns % size == 0]
    if not fitting:
        return MXFP8BlockScaling() if columns % 32 == 0 else None
    return Int4GroupScaling(group=max((size for size in fitting if size <= group), default=fitting[0]))


def int4_taken(  # noqa: PLR0913, PLR0917 - the parts of a weight, and what is said of it
    payload: Callable[[], Tensor],
    scale: Tensor,
    group: int,
    dtype: torch.dtype,
    refused: Callable[[str], Refused],
    note: str = "",
) -> Outcome:
    """Take symmetric INT4, or refuse groups that there are not, and scales that bf16 does not hold.

    A group larger than ours is cut into several of ours with the same scale.
    """
    ours = next((size for size in sorted(GROUPS, reverse=True) if group % size == 0), None)
    if ours is None:
        return refused(f"groups of {group}, where INT4 here has {', '.join(map(str, GROUPS))}")
    in_bf16 = scale.to(torch.bfloat16)
    if not bool(((in_bf16.float() == scale.float()) | scale.isnan()).all()):
        return refused(f"scales in {scale.dtype} with more digits than bf16 holds")
    parts = {"payload": payload(), "scale": in_bf16.repeat_interleave(group // ours, dim=-1).contiguous()}
    try:
        weight = QuantizedTensor.from_parts(parts, Int4GroupScaling(group=ours), dtype)
    except ValueError as error:
        return refused(str(error))
    return Taken(weight=weight, note=note)
