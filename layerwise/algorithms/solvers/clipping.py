"""Clip ratios: scales made from a fraction of the amax, so that most values get a finer grid and a few saturate.

For each scale, the ratios r = 1, 0.95, .. 0.5 are tried: the values it serves are rounded under the scale that r * amax
gives. The ratio of the least error wins, the larger one on a tie. What a scale serves depends on the format:

    blocks   r * the block's amax; the tensor-wide scale above them (NVFP4's) does not change
    rows     r * the row's amax
    tensor   r * the tensor's amax, one ratio for all linears that share the scale

The error is that of the local Hessian, the sum of dW_b^T H_b dW_b over the 16-column blocks that the scale serves:
what the output error would be if the inputs of different blocks were uncorrelated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.algorithms.algorithm import SUB_BLOCK, Group, Linear
from layerwise.algorithms.solvers.candidates import scaled_quantizer, spread
from qtensor.spec.blocks import tile
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, row_multiple, specs_of

Quantizer = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Clipped:
    """The scales of one weight after the search.

    Attributes:
        quantizer: as `Format.quantizer` returns it.
        ratios: fp32, one for each scale: [], [N, 1] or [N, ceil(K / block)].
    """

    quantizer: Quantizer
    ratios: Tensor


def finite_or_zero(weight: Tensor) -> Tensor:
    """Return fp32, with 0 in place of what is not finite: that is marked when stored, and has no say in scales."""
    values = weight.float()
    return torch.where(torch.isfinite(values), values, torch.zeros_like(values))


def round_trip(x: Tensor, recipe: Recipe, quantizer: Mapping[str, Tensor]) -> Tensor:
    """Return fp32 [N, K], the values that x decodes to once it is stored under this quantizer."""
    fmt = format_of(recipe)
    enc, dec = (spread(scales, recipe, x.shape[-1]) for scales in fmt.grid(recipe, quantizer))
    return fmt.snap(x * enc, recipe) * dec


def group_by_scale(linears: Sequence[Linear]) -> list[list[int]]:
    """Return the indices of linears, those that share a tensor-wide scale (equal agreed amaxes) in one list."""
    sets: list[list[int]] = []
    for i, one in enumerate(linears):
        for members in sets:
            other = linears[members[0]].amax
            if one.amax is not None and other is not None and one.amax.ndim == 0 and torch.equal(one.amax, other):
                members.append(i)
                break
        else:
            sets.append([i])
    return sets


def local_hessian_of(hessian: Tensor) -> Tensor:
    """Return the local Hessian [ceil(K / 16), 16, 16] inside a full one, 2 X^T X / tokens."""
    columns = hessian.shape[0]
    padding = -columns % SUB_BLOCK
    blocks = (columns + padding) // SUB_BLOCK
    tiles = F.pad(hessian, (0, padding, 0, padding)).reshape(blocks, SUB_BLOCK, blocks, SUB_BLOCK)
    return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1) / 2  # [b, 16, 16]


def best_clips(group: Group, recipe: Recipe, local_hessian: Tensor, ratios: Sequence[float]) -> list[Clipped]:
    """Find the ratio of every scale of each linear that gives the least local error.

    Args:
        group: with the amaxes of its linears, if the format has shared scales.
        recipe: of all of them.
        local_hessian: fp32 [ceil(K / 16), 16, 16].
        ratios: in descending order, beginning with 1.
    """
    found: list[Clipped | None] = [None] * len(group.linears)
    for members in (
        group_by_scale(group.linears) if _columns_a_scale(recipe) is None else [[i] for i in range(len(group.linears))]
    ):
        linears = [group.linears[i] for i in members]
        weights = [finite_or_zero(one.weight) for one in linears]
        best: list[Tensor] = []
        least: list[Tensor] = []
        for ratio in ratios:
            errors = []
            for w, one in zip(weights, linears, strict=True):
                each = torch.tensor(ratio, dtype=torch.float32, device=w.device)
                quantizer = scaled_quantizer(w, recipe, one.amax, each)
                errors.append(_local_error(round_trip(w, recipe, quantizer) - w, recipe, local_hessian))
            if _columns_a_scale(recipe) is None:
                # One scale serves all these linears: it is chosen by the error that they make
                # together.
                errors = [torch.stack(errors).sum(dim=0)] * len(errors)
            if not least:
                best, least = [torch.full_like(error, ratio) for error in errors], errors
            # Ratios fall, so on a tie the larger one stays: it lets no value saturate for nothing.
            better = [new < old for new, old in zip(errors, least, strict=True)]
            best = [torch.where(b, ratio, old) for b, old in zip(better, best, strict=True)]
            least = [torch.where(b, new, old) for b, new, old in zip(better, errors, least, strict=True)]
        for i, one, w, chosen in zip(members, linears, weights, best, strict=True):
            found[i] = Clipped(scaled_quantizer(w, recipe, one.amax, chosen), chosen)
    return [one for one in found if one is not None]


def _columns_a_scale(recipe: Recipe) -> int | None:
    """Return how many columns one scale serves; 0 for the whole row, None for the whole tensor."""
    spec = next(spec for spec in specs_of(recipe) if spec.name == "scale")
    return spec.block if spec.per_row else None


def _local_error(off: Tensor, recipe: Recipe, local_hessian: Tensor) -> Tensor:
    """Return the local error of `off` [N, K] for each scale, shaped like its scales."""
    block = _columns_a_scale(recipe)
    tiles = tile(off, SUB_BLOCK).transpose(0, 1)  # [b, N, 16]
    each = (torch.bmm(tiles, local_hessian) * tiles).sum(dim=-1).t()  # [N, b]
    if block is None:
        return each.sum()
    if block == 0:
        return each.sum(dim=-1, keepdim=True)
    errors = tile(each, block // SUB_BLOCK).sum(dim=-1)  # [N, ceil(K / block)]
    rows = row_multiple(recipe)
    if rows == 1:
        return errors
    groups = F.pad(errors, (0, 0, 0, -len(errors) % rows)).unflatten(0, (-1, rows))  # the last may be short
    square: Tensor = groups.sum(dim=1).repeat_interleave(rows, dim=0)  # [>= N, ceil(K / block)]
    return square[: len(errors)]
