"""Max: every scale is made from the largest magnitude it serves, as `quantize` makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layerwise.algorithms.algorithm import Algorithm, Decision, Group
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of


@dataclass(frozen=True, kw_only=True)
class Max(Algorithm):
    """Scales from the amax of the weights: the bytes of `quantize`.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=MXFP8BlockScaling(), algorithm=Max(), layers=["0"])
        ```
    """

    writes_weights: ClassVar[bool] = False

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return the quantizer of each weight's own amax."""
        fmt = format_of(recipe)
        return [
            Decision(quantizer=fmt.quantizer(linear.weight.detach().float(), recipe, linear.amax))
            for linear in group.linears
        ]
