"""verify="deep": what a rank is about to save is judged before anything is written (see soundness.py).

Each rank judges its own shards and their masters, some rows at a time, without a collective; DCP hands the error of one
rank to all. A weight is whole only if all of its pieces fit the master in the same way: all were written by a step, or
none was. So how they fit travels with the plans, and the coordinator compares. Where shards share a scale, a rank sees
whether its bytes follow from that scale, not whether the scale follows from the values of all shards. Square blocks
that a shard boundary cuts are left out.
"""

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.described import described_problem
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import entry_of, quantized_local, settled_parts
from dcp_adapters.records.masters import Masters, explain_left_out
from dcp_adapters.records.soundness import (
    BEHIND,
    BOTH,
    FRESH,
    WRITTEN,
    DenseCheck,
    Level,
    Problem,
    TensorCheck,
    cut,
    find_unfit,
    slabs,
)
from dcp_adapters.save.steps.coordinator import tell
from dcp_adapters.save.steps.step import SaveStep, Saving, Source
from fsdp_hooks.torch_private import local_of
from qtensor.scales.cut_blocks import cut_blocks_of
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import row_multiple

Fits = Mapping[str, Mapping[str, int]]  # master -> tensor beside it -> how the rank's pieces fit, WRITTEN | FRESH
ELSEWHERE = "they are placed otherwise than their weights"
HOW = {
    0: "something else",
    WRITTEN: "what {master} requantizes to",
    FRESH: "what {master} was made from, before a step wrote it",
    BOTH: "what fits either way",
}


class DeepVerify(SaveStep):
    """What one rank finds; the coordinator compares that with what others tell, whether it verifies itself or not."""

    def __init__(self, level: Level, saving: Saving) -> None:
        self.level, self.fits = level, refuse_unsound(saving.flat, level)

    def local_plan(self, plan: SavePlan, data: Source) -> SavePlan:
        """Send with the plan how the pieces fit their masters."""
        return tell(plan, "verify", now=(self.level, self.fits))


@torch.no_grad()
def refuse_unsound(flat: Mapping[str, Any], level: Level) -> Fits:
    """Raise ValueError if tensors of a flattened state dict do not mean what they should; one error names all.

    If there are masters and none can be compared, it raises, too; if some cannot, it warns.

    Args:
        flat: name -> leaf.
        level: "deep" or "own_scales", see soundness.py.

    Returns:
        What `refuse_mixtures` compares, of the masters that not every tensor beside them fits both ways.
    """
    for name, value in flat.items():
        if (problem := described_problem(value)) is not None:
            raise ValueError(f"QuantizedSavePlanner(verify={level!r}): {name}: {problem}; or save with verify=None")
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    entries = {name: entry_of(name, value) for name, value in tensors.items()}
    masters = Masters.among(entries)
    found: list[Problem] = []
    said: list[Mapping[str, Problem | None]] = []
    fits: dict[str, dict[str, int]] = {}
    _refuse_uncompared(masters, tensors, level)
    for name, value in tensors.items():
        beside = [master for master in masters.beside.get(name, []) if _placement(tensors[master]) == _placement(value)]
        own = {master: local_of(tensors[master]) for master in beside}
        check: TensorCheck | DenseCheck
        if entries[name].recipe is not None:
            check = judged = _judge(entries[name], value, own, level)
            found += [problem for problem in judged.problems() if problem.fault]
        elif beside:
            check = _compare(entries[name], value, own)
        else:
            continue
        said.append(check.master_problems())
        for master, how in check.fits().items():
            # what this rank alone cannot tell: other ranks may hold pieces of another step
            fits.setdefault(master, {})[name] = how
    _refuse([*found, *find_unfit(said)], level)
    return {master: each for master, each in fits.items() if any(how != BOTH for how in each.values())}


def _refuse_uncompared(masters: Masters, tensors: Mapping[str, Tensor], level: Level) -> None:
    """Raise ValueError if none of a rank's masters can be compared; warn of some that cannot."""
    pairs = [(name, master) for name, beside in masters.beside.items() for master in beside]
    there = {master for name, master in pairs if _placement(tensors[master]) == _placement(tensors[name])}
    left = dict(masters.left) | {master: ELSEWHERE for _, master in pairs if master not in there}
    if not left:
        return
    lines = [f"{names}: {sentence}" for names, sentence in explain_left_out(left, len(there) + len(left))]
    if not there:
        raise ValueError(
            f"QuantizedSavePlanner(verify={level!r}): no master can be compared with its weight, so nothing would be "
            f"known of whether they are of one step; nothing has been written:{in_lines(lines)}\n"
            "Save with verify=None, and see what `python -m dcp_adapters verify --deep` says of the checkpoint"
        )
    warnings.warn(f"QuantizedSavePlanner(verify={level!r}): {'; '.join(lines)}", stacklevel=2)


def refuse_told_mixtures(told: Sequence[tuple[Level, Fits] | None]) -> None:
    """Call `refuse_mixtures` with what ranks tell (see `DeepVerify`); None from one that does not verify."""
    levels = [said[0] for said in told if said is not None]
    refuse_mixtures([{} if said is None else said[1] for said in told], levels[0])


def refuse_mixtures(said: Sequence[Fits], level: Level) -> None:
    """Raise ValueError if the pieces of ranks each fit a master, and no whole tensor does; a pure function.

    Args:
        said: for each rank what `refuse_unsound` returned; nothing from one that does not verify.
        level: of a rank that verifies.
    """
    problems = []
    for master in sorted({master for own in said for master in own}):
        rows = [own.get(master, {}) for own in said]
        held = {name: [row.get(name, BOTH) for row in rows] for name in sorted({name for row in rows for name in row})}
        # WRITTEN and FRESH are bits: one way that all ranks share is left after the AND
        if any(functools.reduce(operator.and_, ranks) for ranks in held.values()):
            continue
        name, ranks = next(iter(held.items()))
        told = [f"rank {ranks.index(how)} holds {HOW[how].format(master=master)}" for how in sorted({*ranks} - {BOTH})]
        problems.append(Problem(name, f"{', '.join(told)}: {BEHIND}"))
    _refuse(problems, level)


def _refuse(problems: Sequence[Problem], level: Level) -> None:
    if problems:
        lines = in_lines(f"{problem.entry}: {problem.message}" for problem in problems)
        raise ValueError(
            f"QuantizedSavePlanner(verify={level!r}): what is to be saved is not sound, nothing has been written:"
            f"{lines}"
        )


def _judge(entry: Entry, value: Tensor, masters: Mapping[str, Tensor], level: Level) -> TensorCheck:
    """Return the check of a quantized tensor's local part."""
    q = quantized_local(value)
    assert q is not None
    assert entry.recipe is not None
    dims = _cut_dims(value)
    # of a tensor that is cut, this rank sees whether bytes follow from scales, not whether scales follow from all
    # values
    check = TensorCheck(entry, level, [*masters], whole=not dims, rows=value.ndim - 1 not in dims)
    parts, start, stop = settled_parts(entry.name, q), *_whole_blocks(value, entry.recipe)
    # a square block that a boundary cuts has a scale of values which this rank does not hold
    if value.ndim > 1 and (start, stop) != (0, q.shape[-2]):
        wide = {name: part for name, part in parts.items() if part.ndim < q.ndim}
        parts = {name: part.narrow(-2, start, stop - start) for name, part in parts.items() if name not in wide} | wide
        masters = {name: master.narrow(-2, start, stop - start) for name, master in masters.items()}
    shape = (*q.shape[:-2], stop - start, q.shape[-1]) if value.ndim > 1 else tuple(q.shape)
    for piece in slabs(shape, entry.recipe):
        check.see(cut(parts, entry.recipe, piece), _master_rows(masters, piece, q.device))
    return check


def _master_rows(masters: Mapping[str, Tensor], piece: slice, device: torch.device) -> dict[str, Tensor]:
    """Return some rows of each master, on the weight's device: one of the two may be offloaded."""
    return {name: master[piece].to(device) for name, master in masters.items()}


def _compare(entry: Entry, value: Tensor, masters: Mapping[str, Tensor]) -> DenseCheck:
    """Return the check of a dense tensor's local part."""
    check, local = DenseCheck(entry, [*masters]), local_of(value)
    dense = getattr(local, "dense", local)  # of storage="high_precision"
    for piece in slabs(dense.shape, None):
        check.see(dense[piece], _master_rows(masters, piece, dense.device))
    return check


def _placement(value: Tensor) -> object:
    """Return where a tensor's shards lie: a master that lies elsewhere is not compared."""
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _cut_dims(value: Tensor) -> set[int]:
    """Return the dims along which ranks hold pieces."""
    if not isinstance(value, DTensor):
        return set()
    sizes = value.device_mesh.shape
    return {
        placement.dim % value.ndim
        for size, placement in zip(sizes, value.placements, strict=True)
        if hasattr(placement, "dim") and size > 1
    }


def _whole_blocks(value: Tensor, recipe: Recipe) -> tuple[int, int]:
    """Return the rows of this rank that are whole square blocks, as (first, behind the last)."""
    rows, group = local_of(value).shape[-2] if value.ndim > 1 else 1, row_multiple(recipe)
    cuts = cut_blocks_of(value, recipe) if group > 1 else None
    if cuts is None:
        return 0, rows
    start = min(-cuts.start % group, rows)
    return start, start + (rows - start) // group * group
