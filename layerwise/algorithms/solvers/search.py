"""The search for better scales: tries every candidate (candidates.py), and keeps the best for each scale.

    error(scale) = sum of e_b^T H_b e_b over the blocks b it serves,   e = decoded - weight, H_b = 1 or of b's inputs

A scale serves a block of 16, 32 or 128, a square block, a row, or the whole tensor. The rules:

    the scale of the amax is kept unless a candidate beats it by more than rounding (`BETTER`): never worse than Max
    of candidates with equal errors the smallest scale wins

Nothing is packed into payloads: an error needs `Format.snap` alone. Rows are taken a few at a time, so that they stay
in the processor's cache, and transposed, [K, rows], so that the rows of one scale lie side by side.

Without H, each element's error counts by itself, and two kinds of candidates need no trial. The first are too large:
`candidates(elementwise=True)` leaves out scales whose half is at least as good. That is exact except for elements
beside a tie, which the rounding of weight / scale, by 2^-23 of it, may send to either side. The second are too small:
they saturate the largest element, whose (amax - largest * dec)^2 is one term of the error. If that alone exceeds the
best error so far, this candidate loses, and so do all later ones, whose scales are smaller. Rounding is monotonic, so a
computed sum is no less than any of its computed terms: skipping these changes no choice.

With H, an error is at least (w^T H e)^2 / w^T H w (Cauchy-Schwarz), and decoded values are at most largest * dec, so

    |w^T H e| >= w^T H w - largest * dec * sum |H w|

which also rises as scales fall. A tenth of it is allowed for the rounding of fp32 sums.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.algorithms.algorithm import SUB_BLOCK
from layerwise.algorithms.solvers.candidates import candidates
from qtensor.spec.blocks import finite_amax, quotient
from qtensor.spec.codecs.rounding import power_of_two_floor
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, format_of, row_multiple, specs_of

if TYPE_CHECKING:
    from qtensor.spec.format import Format

# Errors are sums of 16 terms in fp32, the rest in fp64: off by less than 20 * 2^-24 of themselves, and so is Max's.
BETTER = 1 - 2.0**-18
ROWS = 64  # rows are taken in multiples of it, for whole vector registers, and of square blocks
CPU_ELEMENTS, ELEMENTS = 2**16, 2**24  # about so many at once: a few such fp32 tensors fit into a cache of 1 MiB

Quantizer = Mapping[str, Tensor]


@torch.no_grad()
def search(
    weight: Tensor, recipe: Recipe, amax: Tensor | None, hessian: Tensor | None = None
) -> tuple[dict[str, Tensor], float]:
    """Return the quantizer of least error among Max's and the candidates.

    Args:
        weight: [N, K]; elements that are not finite do not count.
        recipe: how it is quantized.
        amax: the amax of its shared scale; None for formats without one.
        hessian: fp32 [ceil(K / 16), 16, 16], weighs the errors of 16 columns each; None for squared errors.

    Returns:
        The quantizer, and the mean ratio of its scales to Max's.
    """
    fmt = format_of(recipe)
    if weight.numel() == 0:
        return fmt.quantizer(weight.float(), recipe, amax), 1.0
    # Squared errors of tiny or huge weights would leave the range of fp32. A power of two moves exponents alone.
    unit = quotient(1.0, power_of_two_floor(finite_amax(weight).float().clamp(2.0**-126, 2.0**126)))
    found, ratios = [], []
    for rows in _row_ranges(weight, recipe):
        x = weight[rows].float()
        # What is not finite is marked when stored, under any scale; one NaN here would make every error NaN.
        x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
        shared = amax[rows] if amax is not None and amax.ndim else amax
        own = fmt.quantizer(x, recipe, shared)
        tried = candidates(x, recipe, shared, elementwise=hessian is None)
        best = _best(_Span(x, recipe, own, unit, hessian), own, tried)
        found.append(best)
        before, after = (fmt.grid(recipe, quantizer)[1].double() for quantizer in (own, best))
        ratios.append(torch.stack([(after / before)[before > 0].sum(), (before > 0).sum()]))
    total, count = torch.stack(ratios).sum(dim=0).tolist()
    quantizer = {
        name: torch.cat([each[name] for each in found]) if part.ndim else part for name, part in found[0].items()
    }
    return quantizer, total / count if count else 1.0


def _row_ranges(weight: Tensor, recipe: Recipe) -> Iterator[slice]:
    """Yield the rows to search together, few at a time unless all share one scale."""
    whole = not any(spec.per_row for spec in specs_of(recipe)[1:])
    step = len(weight) if whole else _rows_at_once(weight, recipe)
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _rows_at_once(weight: Tensor, recipe: Recipe) -> int:
    elements = CPU_ELEMENTS if weight.device.type == "cpu" else ELEMENTS
    rows = math.lcm(ROWS, row_multiple(recipe))
    return max(elements // weight.shape[1] // rows, 1) * rows


class _Span:
    """Rows of a weight that share no scale with others, laid out for many roundings."""

    def __init__(self, x: Tensor, recipe: Recipe, own: Quantizer, unit: Tensor, hessian: Tensor | None) -> None:
        """Take x, fp32 [R, K], finite; own, Max's quantizer; unit, fp32 [], a power of two, for errors near 1."""
        self.recipe, self.unit = recipe, unit
        self.fmt: Format = format_of(recipe)
        missing = -x.shape[1] % math.lcm(SUB_BLOCK, block_multiple(recipe))
        if hessian is not None:
            # A scale's last block may end behind K: what is padded there is zero, and is weighed with
            # zero.
            hessian = F.pad(hessian, (0, 0, 0, 0, 0, (x.shape[1] + missing) // SUB_BLOCK - len(hessian)))
        self.hessian = hessian
        rows = (F.pad(x, (0, missing)) if missing else x).split(_rows_at_once(x, recipe))
        self.tiles = [(few * unit).t().contiguous() for few in rows]  # [K, rows] each
        scale, _ = self.fmt.grid(recipe, own)
        self.scales = scale.shape[1] if scale.ndim else 0  # of each row; 0: all rows share one
        self.amax = self._reduce_shared([self._blocks(tile).abs().amax(dim=1).t() for tile in self.tiles], torch.amax)
        self.largest = -self.fmt.snap(torch.full_like(unit, -torch.inf), recipe)  # of INT4 8: 7 is the positive one
        if hessian is not None:
            moments = [self._moments(tile, hessian) for tile in self.tiles]
            self.norm, self.reach = (self._reduce_shared(list(each), torch.sum) for each in zip(*moments, strict=True))

    def errors(self, quantizer: Quantizer) -> Tensor:
        """Return fp64, one for each scale."""
        grid = [self._per_tile(scale) for scale in self._grid(quantizer)]
        return self._reduce_shared([self._errors(*each) for each in zip(self.tiles, *grid, strict=True)], torch.sum)

    def least_errors(self, quantizer: Quantizer) -> Tensor:
        """Return a lower bound of the errors: no element decodes to more than the largest; see above."""
        _, dec = self._grid(quantizer)
        if self.hessian is None:
            too_large: Tensor = self.amax - self.largest * dec
            return too_large.clamp_(min=0).square_()
        least = (self.norm - self.largest * dec * self.reach).clamp_(min=0).square_() / self.norm * 0.9
        return torch.where(self.norm > 0, least, 0.0)

    def _moments(self, tile: Tensor, hessian: Tensor) -> list[Tensor]:
        """Return fp64 [rows, scales]: w^T H w and sum |H w|."""
        w = tile.view(-1, SUB_BLOCK, tile.shape[1]).double()
        weighed = torch.bmm(hessian.double(), w)
        return [self._blocks(each.sum(dim=1)).sum(dim=1).t() for each in (w * weighed, weighed.abs())]

    def _grid(self, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
        enc, dec = self.fmt.grid(self.recipe, quantizer)
        return (enc / self.unit).clamp(max=torch.finfo(enc.dtype).max), dec * self.unit

    def _per_tile(self, scale: Tensor) -> list[Tensor]:
        """Cut a scale into [scales, 1, rows] for each tile."""
        if not self.scales:
            return [scale.view(1, 1, 1)] * len(self.tiles)
        return [part.t().unsqueeze(1).contiguous() for part in scale.split(self.tiles[0].shape[1])]

    def _blocks(self, tile: Tensor) -> Tensor:
        """View [K, rows] or [K // 16, rows] as [scales, entries of each scale, rows]."""
        return tile.view(self.scales or 1, -1, tile.shape[1])

    def _errors(self, tile: Tensor, enc: Tensor, dec: Tensor) -> Tensor:
        """Return the errors of a tile, fp64 [rows, scales]."""
        blocks = self._blocks(tile)
        error = self.fmt.snap(blocks * enc, self.recipe).mul_(dec).sub_(blocks).view(-1, SUB_BLOCK, tile.shape[1])
        weighed = error if self.hessian is None else torch.bmm(self.hessian, error)
        sums = (error * weighed).sum(dim=1).double()  # [K // 16, rows]
        return self._blocks(sums).sum(dim=1).t()

    def _reduce_shared(self, per_tile: list[Tensor], reduce: Callable[..., Tensor]) -> Tensor:
        """Reduce [rows, scales] over the rows that share a scale; all rows of a square block get the result."""
        per_row, rows = torch.cat(per_tile), row_multiple(self.recipe)
        if not self.scales:
            return reduce(per_row)
        if rows == 1:
            return per_row
        groups = F.pad(per_row, (0, 0, 0, -len(per_row) % rows)).unflatten(0, (-1, rows))  # the last may be short
        return reduce(groups, dim=1, keepdim=True).expand_as(groups).flatten(0, 1)[: len(per_row)]


def _best(span: _Span, own: Quantizer, tried: Iterator[dict[str, Tensor]]) -> Quantizer:
    """Return the best for each scale: `own`, or the tried one of least error; on a tie the last, since scales fall."""
    best, least = own, span.errors(own)
    enough = least * BETTER
    for candidate in tried:
        bound = span.least_errors(candidate)
        # Bounds only rise from here, so no later candidate wins anywhere: most of the search ends early.
        if not ((bound < enough) & (bound <= least)).any():
            break
        errors = span.errors(candidate)
        better = (errors < enough) & (errors <= least)
        least = torch.where(better, errors, least)
        best = {  # all other parts, such as a global scale, are the same in every quantizer
            name: torch.where(better, part, best[name]) if part.shape == better.shape else part
            for name, part in candidate.items()
        }
    return best
