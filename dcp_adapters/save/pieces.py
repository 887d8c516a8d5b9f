"""Do the pieces that ranks say themselves where they lie make up their tensors? Asked by the coordinator, before files.

DCP takes two items of one name that begin at one place for the same, whatever their sizes, and the shape and the dtype
of the first for those of all. That holds for DTensors, whose pieces follow from one mesh; what a user says by hand may
be wrong.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.checkpoint import SavePlan

from dcp_adapters.plain.tiling import Box, tiling_fault
from dcp_adapters.plain.words import in_lines
from dcp_adapters.save.steps.coordinator import tell
from dcp_adapters.save.write_items import SaveLeaves

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import TensorWriteData

DESCRIBED = "described"


def tell_described(plan: SavePlan, leaves: SaveLeaves) -> SavePlan:
    """Return the plan, which tells the names of the items of leaves that say themselves where they lie."""
    names = sorted(entry for name in leaves.described for entry in leaves.entries.get(name, {"": name}).values())
    return tell(plan, DESCRIBED, fixed=tuple(names))


def refuse_unfitting(plans: Sequence[SavePlan]) -> None:
    """Raise ValueError if the pieces of one of these tensors have gaps, overlap or differ in shape or dtype."""
    names = frozenset[str]().union(*(plan.planner_data.options.get(DESCRIBED, ()) for plan in plans))
    if problems := _problems(plans, names):
        raise ValueError(
            "the pieces of all ranks do not make up their tensors; nothing has been written:" + in_lines(problems)
        )


def _problems(plans: Sequence[SavePlan], names: frozenset[str]) -> list[str]:
    boxes: dict[str, dict[Box, int]] = {}  # tensor -> its boxes, once each: those of replicas are one
    first: dict[str, tuple[int, TensorWriteData]] = {}
    problems: dict[str, str] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if name not in names:
                continue
            if data is None:
                problems[name] = f"rank {rank} has something else than a tensor under this name"
                continue
            holder, like = first.setdefault(name, (rank, data))
            own, expected = ((tuple(one.size), one.properties.dtype) for one in (data, like))
            if own != expected:
                held, other = (f"{shape}, {dtype}" for shape, dtype in (own, expected))
                problems.setdefault(name, f"rank {rank} has a piece of {held}, rank {holder} one of {other}")
            boxes.setdefault(name, {})[tuple(data.chunk.offsets), tuple(data.chunk.sizes)] = rank
    for name, own_boxes in boxes.items():
        size = first[name][1].size
        fault = tiling_fault(size, list(own_boxes)) if size and name not in problems else None
        if fault is not None:
            problems[name] = f"of {tuple(size)}, {fault}"
    return [f"{name}: {problem}" for name, problem in sorted(problems.items())]
