"""An update of low rank, as adapters hold it, and the piece of it that one rank needs.

    update[n, k] = scaling * (b[n, 0] a[0, k] + b[n, 1] a[1, k] + ... + b[n, r - 1] a[r - 1, k])

Every product and every sum is rounded to fp32, in this order, and the scaling comes last. A matrix product would be
faster, but may add in another order for other numbers of rows, so that an element would depend on how the weight is
cut. Here it does not: a piece of the update holds the bits of the whole one. This costs r passes over the piece, in
chunks of rows that fit into a cache.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from qtensor.numerics.tiles import chunk_of


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRankUpdate:
    """An update of a weight [.., N, K], computed in fp32: scaling * b a.

    Attributes:
        a: [.., r, K], a plain tensor of any floating dtype; lora_A.weight of peft.
        b: [.., N, r], likewise; lora_B.weight of peft. Both are the full factors, equal on all ranks, on any device.
        scaling: what the product is multiplied by.
        through_merge: whether the factors were trained through the merge (`merge_aware` says it of its own updates,
            whoever calls `linear_through_merge` may). Then `merge_` writes what the training has computed with, and
            does not warn of what rounding took.

    Raises:
        TypeError: a factor is sharded or quantized, or holds no floating numbers.
        ValueError: the factors do not fit each other, or the scaling is not finite.

    Example:
        ```python
        >>> update = LowRankUpdate(a=torch.ones(4, 64), b=torch.ones(32, 4), scaling=0.5)
        >>> model = nn.Sequential(nn.Linear(64, 32))
        >>> merge_(model, {"0.weight": update})  # adds 0.5 * b a, which is 2 everywhere
        ```
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    through_merge: bool = False

    def __post_init__(self) -> None:
        """Check that these are two factors of one matrix (or of as many matrices)."""
        for name, factor in (("a", self.a), ("b", self.b)):
            if type(factor) not in (Tensor, Parameter):
                raise TypeError(
                    f"LowRankUpdate: {name} is a {type(factor).__name__}; give the full factor as a plain tensor "
                    "(full_tensor() of a sharded one, dequantize() of a quantized one)"
                )
            if not factor.is_floating_point() or factor.dtype.itemsize == 1:
                raise TypeError(f"LowRankUpdate: {name} holds {factor.dtype}; expected bf16, fp16, fp32 or fp64 values")
        a, b = tuple(self.a.shape), tuple(self.b.shape)
        if len(a) < 2 or len(a) != len(b) or a[-2] != b[-1] or a[:-2] != b[:-2]:
            raise ValueError(f"LowRankUpdate: a is {a} and b is {b}; expected [.., r, K] and [.., N, r]")
        if not math.isfinite(self.scaling):
            raise ValueError(f"LowRankUpdate: scaling={self.scaling} is not a finite number")

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., N, K], that of the weight it is for."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def __call__(self, index: tuple[slice, ...]) -> Tensor:
        """Return the piece update[index], one slice a dim, fp32 on the factors' device; nothing else is computed."""
        *leading, rows, columns = index
        a = self.a[(*leading, slice(None), columns)].detach().to(torch.float32)  # [.., r, columns]
        b = self.b[(*leading, rows, slice(None))].detach().to(torch.float32)  # [.., rows, r]
        piece = a.new_zeros((*b.shape[:-1], a.shape[-1]))
        chunk = chunk_of(a.device)
        count = max(1, chunk * max(1, piece.shape[-2]) // max(1, piece.numel()))
        for start in range(0, piece.shape[-2], count):
            own, factor = piece[..., start : start + count, :], b[..., start : start + count, :]
            for j in range(a.shape[-2]):
                own.add_(factor[..., j : j + 1] * a[..., j : j + 1, :])
            own.mul_(self.scaling)
        return piece


@dataclass(frozen=True, eq=False)
class UpdateSum:
    """Several updates of one weight, added in fp32 in their order: an update that `merge_` calls.

    Attributes:
        updates: at least one, all of one shape.
    """

    updates: tuple[LowRankUpdate, ...]

    @property
    def through_merge(self) -> bool:
        """Whether all were trained through the merge."""
        return all(update.through_merge for update in self.updates)

    def __call__(self, index: tuple[slice, ...]) -> Tensor:
        """Return the piece sum[index], fp32, which holds the bits of the whole one, since each of its terms does."""
        first, *others = self.updates
        piece = first(index)
        for update in others:
            piece.add_(update(index))
        return piece
