"""Growth beyond the ranks a machine can run: what planning costs one rank, against ranks and against weights.

It uses the simulation of benchmarks/plan_scaling.py; CPU seconds of one thread with the garbage collector off. Each
rank makes a local plan and a load plan and reads .metadata; the coordinator plans for all and writes .metadata, which
describes every chunk of every rank and so must grow with the ranks.
"""

import dataclasses
import gc
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.model_shapes import Shapes
from benchmarks.plan_scaling import FORMATS, Contender, collector, coordinate, describe, plan_save, timed
from benchmarks.simulated_ranks import as_rank, state_dict_of

PLANNING = ("local_plan", "coordinator", "write_metadata", "read_metadata", "load_plan", "metadata_bytes")
ROWS, COLUMNS = 4096, 64  # of each weight: rows are cut, and are more than the ranks
LOCAL_REPEATS = 5  # of the local plan, which takes a millisecond


@dataclasses.dataclass(frozen=True)
class Weights(Contender):
    """A model of equal weights; format None is bf16 by stock DCP."""

    count: int

    @property
    def repeats(self) -> int:
        """How often its load plan is made in one measurement."""
        return 1

    @property
    def shapes(self) -> Shapes:
        """Names and shapes, as in benchmarks/model_shapes.py."""
        return {f"layers.{i}.linear.weight": ((ROWS, COLUMNS), True) for i in range(self.count)}

    def state_dict(self, mesh: Any) -> dict[str, Any]:
        """This rank's shards."""
        return state_dict_of(self.shapes, mesh, FORMATS[self.format] if self.format else None)


def against_ranks(form: str, worlds: Sequence[int], *, weights: int, repeats: int) -> dict[str, Any]:
    """Side -> figure -> world -> one value a round."""
    return _series(form, [(weights, world) for world in worlds], repeats, key=1)


def against_weights(form: str, counts: Sequence[int], *, world: int, repeats: int) -> dict[str, Any]:
    """Side -> figure -> number of weights -> one value a round."""
    return _series(form, [(count, world) for count in counts], repeats, key=0)


def _series(form: str, points: list[tuple[int, int]], repeats: int, *, key: int) -> dict[str, Any]:
    out: dict[str, Any] = {side: {figure: {} for figure in PLANNING} for side in (form, "bf16")}
    with collector(on=False):
        for number in range(-1, repeats):
            for point in points if number >= 0 else points[:1]:  # first a warm-up
                for side, name in ((form, form), ("bf16", None)):
                    figures = _measure(Weights(model="equal weights", format=name, count=point[0]), point[1])
                    for figure, value in figures.items() if number >= 0 else ():
                        out[side][figure].setdefault(str(point[key]), []).append(value)
    return out


def _measure(contender: Weights, world: int) -> dict[str, float]:
    with as_rank(1, world) as mesh:
        state_dict = contender.state_dict(mesh)
        local = statistics.median(
            timed(lambda: plan_save(contender.save_planner(), state_dict))[1] for _ in range(LOCAL_REPEATS)
        )
    row, planned = coordinate(contender, world, with_gc=False)
    described = describe(contender, world, *planned)
    del planned
    gc.collect()
    return {
        "local_plan": local,
        "coordinator": row["gc_off_s"],
        "write_metadata": described["write_s"],
        "read_metadata": described["unpickle_gc_off_s"],
        "load_plan": described["load_plan_s"],
        "metadata_bytes": described["bytes"],
    }
