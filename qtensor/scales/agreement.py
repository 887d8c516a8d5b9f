"""What a quantized shard brings to an agreement on shared scales, and how it adopts the outcome.

Stages 1 and 3 of the story in qtensor/scales/__init__.py, for one shard.
A claim is one flat fp32 tensor, so that the claims of a whole model travel in one all-reduce:

    shared scales   [scale ..., amax of the preserved initial value ..., scale as it is ..., minus that ...,
                    amax history ...]
    cut blocks      [facts of the values ..., facts of the initial value ..., scale as it is ..., minus that ...]

A scale is claimed as 0 if every value under it is 0, because the scale of zeros says nothing. The maxima of "scale
as it is" and of its negative tell whether all shards agree already; if they do, no byte changes. For square blocks that
shards cut see cut_blocks.py.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.ranks.scale_partners import Partners
from fsdp_hooks.scale_sync import scales_of_shard
from qtensor.numerics import kernels
from qtensor.scales.cut_blocks import CutBlocks, cut_blocks_of
from qtensor.spec.blocks import BlockFacts
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import (
    adopt,
    block_multiple,
    encode,
    keeps_history,
    row_multiple,
    shares_scale_along,
    specs_of,
    tensor_wide,
)
from qtensor.tensor.contents import decode, initial_value, shared_scale
from qtensor.tensor.quantized_tensor import QuantizedTensor


def flat_amax(dense: Tensor, recipe: Recipe) -> Tensor | None:
    """Return the amaxes behind the scales that shards may share, fp32, flat; None if there are none."""
    amax = kernels.shared_amax(dense, recipe)
    return None if amax is None else amax.reshape(-1)


def claim_of(dense: Tensor, recipe: Recipe, cut: CutBlocks | None) -> Tensor:
    """Return what the values of a shard say about scales that it has in common with others, fp32, flat.

    These are the amaxes of shared scales, then facts of square blocks that shards cut.
    """
    amax = flat_amax(dense, recipe)
    claims = [] if amax is None else [amax]
    if cut is not None:
        claims.append(cut.claim(dense, recipe))
    return claims[0] if len(claims) == 1 else torch.cat(claims)


def decide(
    dense: Tensor, recipe: Recipe, cut: CutBlocks | None, agreed: Tensor | None
) -> tuple[Tensor | None, BlockFacts | None]:
    """Return the flat amax, and the facts of blocks, for `contents.write`, from the maxima over all `claim_of`.

    Both may have one more dim in front: several weights of one shape and cut.
    """
    # an agreed claim without cut blocks is nothing but amaxes
    if agreed is None or cut is None:
        return agreed, None
    shared = agreed.shape[-1] - cut.size(2)
    return agreed[..., :shared] if shared else None, cut.decide(dense, recipe, agreed[..., shared:])


def encode_agreed(dense: Tensor, recipe: Recipe, cut: CutBlocks | None, agreed: Tensor | None) -> dict[str, Tensor]:
    """Return the parts of a shard's values under what was agreed on; None: it has no scale in common with others."""
    amax, blocks = decide(dense, recipe, cut, agreed)
    amax = None if amax is None else amax.view(kernels.amax_shape(dense.shape, recipe))
    return kernels.encode(dense, recipe, amax, blocks)


def scale_of(amax: Tensor, recipe: Recipe) -> Tensor:
    """Return the shared scale that `encode` makes of an amax, fp32 [] or [.., N, 1]; only for recipes that have one."""
    rows = amax.shape[:-1] or (row_multiple(recipe),)
    zeros = torch.zeros(*rows, block_multiple(recipe), dtype=torch.float32, device=amax.device)
    return encode(zeros, recipe, amax)[tensor_wide(recipe) or "scale"]


def common_along(recipe: Recipe, cut: CutBlocks | None, dim: int, ndim: int) -> bool:
    """Return whether pieces cut along `dim` have a scale in common: a shared one, or that of a block they cut."""
    return shares_scale_along(recipe, dim, ndim) or (cut is not None and dim == ndim - 2)


@dataclasses.dataclass(frozen=True)
class RecipeScales:
    """The scales of a shard that has a recipe.

    shard: the local tensor of `param`.
    """

    shard: Any
    param: Tensor

    @functools.cached_property
    def cut(self) -> CutBlocks | None:
        """The square blocks that shards cut."""
        return cut_blocks_of(self.param, self.shard.recipe)

    @property
    def partners(self) -> Partners | None:
        """The weights with which it shares its tensor-wide scale."""
        return self.shard._partners  # type: ignore[no-any-return]

    def kind(self) -> str:
        """Return the recipe, as it is stored, and with whom it shares its scale."""
        stored = repr(self.shard.recipe.stored)
        return stored if self.partners is None else f"{stored}, {self.partners}"

    def may_share(self) -> bool:
        """Return whether some cut of the weight leaves pieces with a scale in common."""
        recipe, ndim = self.shard.recipe, self.shard.ndim
        return row_multiple(recipe) > 1 or any(shares_scale_along(recipe, dim, ndim) for dim in range(ndim))

    def shared_along(self, dim: int) -> bool:
        """Return whether the shards, cut along `dim`, have a scale in common."""
        return common_along(self.shard.recipe, self.cut, dim, self.shard.ndim)


class QuantizedScales(RecipeScales):
    """The scales of a quantized shard."""

    @property
    def pooled(self) -> int:
        """All that a claim says about the shared scale."""
        return 4 + sum(history.numel() for history in self._history())

    @torch.no_grad()
    def claim(self) -> Tensor:
        """Return the claim that the module's docstring describes, fp32, flat."""
        q, values, init = self.shard, decode(self.shard, torch.float32), initial_value(self.shard)
        claims = []
        amax = flat_amax(values, q.recipe)
        if amax is not None:
            # NaN, which marks a row, has no maximum: infinity stands for it
            scale, none = shared_scale(q).reshape(-1).nan_to_num(nan=math.inf, posinf=math.inf), torch.zeros_like(amax)
            of_init = none if init is None else flat_amax(init, q.recipe)
            assert of_init is not None
            claims += [torch.where(amax > 0, scale, none), of_init, scale, -scale, *self._history()]
        if self.cut is not None:
            facts = self.cut.claim(values, q.recipe)
            claims += [facts, torch.zeros_like(facts) if init is None else self.cut.claim(init, q.recipe)]
            claims.append(self.cut.lay_out(self._block_scales(self.cut), fill=-math.inf))
        return torch.cat(claims)

    @torch.no_grad()
    def adopt(self, agreed: Tensor) -> None:
        """Re-encode under the agreed scales; shards, and cut blocks, that agree already keep their bytes.

        With a preserved initial value the result is the quantization of the full tensor's value, bit for bit.
        """
        q, cut, init = self.shard, self.cut, initial_value(self.shard)
        values = decode(q, torch.float32) if init is None else init
        # a shard that agrees already keeps its bytes: encoding decoded values again may choose other codes
        same, facts = torch.ones((), dtype=torch.bool, device=q.device), None
        if cut is not None:
            size = cut.size(2)
            agreed, of_values, of_init, scales = agreed.split([agreed.numel() - 3 * size, size, size, size])
            facts = cut.decide(values, q.recipe, of_values if init is None else of_init)
            largest, smallest = cut.spread(cut.take_over(self._block_scales(cut), scales)).unbind(dim=-3)
            same = (largest == -smallest) & (init is None)  # [.., N, blocks along K]
        if not kernels.shares_amax(q.recipe):
            self._take(kernels.encode(values, q.recipe, None, facts), same)
            return
        scale = shared_scale(q)
        claimed, amax, *extremes = (piece.view_as(scale) for piece in agreed[: 4 * scale.numel()].split(scale.numel()))
        same_shared = extremes[0] == -extremes[1]
        # with the value before rounding at hand, the shard gets the bytes of one process
        if init is not None:
            new = kernels.encode(values, q.recipe, amax, facts)
        else:
            # 0: all shards hold zeros alone, which any scale holds
            claimed = torch.where(claimed > 0, claimed, torch.ones_like(claimed))
            new = adopt(values, q.recipe, claimed, facts)
            same_shared = same_shared | (scale == claimed)
        self._take(new, same & same_shared, same_shared)
        # entry by entry the maxima over shards are the history that one process would have
        for history in self._history():
            history.copy_(agreed[4 * scale.numel() :])

    def _take(self, new: Mapping[str, Tensor], same: Tensor, same_shared: Tensor | None = None) -> None:
        """Write new parts except where blocks, or a scale that all rows share, are the same already."""
        q = self.shard
        for spec in specs_of(q.recipe):
            own, theirs = q.parts()[spec.name], new.get(spec.name)
            if theirs is None or spec.length is not None:
                continue
            keep = same_shared if same_shared is not None and not spec.per_row else same
            if spec.per_row and keep.ndim and keep.shape[-1] > 1:
                keep = keep.repeat_interleave(block_multiple(q.recipe) // spec.block, dim=-1)[..., : own.shape[-1]]
            # as bytes, since torch.where does not support float8
            if own.dtype.itemsize == 1:
                own, theirs = own.view(torch.uint8), theirs.view(torch.uint8)
            own.copy_(torch.where(keep, own, theirs))

    def _block_scales(self, cut: CutBlocks) -> Tensor:
        """Return fp32 [.., 2, groups, blocks along K]: the largest scale in each block, and that of the negatives.

        One-byte scales are compared as bytes, since NaN is not equal to itself.
        """
        scale = self.shard.scale
        numbers = scale if scale.dtype == torch.float32 else scale.view(torch.uint8).to(torch.float32)
        return cut.group_rows(torch.stack([numbers, -numbers], dim=-3), fill=-math.inf)

    def _history(self) -> list[Tensor]:
        """Return the amax history, for recipes that keep one."""
        return [self.shard.parts()["amax_history"]] if keeps_history(self.shard.recipe) else []


class DenseScales(RecipeScales):
    """The scales under which a dense shard is gathered (high_precision.py)."""

    pooled = 1  # its amax

    def kind(self) -> str:
        """Return the recipe of its gathers, and with whom it shares its scale."""
        return f"dense, gathered as {super().kind()}"

    @torch.no_grad()
    def claim(self) -> Tensor:
        """Return `claim_of` the dense values, fp32, flat."""
        return claim_of(self.shard.dense, self.shard.recipe, self.cut)

    @torch.no_grad()
    def adopt(self, agreed: Tensor) -> None:
        """Keep what was agreed on; no byte of the shard changes."""
        # the own claim is kept beside, to see later whether the values are still those
        self.shard.agreement.claims, self.shard.agreement.cut = torch.stack([agreed, self.claim()]), self.cut


scales_of_shard.register(QuantizedTensor, QuantizedScales)
