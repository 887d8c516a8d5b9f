"""Sums of fp32 tensors whose bits do not depend on the order of adding, nor on which rank added what.

Calibration adds one tensor for each batch (X^T X, say), and the batches are spread over ranks. The last bits of
floating-point sums depend on their order, and an algorithm that feeds errors forward, such as GPTQ, turns one last bit
into other elements everywhere. So every tensor is first rounded to a grid that depends on the tensor alone:

    E      the exponent of its largest magnitude (amax < 2^e), rounded up to a multiple of 8
    grid   2^(E - 38)
    bucket the fp64 sum of all tensors with the same E

Values on the grid are integers of at most 38 bits times 2^(E - 38), and fp64 adds integers of up to 53 bits without
rounding: 2^15 tensors can be added in any order, split in any way, by any reduction, to the same bits. In the end the
buckets are added, smallest exponent first. Usually there is only one, since batches of the same data differ little;
each further bucket costs as much memory again.

Why 38? The grid has to be fine: even if 2^E is 2^8 times amax, the worst case, values of at least amax / 128 keep all
their 24 bits, and smaller ones move by at most 2^-31 of amax; the fp32 product behind the tensor errs by more. And
there must be room for batches: 32768 over all ranks; calibrations take hundreds.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BITS = 38  # of a value on its bucket's grid
MAX_TENSORS = 2 ** (53 - BITS)
STEP = 8  # between the exponents of buckets
EXPONENTS = range(-144, 128 + STEP, STEP)  # fp32: the smallest subnormal is 2^-149, everything is below 2^128
CHUNK = 2**20  # elements worked on at once, so that no second copy of a large sum is needed
MESSAGE = 2**23  # elements of one reduce at most, unless a single bucket has more


class ExactSum:
    """The sum of fp32 tensors of one shape; the module says what makes it exact. Allocates memory only when needed.

    Attributes:
        tensors: how many were added. If these are more than MAX_TENSORS, or some are not finite, there is no total, and
            asking for it raises. Adding does not, since only one rank would raise.
        broken: how many held values that are not finite; these are left out.
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str) -> None:
        self.shape = torch.Size(shape)
        self.device = torch.device(device)
        self.tensors = 0
        self.broken = 0
        self.buckets: dict[int, Tensor] = {}  # exponent E -> fp64, of self.shape

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add one tensor, fp32, of the sum's shape."""
        if x.dtype != torch.float32 or x.shape != self.shape:
            raise ValueError(
                f"got {x.dtype} {tuple(x.shape)} to add to a sum of torch.float32 {tuple(self.shape)}; convert it first"
            )
        self.tensors += 1
        amax = _amax(x)
        if not math.isfinite(amax):
            self.broken += 1
        elif amax:
            exponent = -(-math.frexp(amax)[1] // STEP) * STEP
            # c is 1.5 * 2^52 units of the grid. From c - 2^51 to c + 2^51 units the ulp of fp64 is one unit, and |x| is
            # at most 2^38 units: adding x rounds it to the grid, and subtracting c again is exact.
            c = math.ldexp(1.5, 52 + exponent - BITS)
            for into, part in zip(_chunks(self.bucket(exponent)), _chunks(x), strict=True):
                into.add_(part.double().add_(c).sub_(c))

    @torch.no_grad()
    def merge(self, other: "ExactSum") -> None:
        """Add all that was added to `other`, which stays as it is."""
        if other.shape != self.shape:
            raise ValueError(f"a sum of shape {tuple(other.shape)} can not be merged into one of {tuple(self.shape)}")
        self.tensors += other.tensors
        self.broken += other.broken
        for exponent, bucket in other.buckets.items():
            self.bucket(exponent).add_(bucket)

    def check(self) -> None:
        """Raise RuntimeError if there is no total."""
        if self.broken:
            raise RuntimeError(
                f"{self.broken} of the {self.tensors} tensors of a sum of shape {tuple(self.shape)} hold values that "
                "are not finite; find out where they come from, or leave them out"
            )
        if self.tensors > MAX_TENSORS:
            raise RuntimeError(
                f"{self.tensors} tensors were added to a sum of shape {tuple(self.shape)}, which is exact for up to "
                f"{MAX_TENSORS}; use fewer or larger batches"
            )

    @torch.no_grad()
    def total(self, factor: float = 1.0) -> Tensor:
        """Return fp32, the sum times `factor`: buckets are added and multiplied in fp64, then rounded to fp32."""
        self.check()
        out = torch.zeros(self.shape, dtype=torch.float32, device=self.device)
        if self.buckets:
            buckets = [self.buckets[exponent] for exponent in sorted(self.buckets)]
            for into, first, *others in zip(_chunks(out), *map(_chunks, buckets), strict=True):
                part = first.clone()
                for other in others:
                    part.add_(other)
                into.copy_(part.mul_(factor))
        return out

    def bucket(self, exponent: int) -> Tensor:
        """Return the bucket of an exponent, the live tensor; zeros if nothing was added yet."""
        if exponent not in self.buckets:
            self.buckets[exponent] = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        return self.buckets[exponent]


def totals(
    sums: Sequence[ExactSum],
    group: dist.ProcessGroup | None,
    factors: Sequence[float] | None = None,
    *,
    owner: int = 0,
) -> list[Tensor] | None:
    """Return, on one rank, the total over all ranks of each sum, times its factor; None on the others.

    Call it on all ranks of the group, with sums of the same shapes in the same order; a rank that added nothing gives
    empty sums. It costs one small all-reduce, and a reduce for every 64 MiB of buckets; nothing without sums. The sums
    are empty afterwards: the memory of each is freed before the next total is made.

    Args:
        sums: on the device that the group communicates from.
        group: None for no collectives: the totals of this process.
        factors: one for each sum; 1 by default.
        owner: the rank in the group that gets the totals, the same bits whichever it is.

    Raises:
        RuntimeError: on all ranks alike, if a sum has no total; all sums keep their buckets.
    """
    if group is not None and sums:
        present = _agree(sums, group)
        for one in sums:
            one.check()
        for pack in _packs([one.bucket(exponent) for one, exponents in present for exponent in exponents]):
            _reduce(pack, group, owner)
    for one in sums:
        one.check()
    out = []
    here = group is None or dist.get_rank(group) == owner
    for one, factor in zip(sums, factors or [1.0] * len(sums), strict=True):
        if here:
            out.append(one.total(factor))
        # Buckets are twice the size of a total: freed before the next total is made.
        one.buckets, one.tensors = {}, 0
    return out if here else None


def _agree(sums: Sequence[ExactSum], group: dist.ProcessGroup) -> list[tuple[ExactSum, list[int]]]:
    """Add up the counts of all ranks; returns each sum with the exponents that some rank has a bucket for."""
    table = torch.tensor(
        [[one.tensors, one.broken, *(exponent in one.buckets for exponent in EXPONENTS)] for one in sums],
        dtype=torch.int64,
        device=sums[0].device,
    )  # [sums, 2 + exponents]
    dist.all_reduce(table, group=group)
    present = []
    for one, (tensors, broken, *counts) in zip(sums, table.tolist(), strict=True):
        one.tensors, one.broken = tensors, broken
        present.append((one, [exponent for exponent, count in zip(EXPONENTS, counts, strict=True) if count]))
    return present


def _packs(buckets: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut the buckets into lists, in order, of at most MESSAGE elements, or of a single bucket."""
    pack: list[Tensor] = []
    elements = 0
    for bucket in buckets:
        if pack and elements + bucket.numel() > MESSAGE:
            yield pack
            pack, elements = [], 0
        pack.append(bucket)
        elements += bucket.numel()
    if pack:
        yield pack


def _reduce(pack: Sequence[Tensor], group: dist.ProcessGroup, owner: int) -> None:
    """Make every bucket of the pack the sum over all ranks, on one of them; the order of adding does not matter.

    On the others the buckets may hold anything afterwards.
    """
    to = dist.get_global_rank(group, owner)
    if len(pack) == 1:
        dist.reduce(pack[0], to, group=group)
        return
    message = torch.cat([bucket.flatten() for bucket in pack])
    dist.reduce(message, to, group=group)
    for bucket, part in zip(pack, message.split([bucket.numel() for bucket in pack]), strict=True):
        bucket.copy_(part.view(bucket.shape))


def _amax(x: Tensor) -> float:
    """Return the largest magnitude; NaN or infinite if some value is."""
    if not x.numel():
        return 0.0
    least, largest = torch.stack(torch.aminmax(x)).tolist()
    return math.nan if math.isnan(least) else max(-least, largest)


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    """Return flat pieces of x, which are aliases if x is contiguous."""
    pieces: tuple[Tensor, ...] = x.reshape(-1).split(CHUNK)
    return pieces
