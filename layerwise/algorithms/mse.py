"""Mse: picks the scale under which weights change least, by sum (W - QDQ(W))^2."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layerwise.algorithms.algorithm import Algorithm, Decision, Group
from layerwise.algorithms.solvers.search import search
from qtensor.spec.recipes import Recipe

SEARCH = 2**12  # multiplications that take as long as the search for one element; fewer for MX, more for 39 candidates


@dataclass(frozen=True, kw_only=True)
class Mse(Algorithm):
    """Scales of the least squared error of the weights, each searched for by itself; never worse than Max's.

    It tries amax * m for 39 values of m from 0.25 to 4, and for the block scales of NVFP4 all positive E4M3 values
    under the global scale of the amax. The note "clip" is the mean ratio of the scales to Max's.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=NVFP4BlockScaling(), algorithm=Mse(), layers=["0"])
        ```
    """

    writes_weights: ClassVar[bool] = False

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return the best quantizer of each weight."""
        decisions = []
        for linear in group.linears:
            quantizer, clip = search(linear.weight, recipe, linear.amax)
            decisions.append(Decision(quantizer=quantizer, notes={"clip": clip}))
        return decisions

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Return the cost of the search, which sees each element many times."""
        return SEARCH * rows * columns
