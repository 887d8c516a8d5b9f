"""What a quantized shard brings to an agreement on shared scales, and how it adopts the outcome.

A claim is one flat fp32 tensor, so that the claims of a whole model travel in one all-reduce:

    [scale ..., amax of the preserved initial value ..., scale as it is ..., minus that ..., amax history ...]

A scale is claimed as 0 where every value under it is 0, because the scale of zeros says nothing. The maxima of "scale
as it is" and of its negative tell whether all shards agree already; if they do, no byte changes.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.scale_sync import scales_of
from qtensor import kernels
from qtensor.contents import decoded, initial_value, shared_scale
from qtensor.formats import adopt, keeps_history, shares_scale_along
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor


def flat_amax(dense: Tensor, recipe: Recipe) -> Tensor | None:
    """fp32, flat: the amaxes of dense values behind the scales that shards may share; None where there are none."""
    amax = kernels.shared_amax(dense, recipe)
    return None if amax is None else amax.reshape(-1)


@dataclasses.dataclass(frozen=True)
class RecipeScales:
    """The scales of a shard that has a recipe."""

    shard: Any

    def shared_along(self, dim: int) -> bool:
        """Whether pieces cut along `dim` share a scale: tensor-wide scales along every dim, row scales along K."""
        return shares_scale_along(self.shard.recipe, dim, self.shard.ndim)


class QuantizedScales(RecipeScales):
    """The scales of a quantized shard."""

    def kind(self) -> str:
        """The recipe, as it is stored."""
        return repr(self.shard.recipe.stored)

    @torch.no_grad()
    def claim(self) -> Tensor:
        """fp32 [4 n + history]: see the module's docstring; n scales are shared."""
        q, scale = self.shard, shared_scale(self.shard).reshape(-1)
        amax, value = flat_amax(decoded(q, torch.float32), q.recipe), initial_value(q)
        init = torch.zeros_like(scale) if value is None else flat_amax(value, q.recipe)
        assert amax is not None
        assert init is not None
        return torch.cat([torch.where(amax > 0, scale, torch.zeros_like(scale)), init, scale, -scale, *self._history()])

    @torch.no_grad()
    def adopt(self, agreed: Tensor) -> None:
        """Re-encode under the agreed scale; shards that agree already keep their bytes.

        With a preserved initial value the result is the quantization of the full tensor's value, bit for bit.
        """
        q, scale, value = self.shard, shared_scale(self.shard), initial_value(self.shard)
        claimed, amax, largest, smallest = (
            piece.view_as(scale) for piece in agreed[: 4 * scale.numel()].split(scale.numel())
        )
        same = largest == -smallest
        if value is not None:
            new = kernels.encode(value, q.recipe, amax)
        else:
            claimed = torch.where(claimed > 0, claimed, torch.ones_like(claimed))
            new = adopt(decoded(q, torch.float32), q.recipe, claimed)
            same = same | (scale == claimed)
        parts = q.parts()
        for name, part in new.items():
            if name == "amax_history":
                continue
            if part.dtype == torch.float32:
                parts[name].copy_(torch.where(same, parts[name], part))
            else:  # as bytes, since torch.where does not support float8
                own, theirs = parts[name].view(torch.uint8), part.view(torch.uint8)
                own.copy_(torch.where(same, own, theirs))
        for history in self._history():
            history.copy_(agreed[4 * scale.numel() :])

    def _history(self) -> list[Tensor]:
        """The amax history, for recipes that keep one."""
        return [self.shard.parts()["amax_history"]] if keeps_history(self.shard.recipe) else []


scales_of.register(QuantizedTensor, QuantizedScales)
