"""What a quantized shard brings to an agreement on shared scales, and how it adopts the outcome.

The claim is one flat fp32 tensor, so that those of a whole model travel in one all-reduce:

    [scale ..., amax of the preserved initial value ..., scale as it is ..., minus that ..., amax history ...]

A scale is claimed as 0 where every value under it is 0: the scale of zeros says nothing. The largest and the smallest
scale as they are tell whether all shards agree already; then no byte changes.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.scale_sync import SharesScales
from qtensor import kernels
from qtensor.formats import adopt, shares_scale_along


class AgreedScales(SharesScales):
    """Mixin of QuantizedTensor: `fsdp_hooks.sync_scales` from the side of one shard."""

    def shares_scale_along(self: Any, dim: int) -> bool:
        """Whether pieces cut along `dim` share a scale: tensor-wide scales along every dim, scales a row along K."""
        return shares_scale_along(self.recipe, dim, self.ndim)

    def scale_kind(self: Any) -> str:
        """The recipe, as it is stored."""
        return repr(self.recipe.stored)

    @torch.no_grad()
    def scale_claim(self: Any) -> Tensor:
        """fp32 [4 n + history]: see the module's docstring; n scales are shared."""
        scale = self.shared_scale().reshape(-1)
        amax = self.shared_amax(self.decoded(torch.float32))
        init = torch.zeros_like(scale) if self.init_value is None else self.shared_amax(self.init_value)
        claims = [torch.where(amax > 0, scale, torch.zeros_like(scale)), init, scale, -scale, *self.history()]
        return torch.cat(claims)

    @torch.no_grad()
    def adopt_scale(self: Any, agreed: Tensor) -> None:
        """Re-encode under the agreed scale; shards that agree already keep their bytes.

        With a preserved initial value this is the quantization of the full tensor's value, bit for bit.
        """
        scale = self.shared_scale()
        claimed, amax, largest, smallest = (
            piece.view_as(scale) for piece in agreed[: 4 * scale.numel()].split(scale.numel())
        )
        same = largest == -smallest
        if self.init_value is not None:
            new = kernels.encode(self.init_value, self.recipe, amax)
        else:
            claimed = torch.where(claimed > 0, claimed, torch.ones_like(claimed))
            new = adopt(self.decoded(torch.float32), self.recipe, claimed)
            same = same | (scale == claimed)
        parts = self.parts()
        for name, value in new.items():
            if name == "amax_history":
                continue
            if value.dtype == torch.float32:
                parts[name].copy_(torch.where(same, parts[name], value))
            else:  # as bytes, since torch.where knows no float8
                own, theirs = parts[name].view(torch.uint8), value.view(torch.uint8)
                own.copy_(torch.where(same, own, theirs))
        for history in self.history():
            history.copy_(agreed[4 * scale.numel() :])

    def shared_scale(self: Any) -> Tensor:
        """The scale that cuts can share, fp32: [] where it is tensor-wide, else [.., N, 1]."""
        part: Tensor = getattr(self, self.tensor_wide() or "scale")
        return part

    def history(self: Any) -> list[Tensor]:
        """The amax history, for recipes that keep one."""
        return [self.amax_history] if hasattr(self, "amax_history") else []
