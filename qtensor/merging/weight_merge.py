"""One weight that gets an update, on one rank: what is asked of it, and how it is written.

    look_at         values + update of this rank's piece  ->  does any element move, is one not finite; claim on scales
    write_merged    the same sum again  ->  bytes under the agreed scales  ->  what was lost, in sums

`merge.py` does both for all weights, with one all-reduce after each.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.ranks.scale_partners import Partners
from fsdp_hooks.scale_sync import groups_of, groups_sharing, label_of, partners_of, scales_of
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset
from fsdp_hooks.versions import count_writes
from qtensor.merging.low_rank import LowRankUpdate
from qtensor.merging.merge_report import COLUMNS
from qtensor.numerics.tiles import chunk_of
from qtensor.scales.agreement import claim_of, decide, scale_of
from qtensor.scales.cut_blocks import CutBlocks, cut_blocks_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.contents import decode, shared_scale, write
from qtensor.tensor.quantized_tensor import QuantizedTensor

Update = LowRankUpdate | Callable[[tuple[slice, ...]], Tensor]


class Moves(enum.Enum):
    """What moves of a weight, on any rank."""

    NOTHING = "nothing"  # it keeps its bytes
    PARTNERS = "partners"  # another weight that shares its scale: the scale may be another one now
    ITSELF = "itself"

    @classmethod
    def of(cls, own: bool, partners: bool) -> "Moves":  # noqa: FBT001 - two answers, side by side
        """Return what moves, if any element of the weight does, and any of all that share its scale."""
        if own:
            return cls.ITSELF
        return cls.PARTNERS if partners else cls.NOTHING


FACTS = 2  # of each weight: whether an update is not zero, whether a value is not finite


@dataclass(frozen=True, eq=False)
class WeightMerge:
    """One weight with its update, as this rank sees them.

    Attributes:
        local: the parameter's local tensor: a QuantizedTensor, a HighPrecisionWeight or a plain tensor.
        update: None for one that only shares its scale with others, which have updates.
        index: the place of the local tensor in the whole weight.
    """

    name: str
    param: Tensor
    local: Any
    update: Update | None
    index: tuple[slice, ...]

    @cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which the weight is cut."""
        return groups_of(self.param, lambda _dim: True)

    @cached_property
    def sharing(self) -> list[dist.ProcessGroup]:
        """The groups over which its shards share scales."""
        return groups_sharing(self.param)

    @property
    def partners(self) -> Partners | None:
        """The weights with which it shares its tensor-wide scale."""
        return partners_of(self.param)

    @property
    def claims(self) -> bool:
        """Whether it has a scale in common with other shards or weights."""
        return bool(self.sharing) or self.partners is not None

    @cached_property
    def cut(self) -> CutBlocks | None:
        """The square blocks that its shards cut."""
        recipe = getattr(self.local, "recipe", None)
        return None if recipe is None else cut_blocks_of(self.param, recipe)

    @property
    def label(self) -> str:
        """What must be equal on all ranks."""
        update = self.update
        if update is None:
            return f"{label_of(self.name, self.param)}, no update"
        how = f"of rank {update.a.shape[-2]} times {update.scaling}" if isinstance(update, LowRankUpdate) else "called"
        return f"{label_of(self.name, self.param)}, update {how}"

    def values(self) -> Tensor:
        """Return what the weight holds, fp32, a copy."""
        local = self.local
        if isinstance(local, QuantizedTensor):
            return decode(local, torch.float32)
        return (local.dense if isinstance(local, HighPrecisionWeight) else local).to(torch.float32, copy=True)

    def change(self) -> Tensor:
        """Return this rank's piece of the update, fp32."""
        if self.update is None:
            return torch.zeros(self.local.shape, dtype=torch.float32, device=self.local.device)
        piece = self.update(self.index)
        if tuple(piece.shape) != tuple(self.local.shape):
            raise ValueError(
                f"merge_: {self.name}: the update returned {tuple(piece.shape)} for {_show(self.index)}, expected "
                f"{tuple(self.local.shape)}. No weight was written"
            )
        return piece.detach().to(self.local.device, torch.float32)

    def look_at(self) -> tuple[Tensor, Tensor | None]:
        """Return fp32 [FACTS] and the claim on shared scales (None: it has none) of the sum of weight and update."""
        before, change = self.values(), self.change()
        wanted = self._in_own_dtype(before + change)
        # a weight may hold NaN already
        broken = ~change.isfinite() | (~wanted.isfinite() & before.isfinite())
        facts = torch.stack([(change != 0).any(), broken.any()]).to(torch.float32)
        return facts, claim_of(wanted, self.local.recipe, self.cut) if self.claims else None

    def write_merged(self, agreed: Tensor | None, moves: Moves) -> Tensor:
        """Write the sum under what was agreed on, unless nothing moves; return fp64 [COLUMNS]."""
        before, change = self.values(), self.change()
        # a weight that nothing moves keeps its bytes: writing its own values could choose other codes
        writes = moves is Moves.ITSELF or (moves is Moves.PARTNERS and self._gets_another_scale(agreed))
        if writes:
            self._write(self._in_own_dtype(before + change), agreed)
            count_writes([self.param])  # torch has not counted what is written behind the wrapper
        elif moves is Moves.PARTNERS:
            self._adopt(agreed)
        return _sums(before, change, self.values() if writes else before)

    def _gets_another_scale(self, agreed: Tensor | None) -> bool:
        """Return whether bytes have to follow a scale; those of a dense shard do not."""
        if not isinstance(self.local, QuantizedTensor):
            return False
        assert agreed is not None
        return bool(scale_of(agreed[0], self.local.recipe) != shared_scale(self.local))

    def _in_own_dtype(self, values: Tensor) -> Tensor:
        """Return fp32 values in the dtype in which a dense weight keeps them."""
        return values if isinstance(self.local, QuantizedTensor) else values.to(self.local.dtype)

    def _write(self, values: Tensor, agreed: Tensor | None) -> None:
        local = self.local
        if isinstance(local, QuantizedTensor):
            write(local, values, *decide(values, local.recipe, self.cut, agreed))
            return
        (local.dense if isinstance(local, HighPrecisionWeight) else local).copy_(values)
        self._adopt(agreed)

    def _adopt(self, agreed: Tensor | None) -> None:
        """Let a dense shard note what its gathers are quantized under."""
        scales = scales_of(self.param)
        if agreed is not None and scales is not None and isinstance(self.local, HighPrecisionWeight):
            scales.adopt(agreed)


def index_of(param: Tensor) -> tuple[slice, ...]:
    """Return the place of this rank's piece in the whole parameter."""
    sizes, offsets = tuple(param.shape), (0,) * param.ndim
    if isinstance(param, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _show(index: Sequence[slice]) -> str:
    return f"[{', '.join(f'{one.start}:{one.stop}' for one in index)}]"


def _sums(before: Tensor, change: Tensor, after: Tensor) -> Tensor:
    """Return fp64 [COLUMNS], see merge_report.py; in pieces, so that no fp64 copy is large."""
    size = chunk_of(before.device)
    total = torch.zeros(COLUMNS, dtype=torch.float64, device=before.device)
    for was, update, now in zip(*(x.reshape(-1).split(size) for x in (before, change, after)), strict=True):
        moved, asked, wanted = now.double() - was.double(), update.double(), was.double() + update.double()
        # NaN differs from itself, and has not changed
        changed = (now != was) & ~(now.isnan() & was.isnan())
        products = (moved * asked, asked.square(), (moved - asked).square(), wanted.square(), changed.double())
        total += torch.stack([product.sum() for product in products])
    return total
