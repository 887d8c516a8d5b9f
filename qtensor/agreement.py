"""What a quantized shard brings to an agreement on shared scales, and how it adopts the outcome.

The claim is one flat fp32 tensor, so that those of a whole model travel in one all-reduce:

    [scale ..., amax of the preserved initial value ..., amax history ...]      (each 0 or empty where there is none)

A scale is claimed as 0 where every value under it is 0: the scale of zeros says nothing.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.scale_sync import SharesScales
from qtensor.formats import format_of, shares_scale_along

__all__ = ["AgreedScales"]


class AgreedScales(SharesScales):
    """Mixin of QuantizedTensor: `fsdp_hooks.sync_scales` from the side of one shard."""

    def shares_scale_along(self: Any, dim: int) -> bool:
        """Whether pieces cut along `dim` share a scale: tensor-wide scales along every dim, scales a row along K."""
        return shares_scale_along(self.recipe, dim, self.ndim)

    @torch.no_grad()
    def scale_claim(self: Any) -> Tensor:
        """fp32 [2 n + history]: scales, amaxes of the initial value, history; n scales are shared."""
        scale = self.shared_scale().reshape(-1)
        amax = self.shared_amax(self.decoded(torch.float32))
        init = torch.zeros_like(scale) if self.init_value is None else self.shared_amax(self.init_value)
        claims = [torch.where(amax > 0, scale, torch.zeros_like(scale)), init, *self.history()]
        return torch.cat(claims)

    @torch.no_grad()
    def adopt_scale(self: Any, agreed: Tensor) -> None:
        """Re-encode under the agreed scale; a scale that is the same leaves its bytes alone.

        With a preserved initial value this is the quantization of the full tensor's value, bit for bit.
        """
        scale = self.shared_scale()
        claimed, amax = agreed[: scale.numel()].view_as(scale), agreed[scale.numel() :][: scale.numel()].view_as(scale)
        if self.init_value is not None:
            self.write(self.init_value, amax)
            return
        claimed = torch.where(claimed > 0, claimed, torch.ones_like(claimed))
        new = format_of(self.recipe).adopt(self.decoded(torch.float32), self.recipe, claimed)
        same = scale == claimed
        parts = self.parts()
        for name, value in new.items():
            if parts[name].ndim == 0:
                parts[name].copy_(value)
            else:  # as bytes, since torch.where knows no float8
                own, theirs = parts[name].view(torch.uint8), value.view(torch.uint8)
                own.copy_(torch.where(same, own, theirs))
        for history in self.history():
            history.copy_(agreed[2 * scale.numel() :])

    def shared_scale(self: Any) -> Tensor:
        """The scale that cuts can share, fp32: [] where it is tensor-wide, else [.., N, 1]."""
        part: Tensor = getattr(self, self.tensor_wide() or "scale")
        return part

    def history(self: Any) -> list[Tensor]:
        """The amax history, for recipes that keep one."""
        return [self.amax_history] if hasattr(self, "amax_history") else []
