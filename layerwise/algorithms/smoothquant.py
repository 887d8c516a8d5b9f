"""SmoothQuant: columns that are large in the input are made smaller there and larger in the weight.

    s = clamp(Xamax^alpha / Wamax^(1 - alpha), 1e-4, 1e4)    for each column; W * s, X / s; then as Max

Wamax is the largest magnitude of the column over all linears that take X. A column that is all zero in X or in the
weights has nothing to balance: s = 1. (Xiao et al., 2022, arXiv:2211.10438, equation 4.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from layerwise.algorithms.algorithm import COLUMNS, Algorithm, Decision, Group, Smoothing
from layerwise.algorithms.maximum import Max
from qtensor.spec.blocks import finite_magnitude
from qtensor.spec.recipes import Recipe

SMALLEST_FACTOR, LARGEST_FACTOR = 1e-4, 1e4


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Algorithm):
    """Balances columns between inputs and weights where that can be folded, then quantizes as Max does.

    Args:
        alpha: from 0 (evens out the columns of the weights) to 1 (evens out the columns of the inputs).

    Raises:
        ValueError: alpha is not between 0 and 1.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=MXFP8BlockScaling(), algorithm=SmoothQuant(alpha=0.8), layers=())
        ```
    """

    writes_weights: ClassVar[bool] = True

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"SmoothQuant: alpha={self.alpha!r} is not between 0 and 1")

    @property
    def needs(self) -> frozenset[str]:
        """Return the largest magnitude of each column."""
        return frozenset({COLUMNS})

    def smooth(self, group: Group, recipe: Recipe) -> Smoothing | None:
        """Return the factors; None if no token was seen."""
        if group.inputs is None:
            return None
        of_input = group.inputs.column_amax
        assert of_input is not None
        of_weights = torch.stack([finite_magnitude(one.weight.float()).amax(dim=0) for one in group.linears]).amax(
            dim=0
        )
        factors = of_input.pow(self.alpha) / of_weights.pow(1 - self.alpha)
        live = (of_input > 0) & (of_weights > 0)
        # Columns of zeros gave 0 / 0 or infinities above; `live` leaves these out below.
        bounded = factors.clamp(SMALLEST_FACTOR, LARGEST_FACTOR)
        return Smoothing(torch.where(live, bounded, torch.ones_like(factors)), {"alpha": self.alpha})

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return the scales that the weights' own amaxes give."""
        return Max().decide(group, recipe)
