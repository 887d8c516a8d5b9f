"""Is each scale the one that its own values ask for? Judged from the parts alone, without the values before rounding.

Quantizing makes a scale from the largest magnitude among its values, and so that this value becomes an element near the
largest one that the element's dtype has. So these are looked at:

    elements      the largest |element| under each scale of a block, a row or the tensor
    scales        the largest scale of a block in the tensor, under NVFP4's global scale
    square        all rows of a square block hold one scale

Each format says what must hold of them (`Format.asked`), and accepts all that its quantizer can leave behind, also by
stochastic rounding. Except under the least scales the converse is true, too: parts of which it holds are those of some
values. So a scale that belongs to another payload is found where the two do not fit (zeros under a scale of values, or
elements that use a small part of their range), and not where they happen to fit. Masters and histories find those
(requantizing.py, float8_delayed.py).

Scales from elsewhere are no fault: calibration searches for them, exact conversions and rows cut from a tensor keep
them, files of others come with them. So a caller must know that the scales were made by quantizing. How ranks come to
the scales that they share is told in qtensor/scales/__init__.py.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qtensor.spec.blocks import scatter_blocks, tile
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, keeps_history, row_multiple, specs_of, tensor_wide


class OwnScales:
    """The judgement of one tensor, some rows at a time: each call of `see` gets whole blocks of it.

    Attributes:
        scales: how many scales were judged; square blocks count once a row.
        others: how many of them their values do not ask for.

    Args:
        recipe: of the tensor.
        wide: whether all of the tensor is seen, so that its tensor-wide scale can be judged.
        rows: whether rows are seen whole, so that the scale of a row can be.
    """

    def __init__(self, recipe: Recipe, *, wide: bool = True, rows: bool = True) -> None:
        self.recipe = recipe
        self.format = format_of(recipe)
        # a history, not the values, decides
        self.judges = self.format.judges and not keeps_history(recipe)
        self._wide = tensor_wide(recipe) if wide else None
        # below the tensor-wide scale, fp32 [], on the CPU
        self._largest: Tensor | None = None
        self._scale = next(spec for spec in specs_of(recipe) if spec.name == "scale") if self.judges else None
        self._blocks = self._scale is not None and self._scale.per_row and (rows or self._scale.block > 0)
        self._parts: Mapping[str, Tensor] = {}
        self.scales = self.others = 0

    def see(self, parts: Mapping[str, Tensor]) -> None:
        """Judge whole rows of blocks: the parts of [.., n, K]."""
        if not self.judges or not parts["payload"].numel():
            return
        self._parts = parts
        # NaN has no part in an amax
        elements = elements_of(parts, self.recipe).abs().nan_to_num_(0.0)
        if self._blocks:
            largest = self._under_scales(elements)
            asked = self.format.asked(parts, self.recipe, "scale", largest) & self._hold_one_scale(parts["scale"])
            self.scales += asked.numel()
            self.others += int((~asked).sum())
        # the tensor-wide scale follows from the largest of what is below it, which is known at the end
        if self._wide is not None:
            below = elements if self._wide == "scale" else parts["scale"].float().nan_to_num(math.inf)  # may have led
            top = below.amax().cpu()
            self._largest = top if self._largest is None else torch.maximum(self._largest, top)

    def judge_tensor_wide(self) -> None:
        """Judge the tensor-wide scale, when all has been seen."""
        if self._wide is None or self._largest is None:
            return
        # the largest of all pieces is known only now
        parts = {self._wide: self._parts[self._wide].cpu()}
        self.scales += 1
        self.others += int(not bool(self.format.asked(parts, self.recipe, self._wide, self._largest).all()))

    def _under_scales(self, elements: Tensor) -> Tensor:
        """Return the largest of the elements under each scale, fp32 in the shape of the scale."""
        assert self._scale is not None
        if not self._scale.block:
            return elements.amax(dim=-1, keepdim=True)
        largest = tile(elements, self._scale.block).amax(dim=-1)
        group = row_multiple(self.recipe)
        return scatter_blocks(largest, group) if group > 1 else largest

    def _hold_one_scale(self, scale: Tensor) -> Tensor:
        """Return whether all rows of a square block hold one scale; True for other blocks."""
        group = row_multiple(self.recipe)
        if group == 1:
            return torch.ones((), dtype=torch.bool, device=scale.device)
        numbers = scale if scale.dtype.itemsize > 1 else scale.view(torch.uint8)
        numbers = numbers.to(torch.float32)
        return scatter_blocks(numbers, group, fill=-math.inf) == -scatter_blocks(-numbers, group, fill=-math.inf)


def elements_of(parts: Mapping[str, Tensor], recipe: Recipe) -> Tensor:
    """Return the values of the elements themselves, fp32 [.., N, K]: what the payload decodes to under scales of 1."""
    # under scales of 1 the decoded values are the elements
    ones: dict[str, Tensor] = {}
    for spec in specs_of(recipe)[1:]:
        if spec.length is None and spec.numbers is not None:
            shape = parts[spec.name].shape if spec.per_row else ()
            one = torch.ones((), dtype=torch.float32, device="cpu").to(spec.numbers).view(spec.dtype)
            ones[spec.name] = one.to(parts["payload"].device).expand(shape)
    return format_of(recipe).decode({"payload": parts["payload"], **ones}, recipe)
