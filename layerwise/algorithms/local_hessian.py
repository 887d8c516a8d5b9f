"""LocalHessian: of several scales the one under which outputs change least, 16 input columns at a time.

    error = sum over blocks b of 16 columns of dW_b^T H_b dW_b,   dW = QDQ(W) - W,   H_b = X_b^T X_b / tokens

It is the expected squared change of the output, but for what different blocks of columns have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from layerwise.algorithms.algorithm import LOCAL_HESSIAN, Algorithm, Decision, Group
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.search import search
from qtensor.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class LocalHessian(Algorithm):
    """Scales of the least output error that 16 columns of the input at a time see; never worse there than Max's.

    The scales tried, and the note "clip", are those of Mse, which also decides where no token reached a linear; the
    note "warning" then says so.
    """

    writes_weights: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """The local Hessian."""
        return frozenset({LOCAL_HESSIAN})

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """The best quantizer of each weight."""
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
