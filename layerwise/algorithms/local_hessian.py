"""LocalHessian: picks the scale under which outputs change least, looking at 16 input columns at a time.

    error = sum over blocks b of 16 columns of dW_b^T H_b dW_b,   dW = QDQ(W) - W,   H_b = X_b^T X_b / tokens

It is the mean squared change of the output, if inputs of different blocks were uncorrelated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layerwise.algorithms.algorithm import LOCAL_HESSIAN, Algorithm, Decision, Group
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.solvers.search import search
from qtensor.spec.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class LocalHessian(Algorithm):
    """Scales of the least local error (see above), which is never larger than under Max's scales.

    It tries the same scales as Mse, and its note "clip" means the same. If no token reached a linear, Mse decides,
    and the note "warning" says so.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=NVFP4BlockScaling(), algorithm=LocalHessian(), layers=["0"])
        ```
    """

    writes_weights: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Return the local Hessian."""
        return frozenset({LOCAL_HESSIAN})

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return the best quantizer of each weight."""
        if group.inputs is None:
            return [
                Decision(
                    quantizer=decision.quantizer,
                    notes={**decision.notes, "warning": "no token reached it; its scales have the least weight error"},
                )
                for decision in Mse().decide(group, recipe)
            ]
        hessian = group.inputs.local_hessian
        assert hessian is not None, "it is among the needs"
        decisions = []
        for linear in group.linears:
            quantizer, clip = search(linear.weight, recipe, linear.amax, hessian)
            decisions.append(Decision(quantizer=quantizer, notes={"clip": clip}))
        return decisions

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Return about three times the cost of Mse."""
        return (3 if tokens else 1) * Mse().cost(rows, columns, tokens)
