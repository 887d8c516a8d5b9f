"""Column factors of a stage: found for every group, agreed over ranks, folded into what produces their inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from layerwise.algorithms.algorithm import Algorithm, Inputs

if TYPE_CHECKING:
    from layerwise.stage import Method, Passes, Stage

__all__ = ["Smoothed", "smooth"]

Groups = Sequence[tuple[tuple[str, ...], Inputs | None]]


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Groups with the statistics of their inputs as they are now, and by name what inputs have been divided by."""

    groups: Groups
    factors: Mapping[str, Tensor] = field(default_factory=dict)


def smooth(stage: "Stage", groups: Groups, method: "Method", passes: "Passes") -> Smoothed:
    """Fold what the algorithm's `smooth` finds; groups as they were for an algorithm that has no such thing."""
    if type(method.algorithm).smooth is Algorithm.smooth:
        return Smoothed(groups)
    raise NotImplementedError
