"""What a merge did to each weight, in a few numbers that sums over shards give.

With the weight W before, the update U, and the weight W' that was written, over all elements:

    survived        <U, W' - W> / <U, U>              1: all of the update arrived, 0: nothing of it did
    relative_error  |W' - (W + U)| / |W + U|          what rounding added, relative RMS
    changed         the elements of W' that are not those of W

A quantized W lies on the points of its format already. So while scales stay, rounding takes back every element's update
that is smaller than half a step: `survived` tells, and the error is as large as the update. Where a new largest
magnitude gives a block another scale, its other elements are rounded a second time, and the error may be larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qtensor.ops.lost_updates import NEARLY_NOTHING

COLUMNS = 5  # of what a shard adds up: <U, W' - W>, <U, U>, |W' - (W + U)|^2, |W + U|^2, elements changed


@dataclass(frozen=True, kw_only=True)
class MergedWeight:
    """What became of one update, over all shards; norms are those of Frobenius. NaN if the weight holds NaN.

    Attributes:
        name: of the weight.
        elements: how many it has.
        changed: how many of them have another value now.
        survived: <update, W' - W> / <update, update>; 1 for an update of zeros.
        update_norm: |update|.
        merged_norm: |W + update|, of what should have been written.
        error_norm: |W' - (W + update)|, of what rounding added.
        through_merge: whether the update was trained through the merge, see `LowRankUpdate`.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 32))
        >>> report = merge_(model, {"0.weight": LowRankUpdate(a=torch.ones(4, 64), b=torch.ones(32, 4))})
        >>> report.weights[0].name, report.weights[0].changed
        ('0.weight', 2048)
        ```
    """

    name: str
    elements: int
    changed: int
    survived: float
    update_norm: float
    merged_norm: float
    error_norm: float
    through_merge: bool = False

    @property
    def relative_error(self) -> float:
        """error_norm / merged_norm: the relative RMS error of the merge; 0 for a weight of zeros."""
        return self.error_norm / self.merged_norm if self.merged_norm else 0.0

    @property
    def lost(self) -> bool:
        """Whether rounding took the update back: less than a tenth survived.

        Elements may have changed all the same: a scale in fp32 follows the amax, and moves each of them a little. So
        the error may be up to twice the update; if it is larger, the weight is `worse` instead. An update that was
        trained through the merge loses nothing by it: what is written is what its training has computed with.
        """
        return not self.through_merge and self.survived < NEARLY_NOTHING and self.error_norm < 2 * self.update_norm

    @property
    def worse(self) -> bool:
        """Whether W' is farther from W + update than W was, and the update is not `lost`; see there, too."""
        return not self.through_merge and self.error_norm > self.update_norm and not self.lost

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"{self.name}: survived {self.survived:.3g}, relative error {self.relative_error:.1e}, "
            f"{self.changed} of {self.elements} elements changed"
        )


@dataclass(frozen=True)
class MergeReport:
    """What `merge_` did, the same on all ranks; `str()` of it has one line a weight.

    Attributes:
        weights: what became of each update, in the order of the updates.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 32))
        >>> report = merge_(model, {"0.weight": LowRankUpdate(a=torch.ones(4, 64), b=torch.ones(32, 4))})
        >>> print(report)  # a line for each weight
        ```
    """

    weights: tuple[MergedWeight, ...]

    def __getitem__(self, name: str) -> MergedWeight:
        """Return what became of the update of the weight of this name; KeyError if it had none."""
        return {weight.name: weight for weight in self.weights}[name]

    def __str__(self) -> str:
        """Return one line a weight."""
        return "\n".join(map(str, self.weights))


def line(name: str, elements: int, sums: Sequence[float], *, through_merge: bool) -> MergedWeight:
    """Return the entry of a weight, from what its shards add up to (COLUMNS)."""
    arrived, update, error, merged, changed = sums
    return MergedWeight(
        name=name,
        elements=elements,
        changed=int(changed),
        survived=arrived / update if update else 1.0,
        update_norm=math.sqrt(update),
        merged_norm=math.sqrt(merged),
        error_norm=math.sqrt(error),
        through_merge=through_merge,
    )
