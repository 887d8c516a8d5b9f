"""Products with a block-diagonal orthogonal matrix R, made of signs and normalized Hadamard matrices.

    R = diag(signs) (I x H)     H = Sylvester's matrix / sqrt(block); I x H has it in every block

    W R      columns: the linear W reads x R instead of x, and gives what it gave        [N, K]
    R^T W    rows: the linear W writes y R instead of y                                  [N, K]

H is applied as log2(block) rounds of sums and differences, in float64. The code fixes the order of additions, so every
device and every number of threads comes to the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.products.input_rotation import hadamard

# Elements at a time: a whole weight in float64 would take four times the memory that it takes in bf16.
PIECE = 2**22


@dataclass(frozen=True, eq=False)
class Rotation:
    """The matrix R [width, width] for every width that is a multiple of its signs.

    Attributes:
        block: size of the Hadamard matrix, a power of two that divides the number of signs.
        signs: +1 and -1, float64 [period] on the CPU; for a longer dim (heads) they repeat.
        inverse: whether it is R^T in place of R.
    """

    block: int
    signs: Tensor
    inverse: bool = False

    def part(self, channels: slice) -> "Rotation":
        """Return the rotation of some channels of a dim, which are whole blocks."""
        count = -(-channels.stop // self.signs.numel())
        return Rotation(self.block, self.signs.repeat(count)[channels], self.inverse)

    def invert(self) -> "Rotation":
        """Return the rotation that undoes this one."""
        return Rotation(self.block, self.signs, not self.inverse)

    def rotate_columns(self, values: Tensor) -> Tensor:
        """Return values R, float64 [..., width]."""
        width = values.shape[-1]
        signs = self.signs.to(values.device).repeat(width // self.signs.numel())
        # H is symmetric, so R^T is H first and then the signs.
        if self.inverse:
            return hadamard(values.double(), self.block) * signs
        return hadamard(values.double() * signs, self.block)

    def rotate_rows(self, values: Tensor) -> Tensor:
        """Return R^T values, float64 [width, ...]."""
        return self.rotate_columns(values.mT).mT if values.ndim > 1 else self.rotate_columns(values)


def signs_of(seed: int | None, period: int) -> Tensor:
    """Draw signs by a seed, float64 [period] on the CPU, the same on every machine; all +1 if it is None."""
    if seed is None:
        return torch.ones(period, dtype=torch.float64, device="cpu")
    # Generators of other devices draw different numbers from the same seed.
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(0, 2, (period,), generator=drawn, dtype=torch.int64, device="cpu").double() * 2 - 1


@torch.no_grad()
def rotate_weight_(weight: Tensor, *, gain: Tensor | None, columns: Rotation | None, rows: Rotation | None) -> None:
    """Write rows^T (weight diag(gain)) columns into the weight, rounded to its dtype at the end.

    Computed in float64, some rows at a time. (torch rounds float64 to bf16 and fp16 by way of fp32.)

    Args:
        weight: [N, K], or a bias [N], whose rows alone can be rotated.
        gain: float64 [K], or None.
        columns: what the columns are multiplied with, or None.
        rows: what the rows are multiplied with, or None.

    Raises:
        OverflowError: a value would leave the range of the dtype; rows before it are written.
    """
    for part in _parts(weight, 1 if rows is None else rows.block):
        values = weight[part].double()
        if gain is not None:
            values = values * gain
        if columns is not None:
            values = columns.rotate_columns(values)
        if rows is not None:
            values = rows.part(part).rotate_rows(values)
        rounded = values.to(weight.dtype)
        # Blocks of fp16 weights may add up to more than fp16 holds; infinities must not pass for weights.
        if bool(torch.isfinite(values).all()) and not bool(torch.isfinite(rounded).all()):
            raise OverflowError(
                f"rotated values leave the range of {weight.dtype} (largest {float(values.abs().max()):.3g}); use "
                "bfloat16 or float32 weights"
            )
        weight[part].copy_(rounded)


def _parts(weight: Tensor, unit: int) -> Iterator[slice]:
    """Yield ranges of rows, a multiple of `unit` each, so that no range cuts a block of rows."""
    step = max(PIECE // max(weight[:1].numel(), 1) // unit, 1) * unit
    for start in range(0, weight.shape[0], step):
        yield slice(start, min(start + step, weight.shape[0]))
