"""What is known of one input after a batch, and of a group's input after some batches, on this rank.

A Hessian X^T X is [K, K], and an expert may see a few rows only. So the rows of a batch are kept in its place as long
as they are the smaller of the two, and their products are made when somebody asks, batch by batch: the same bits. For
a layer of many experts that is the difference between a few tokens each and a matrix each. The same holds for the
products of an input with its difference to its partner, the same input in the unquantized model.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.algorithms.algorithm import COLUMNS, CROSS, HESSIAN, LOCAL_HESSIAN, SUB_BLOCK
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.statistics.exact_sum import ExactSum

SAMPLE_ROWS = 16  # kept of an input in each of the first batches
# Sums of squares below it cannot overflow fp32 on the way. Larger ones are multiplied at once, to be reported.
SAFE = 2.0**120


@dataclass(eq=False)
class BatchStatistics:
    """Statistics of one input in one batch.

    Attributes:
        tokens: its rows.
        sample: some of them.
        broken: values that are not finite; then nothing below is set.
        amax: fp32 [1], or with COLUMNS [1 + K]: that of the whole input, then of each column.
        sums: name of a statistic -> what is added up over batches.
        rows: [tokens, K], a copy of the input in place of its Hessian, if it is smaller.
        off: fp32 [tokens, K], what its partner differs from it by, in place of their products.
        unpaired: its rows, if it should have a partner and has none.
    """

    tokens: int
    sample: Tensor
    broken: int = 0
    amax: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    off: Tensor | None = None
    unpaired: int = 0

    def take_hessian(self, rows: Tensor) -> None:
        """Make the Hessian of rows [tokens, K], or keep what it is made from."""
        assert self.amax is not None
        # An expert may see a few tokens, and there may be hundreds of experts: their rows take less memory
        # than matrices.
        small = rows.nbytes <= _bytes_of_product(rows)
        if small and self.tokens * float(self.amax[0]) ** 2 < SAFE:
            self.rows = rows.clone(memory_format=torch.contiguous_format)
        else:
            self.sums[HESSIAN] = _product(rows)

    def take_cross(self, rows: Tensor, partner: Tensor | None) -> None:
        """Make the products of rows [tokens, K] with what their partner differs by, or keep what they are made from.

        Call it after `take_hessian`. Without a partner the rows count as their own.
        """
        assert self.amax is not None
        self.forget_cross()
        if partner is None:
            self.unpaired = self.tokens
            return
        off = _fp32(partner) - _fp32(rows)
        bound = self.tokens * float(self.amax[0]) * float(off.abs().amax())
        if self.rows is not None and bound < SAFE:  # false for what is not finite
            self.off = off
        else:
            self.sums[CROSS] = _product(off, rows)

    def forget_cross(self) -> None:
        """Undo `take_cross`."""
        self.off, self.unpaired = None, 0
        self.sums.pop(CROSS, None)


@dataclass(eq=False)
class Accumulated:
    """Statistics of the inputs of one group over this rank's batches.

    rows: of batches whose Hessians are not made, each with what its partner differs by, if that is asked for.
    """

    tokens: int = 0
    broken: int = 0
    broken_batches: int = 0
    amax: Tensor | None = None
    sums: dict[str, ExactSum] = field(default_factory=dict)
    rows: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    unpaired: int = 0

    def add(self, other: "BatchStatistics | Accumulated") -> None:
        """Add what was measured in one batch, or in the batches of another group."""
        self.tokens += other.tokens
        self.broken += other.broken
        self.unpaired += other.unpaired
        self.broken_batches += other.broken_batches if isinstance(other, Accumulated) else int(other.broken > 0)
        if other.amax is not None:
            self.amax = other.amax if self.amax is None else torch.maximum(self.amax, other.amax)
        for what, value in other.sums.items():
            if what not in self.sums:
                self.sums[what] = ExactSum(value.shape, value.device)
            if isinstance(value, ExactSum):
                self.sums[what].merge(value)
            else:
                self.sums[what].add(value)
        if isinstance(other, Accumulated):
            self.rows += other.rows
        elif other.rows is not None:
            self.rows.append((other.rows, other.off))
            kept = sum(one.nbytes for pair in self.rows for one in pair if one is not None)
            # With a sum there already, rows beside it would only add to the memory.
            if HESSIAN in self.sums or kept > _bytes_of_product(other.rows):
                self.multiply()

    def multiply(self) -> None:
        """Make the Hessians of the rows, one at a time, and add them up."""
        while self.rows:
            # Each pair is freed before the next product; the sum is exact, so the order is free.
            rows, off = self.rows.pop()
            self._add(HESSIAN, _product(rows))
            if off is not None:
                self._add(CROSS, _product(off, rows))

    def _add(self, what: str, product: Tensor) -> None:
        self.sums.setdefault(what, ExactSum(product.shape, product.device)).add(product)


def measure(rows: Tensor, needs: Collection[str]) -> BatchStatistics:
    """Measure rows [tokens, K]: all statistics except the matrices [K, K]."""
    tokens = rows.shape[0]
    count = min(tokens, SAMPLE_ROWS)
    measured = BatchStatistics(tokens, rows[[index * tokens // count for index in range(count)]])
    if COLUMNS in needs:
        magnitudes = _fp32(rows).abs()
        amax = magnitudes.amax(dim=0)
    else:  # one pass without a copy; NaN and infinities show in it
        amax = torch.stack(torch.aminmax(rows)).float().abs().amax().reshape(1)
    if not torch.isfinite(amax).all():
        measured.broken = int((~torch.isfinite(rows)).sum())
        return measured
    measured.amax = torch.cat([amax.amax().reshape(1), amax]) if COLUMNS in needs else amax
    if COLUMNS in needs:
        measured.sums[COLUMNS] = magnitudes.sum(dim=0)
    if LOCAL_HESSIAN in needs:
        wide = _fp32(rows)
        blocks = F.pad(wide, (0, -wide.shape[1] % SUB_BLOCK)).view(tokens, -1, SUB_BLOCK).transpose(0, 1)
        measured.sums[LOCAL_HESSIAN] = torch.bmm(blocks.transpose(1, 2), blocks)  # of [blocks, tokens, 16]
    return measured


def _product(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return fp32 [K, K], left^T right, or left^T left: the same bits for rows and for a copy of them."""
    with full_precision(left.device):
        wide = _fp32(left)
        return wide.t() @ (wide if right is None else _fp32(right))


def _bytes_of_product(rows: Tensor) -> int:
    return 4 * rows.shape[-1] ** 2


def _fp32(rows: Tensor) -> Tensor:
    """Return fp32 [tokens, K], contiguous."""
    wide = rows.float().contiguous()
    # Kernels may add in another order if the memory does not start at a multiple of a vector's width.
    return wide if wide.data_ptr() % 64 == 0 else wide.clone()
