"""Float8 with delayed scaling: one fp32 scale a tensor, made from the amaxes of earlier steps.

    amax    = max(amax_history)  or  amax_history[0], the most recent
    enc     = max_q * 2^-margin / amax       where amax is finite and > 0 (inf -> FLT_MAX), else the previous enc
    scale   = 1 / enc
    q       = RNE(clamp(x * enc, -max_q, max_q))
    then the history is rolled by one and this step's amax recorded in front

These are the formulas of TransformerEngine's delayed scaling. The history is a part like the scale: shards agree on it,
and it is saved, loaded and resharded. Only the all-gather leaves it out, because no product needs it.

The caller decides what a step is: MasterWeightOptimizer's writes are steps. Any other write (an initialisation, a
`copy_` of dense values, an update by an ordinary optimizer) begins the history anew with the amax of what is written,
so that values of another magnitude are never clamped under an old scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtensor.formats.float8 import (
    ROUTE,
    Float8,
    Float8CurrentScaling,
    Float8Tensor,
)
from qtensor.spec.blocks import FLT_MAX, quotient
from qtensor.spec.codecs.fp8 import ELEMENTS
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register

MOST_MARGIN = 126  # 2^-126 is the least number that fp32 has in full
ROUNDING = 2.0**-20  # of an amax times enc, which is known from the scale up to a few fp32 roundings


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8DelayedScaling(Recipe):
    """Float8 with one scale a tensor, taken from the amaxes of earlier steps.

    Args:
        element: "e4m3" (largest value 448) or "e5m2" (57344).
        amax_history_len: number of steps that are remembered, at least 1.
        amax_compute: "max" of the history, or "most_recent".
        margin: powers of two of headroom, 0 to 126.
        activations: None, or "dynamic": a linear layer quantizes its input too, with one current scale a row.
        gradients: None, or with activations="dynamic" the element of gradients, "e5m2" or "e4m3": both products of
            backward are then low-precision ones, with current scales (see qtensor/products/gradients.py).
        accumulation: None, or with activations="dynamic" "fast": tensor cores add up the product of forward in fewer
            bits, as torchao's default does (see docs/numerics.md).

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Float8DelayedScaling(amax_history_len=16))
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 64), 'scale': (), 'amax_history': (16,)}
        ```
    """

    gradient_elements: ClassVar[tuple[str, ...]] = tuple(ELEMENTS)
    accumulations: ClassVar[tuple[str, ...]] = ("fast",)

    element: str = "e4m3"
    amax_history_len: int = 1024
    amax_compute: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "element", tuple(ELEMENTS))
        check_choice(self, "amax_compute", ("max", "most_recent"))
        for field, least in (("amax_history_len", 1), ("margin", 0)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ValueError(f"Float8DelayedScaling: {field}={value!r} is not an integer of at least {least}")
        if self.margin > MOST_MARGIN:
            raise ValueError(f"Float8DelayedScaling: a margin of more than {MOST_MARGIN} leaves the range of fp32")

    @property
    def of_rows(self) -> Recipe:
        """Activations have no history: each row is scaled by its own amax."""
        return Float8CurrentScaling(element=self.element)


class _Float8Delayed(Float8):
    def parts(self, recipe: Float8DelayedScaling) -> tuple[PartSpec, ...]:  # type: ignore[override]
        dtype, _ = ELEMENTS[recipe.element]
        return (
            PartSpec("payload", dtype),
            PartSpec("scale", torch.float32, per_row=False),
            PartSpec("amax_history", torch.float32, per_row=False, length=recipe.amax_history_len, gathered=False),
        )

    def encode_with(  # type: ignore[override]
        self, x: Tensor, recipe: Float8DelayedScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Parts of x with a history that begins with the quantizer's amax."""
        history = _history(quantizer["amax"], recipe)
        return {**super().encode_with(x, recipe, quantizer, enc), "amax_history": history}  # type: ignore[arg-type]

    def grid(self, recipe: Float8DelayedScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """1 / scale and scale, fp32 []."""
        amax = quantizer["amax"]
        enc = _enc(_history(amax, recipe), torch.ones_like(amax), recipe)
        return enc, quotient(1.0, enc)

    def by_hand(self, recipe: Float8DelayedScaling) -> None:  # type: ignore[override]
        """None: nobody wrote kernels that make a history."""

    def grain(self, recipe: Float8DelayedScaling) -> None:  # type: ignore[override]
        """None: elements saturate at values of any size."""

    def step(
        self, x: Tensor, recipe: Float8DelayedScaling, amax: Tensor, scale: Tensor, history: Tensor
    ) -> dict[str, Tensor]:
        """Parts of x under the scale that the history gives, and the history with this step's amax in front."""
        rolled = torch.cat([amax.reshape(1), history[:-1]])
        enc = _enc(history, quotient(1.0, scale), recipe)
        return {**super().encode_with(x, recipe, {}, enc), "amax_history": rolled}  # type: ignore[arg-type]


def _history(amax: Tensor, recipe: Float8DelayedScaling) -> Tensor:
    """A history that begins with the amax."""
    return torch.nn.functional.pad(amax.reshape(1), (0, recipe.amax_history_len - 1))


def _enc(history: Tensor, previous: Tensor, recipe: Float8DelayedScaling) -> Tensor:
    """The encoding scale, fp32 []."""
    _, largest = ELEMENTS[recipe.element]
    amax = history.amax() if recipe.amax_compute == "max" else history[0]
    enc = quotient(largest * 2.0**-recipe.margin, amax).clamp(max=FLT_MAX)
    return torch.where(torch.isfinite(amax) & (amax > 0), enc, previous)


def history_fault(
    parts: Mapping[str, Tensor], recipe: Float8DelayedScaling, largest: Tensor | None, *, whole: bool = True
) -> str | None:
    """Why a history cannot have led to the scale and the payload beside it, in words; None where it can.

        before the step    [      h1, h2, .. , oldest]     scale: of these
        stored             [amax, h1, h2, ..         ]     payload: values of this amax under the scale

    The scale of "max" may be larger than that of h1, h2, .., since the oldest entry is forgotten. Shards of which some
    were written by hand before they were synced hold the larger scale, and the maximum of each entry. Where no earlier
    amax decided (h1 is 0, or all of them), the history began with the last write, or came from a file: all is possible.

    Args:
        parts: at least the scale and the history.
        recipe: of the tensor.
        largest: fp32 [], the largest |element| of the payload; None where it has no elements.
        whole: whether that is of the whole payload, and not of a shard.
    """
    history, scale = parts["amax_history"].cpu(), parts["scale"].cpu()
    recent = recipe.amax_compute == "most_recent"
    led = history[1:2] if recent else history[1:]
    if not bool((led > 0).any()):
        return None
    least = _scale(history[:2].amin() if recent else led.amax(), recipe)
    most = _scale(history[:2].amax(), recipe) if recent else torch.full_like(least, torch.inf)
    if not bool((least <= scale) & (scale <= most)):
        range_ = f"{float(least)!r} to {float(most)!r}" if recent else f"at least {float(least)!r}"
        return f"the scale is {float(scale)!r}, and the amax history leads to {range_}"
    if largest is None:
        return None
    dtype, top = ELEMENTS[recipe.element]
    scaled = history[0].double() / scale.double()
    ends = [(scaled * (1 + side)).float().clamp(max=top).to(dtype).float() for side in (-ROUNDING, ROUNDING)]
    filled = not whole or bool(ends[0] <= largest.cpu())  # another shard may hold the largest
    if not (filled and bool(largest.cpu() <= ends[1])):
        expected = f"{'' if whole else 'at most '}{float(ends[1])!r}"
        return (
            f"the largest element is {float(largest)!r}, expected {expected} of the last amax in the history, "
            f"{float(history[0])!r}, under the scale {float(scale)!r}"
        )
    return None


def _scale(amax: Tensor, recipe: Float8DelayedScaling) -> Tensor:
    """The scale of one amax, fp32 []; 0 for 0, which decides nothing."""
    scale = quotient(1.0, _enc(amax.reshape(1), torch.ones_like(amax), recipe))
    return torch.where(amax > 0, scale, 0.0)


class DelayedFloat8Tensor(Float8Tensor):
    """A Float8Tensor with a history: `payload` float8 [.., K]; `scale` fp32 []; `amax_history` fp32 [len]."""

    amax_history: Tensor


FORMAT = _Float8Delayed()
register(
    Float8DelayedScaling, FORMAT, DelayedFloat8Tensor, names={"float8-delayed": Float8DelayedScaling()}, route=ROUTE
)
