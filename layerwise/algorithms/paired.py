"""What GPTAQ and Qronos share: GPTQ of changed weights, which aim at the outputs of the unquantized model.

    aims    W + alpha * (what answers the difference between the two models' inputs)

The change is made before the first column is rounded. If both models have the same input there is none, and the
bytes are GPTQ's.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.algorithms.algorithm import CROSS, Decision, Group
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.solvers.columns import columns_of
from qtensor.spec.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Paired(GPTQ):
    """GPTQ that gets pairs of inputs: those of the quantized and those of the unquantized model.

    Args:
        alpha: how much of the correction is applied, from 0 (none: GPTQ) to 1 (all of it).
    """

    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"{type(self).__name__}(alpha={self.alpha!r}): expected a number from 0 to 1, such as 0.5")

    @property
    def needs(self) -> frozenset[str]:
        """Return what GPTQ reads, and the products of the difference between the inputs."""
        return super().needs | {CROSS}

    @torch.no_grad()
    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Decide as GPTQ does; if inputs have no pairs, the note "warning" says how many.

        Raises:
            RuntimeError: as of GPTQ.
        """
        decisions = super().decide(group, recipe)
        if group.inputs is None or not group.inputs.unpaired:
            return decisions
        told = (
            f"{group.inputs.unpaired} of {group.inputs.tokens} tokens came in batches that bring it others in the "
            "unquantized model; for those it is GPTQ"
        )
        return [
            dataclasses.replace(one, notes={**one.notes, "warning": "; ".join(filter(None, (_warning(one), told)))})
            for one in decisions
        ]

    def _correction(self, cross: Tensor, factor: Tensor, columns: Tensor) -> Tensor:
        """Return what is added to the weights with alpha = 1, transposed: fp32 [K, rows], new.

        Args:
            cross: fp32 [K, K], C of `Inputs`; its rows and columns, as those of all others, in the order of processing.
            factor: fp32 [K, K], upper triangular, U^T U = H^-1 (damped).
            columns: fp32 [K, rows], W^T.
        """
        raise NotImplementedError

    def _aims(self, group: Group, factor: Tensor, order: Tensor | None) -> Tensor:
        columns = columns_of(group)
        assert group.inputs is not None
        cross = group.inputs.cross
        if cross is None or not self.alpha or not cross.any():
            return columns  # adding zeros would turn -0.0 into 0.0
        if order is None:
            return columns.add_(self._correction(cross, factor, columns).mul_(self.alpha))
        # The factor is in the order of processing: what meets it is put into that order, and the result is
        # put back.
        added = self._correction(cross[order][:, order], factor, columns[order]).mul_(self.alpha)
        return columns.index_add_(0, order, added)


def _warning(decision: Decision) -> str | None:
    told = decision.notes.get("warning")
    return None if told is None else str(told)
