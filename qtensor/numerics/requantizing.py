"""Do parts belong to the master they stand beside? Exactly, from pieces of both.

    written    parts == quantize(master)      an optimizer step wrote them
    fresh      master == dequantize(parts)    no step has moved the master that was made from them

One of the two holds for the whole of a weight that MasterWeightOptimizer trains (qtensor/optim): it always rounds to
nearest, so the bytes of a step follow from the master.

A piece of a weight need not know the amax of all of it. A scale that pieces share is among the parts, and only a few
neighbouring fp32 numbers, taken as the amax, lead to that scale: the piece is written if one of them gives its bytes.
The amax of the master itself is compared when all pieces have been seen. How ranks come to the scales that they share
is told in qtensor/scales/__init__.py.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qtensor.numerics import kernels
from qtensor.spec.blocks import finite_amax
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, encode, keeps_history, row_multiple, specs_of, tensor_wide

NEAR = (0, 1, -1, 2, -2, 3, -3, 4, -4)  # units in the last place: each of two divisions rounds by half a unit
LEAST = 2.0**-100  # of a shared scale: far below it formats clamp, and amaxes are subnormal: nothing can be told


class MasterCheck:
    """The comparison of one weight with its master, some rows at a time: each call of `see` gets whole blocks.

    Attributes:
        written, fresh: whether all that was seen is.
        differing, bytes: of all bytes seen, how many are not those of quantizing the master.

    Args:
        recipe: of the weight.
        whole: whether all of the weight is seen, so that its tensor-wide scale can be compared.
        rows: whether rows are seen whole, so that the scale of a row can be.
    """

    def __init__(self, recipe: Recipe, *, whole: bool = True, rows: bool = True) -> None:
        self.recipe, self.whole, self.rows = recipe, whole, rows
        self.written = self.fresh = True
        self.differing = self.bytes = 0
        self._amax = torch.zeros((), dtype=torch.float32, device="cpu")
        self._wide: dict[str, Tensor] = {}

    def see(self, parts: Mapping[str, Tensor], master: Tensor) -> None:
        """Compare the parts of [.., n, K] with the same rows of the master, fp32 [.., n, K]."""
        if not master.numel():
            return
        self._amax = torch.maximum(self._amax, finite_amax(master).cpu())
        self._wide = {spec.name: parts[spec.name].cpu() for spec in specs_of(self.recipe) if not spec.per_row}
        # one value that differs settles it: from then on only "written" can still hold
        if self.fresh:
            values = kernels.decode(parts, self.recipe, torch.float32)
            self.fresh = bool(((values == master) | (values.isnan() & master.isnan())).all())
        self.differing += differing_bytes(parts, master, self.recipe, whole_rows=self.rows)
        self.bytes += sum(parts[spec.name].nbytes for spec in specs_of(self.recipe) if spec.per_row)
        self.written = not self.differing

    def parts_belong(self) -> bool:
        """Return whether the weight is written or fresh, when all of it has been seen."""
        wide = tensor_wide(self.recipe)
        # each piece agrees with the scale that is stored; only the whole tells whether the weight asks for it
        if self.whole and self.written and self._wide:
            if keeps_history(self.recipe):
                self.written = bool(self._wide["amax_history"][0] == self._amax)
            elif wide is not None and float(self._wide[wide]) >= LEAST:
                self.written = bool(self._wide[wide] == _scale_of(self._amax, self.recipe))
        return self.written or self.fresh


def differing_bytes(parts: Mapping[str, Tensor], master: Tensor, recipe: Recipe, *, whole_rows: bool) -> int:
    """Count bytes of a piece's parts that differ from those of quantizing its master, without tensor-wide parts.

    Under a scale that pieces share, every amax that leads to this scale is tried, and the smallest count is returned; 0
    if the scale is below LEAST. `whole_rows`: the piece is not cut along K, so its own amax decides a row's scale.
    """
    if not kernels.shares_amax(recipe):
        return int(_count_differing(parts, kernels.encode(master, recipe), recipe).sum())
    wide = tensor_wide(recipe)
    scale = parts[wide or "scale"]  # [] or [.., N, 1]
    own = kernels.shared_amax(master, recipe)
    assert own is not None
    fewest = torch.full_like(scale, math.inf)
    # the amax of the whole weight is not at hand, but few numbers lead to the scale that is stored
    for amax in _amaxes(own, scale, recipe, alone=wide is None and whole_rows):
        if wide and float(scale) >= LEAST and not torch.equal(_scale_of(amax, recipe), scale):
            continue  # without quantizing what cannot be it
        made = kernels.encode(master, recipe, amax)
        rows = _count_differing(parts, made, recipe)  # [.., N, 1]
        apart = rows.sum() if wide else rows
        led = made[wide or "scale"] == scale
        fewest = torch.minimum(fewest, torch.where(led | (wide is None and whole_rows), apart, math.inf))
        if not bool(fewest.any()):
            break
    # so far down the bytes tell nothing, and a false alarm would be worse
    fewest = torch.where(scale < LEAST, 0.0, fewest)
    every = sum(parts[spec.name].nbytes for spec in specs_of(recipe) if spec.per_row) // max(fewest.numel(), 1)
    return int(fewest.nan_to_num(posinf=every).sum())


def _amaxes(own: Tensor, scale: Tensor, recipe: Recipe, *, alone: bool) -> Iterator[Tensor]:
    """Yield the amaxes that may have led to a shared scale, fp32 in its shape, first that of the values (`own`).

    alone: no other piece has a part in it.
    """
    yield own
    if alone:
        return
    # the amax that exact arithmetic would lead to this scale; rounding moves it by few units
    nearest = (scale.double() / _scale_of(torch.ones_like(scale), recipe).double()).float()
    for step in NEAR:
        yield (nearest.view(torch.int32) + step).view(torch.float32)


def _scale_of(amax: Tensor, recipe: Recipe) -> Tensor:
    """Return the shared scale that quantizing makes of an amax, in the shape of the amax: [] or [.., N, 1]."""
    rows = amax.shape[:-1] if amax.ndim else (row_multiple(recipe),)
    zeros = torch.zeros(*rows, block_multiple(recipe), dtype=torch.float32, device=amax.device)
    return encode(zeros, recipe, amax)[tensor_wide(recipe) or "scale"]


def _count_differing(parts: Mapping[str, Tensor], made: Mapping[str, Tensor], recipe: Recipe) -> Tensor:
    """Return fp32 [.., N, 1]: the bytes of each row that differ."""
    found = [
        (parts[spec.name].view(torch.uint8) != made[spec.name].view(torch.uint8)).sum(dim=-1, keepdim=True)
        for spec in specs_of(recipe)
        if spec.per_row
    ]
    return torch.stack(found).sum(dim=0).to(torch.float32)
