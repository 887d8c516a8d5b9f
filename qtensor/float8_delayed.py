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

import torch
from torch import Tensor

from qtensor.blocks import FLT_MAX, quotient
from qtensor.codecs.fp8 import ELEMENTS
from qtensor.float8 import (
    ROUTE,
    Float8,
    Float8CurrentScaling,
    Float8Tensor,
)
from qtensor.formats import PartSpec, register
from qtensor.recipes import Recipe, check_choice


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8DelayedScaling(Recipe):
    """Float8 with one scale a tensor, taken from the amaxes of earlier steps.

    Args:
        element: "e4m3" (largest value 448) or "e5m2" (57344).
        amax_history_len: number of steps that are remembered, at least 1.
        amax_compute: "max" of the history, or "most_recent".
        margin: powers of two of headroom, 0 or more.
        activations: None, or "dynamic": a linear layer quantizes its input too, with one current scale a row.

    Raises:
        ValueError: for any other value.
    """

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


class DelayedFloat8Tensor(Float8Tensor):
    """A Float8Tensor with a history: `payload` float8 [.., K]; `scale` fp32 []; `amax_history` fp32 [len]."""

    amax_history: Tensor


FORMAT = _Float8Delayed()
register(
    Float8DelayedScaling, FORMAT, DelayedFloat8Tensor, names={"float8-delayed": Float8DelayedScaling()}, route=ROUTE
)
