"""verify="deep": what a rank is about to save is judged before anything is written (see soundness.py).

Each rank judges its own shards and their masters, some rows at a time, without a collective; DCP hands the error of one
rank to all. Where shards share a scale, a rank sees whether its bytes follow from that scale, not whether the scale
follows from the values of all shards. Square blocks that a shard boundary cuts are left out.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.entry import Entry
from dcp_adapters.expand import entry_of, quantized_local, settled_parts
from dcp_adapters.soundness import DenseCheck, Level, Masters, Problem, TensorCheck, cut, slabs, unfit
from dcp_adapters.words import in_lines
from fsdp_hooks.torch_private import local_of
from qtensor.cut_blocks import cut_blocks_of
from qtensor.formats import row_multiple
from qtensor.recipes import Recipe


@torch.no_grad()
def refuse_unsound(flat: Mapping[str, Any], level: Level) -> None:
    """Raise ValueError where tensors of a flattened state dict do not mean what they should; all of them in one error.

    Args:
        flat: name -> leaf.
        level: "deep" or "own_scales", see soundness.py.
    """
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    entries = {name: entry_of(name, value) for name, value in tensors.items()}
    masters = Masters.among(entries)
    found: list[Problem] = []
    said: list[Mapping[str, Problem | None]] = []
    for name, value in tensors.items():
        beside = [master for master in masters.beside.get(name, []) if _placed(tensors[master]) == _placed(value)]
        if entries[name].recipe is not None:
            check = _judged(entries[name], value, {master: local_of(tensors[master]) for master in beside}, level)
            found += [problem for problem in check.problems() if problem.fault]
            said.append(check.master_problems())
        elif beside:
            said.append(_compared(entries[name], value, {master: local_of(tensors[master]) for master in beside}))
    problems = [*found, *unfit(said)]
    if problems:
        lines = in_lines(f"{problem.entry}: {problem.message}" for problem in problems)
        raise ValueError(
            f"QuantizedSavePlanner(verify={level!r}): what is to be saved is not sound, nothing has been written:"
            f"{lines}"
        )


def _judged(entry: Entry, value: Tensor, masters: Mapping[str, Tensor], level: Level) -> TensorCheck:
    """The check of a quantized tensor's local part."""
    q = quantized_local(value)
    assert q is not None
    assert entry.recipe is not None
    dims = _cut_dims(value)
    check = TensorCheck(entry, level, [*masters], whole=not dims, rows=value.ndim - 1 not in dims)
    parts, start, stop = settled_parts(entry.name, q), *_whole_blocks(value, entry.recipe)
    if value.ndim > 1 and (start, stop) != (0, q.shape[-2]):
        wide = {name: part for name, part in parts.items() if part.ndim < q.ndim}
        parts = {name: part.narrow(-2, start, stop - start) for name, part in parts.items() if name not in wide} | wide
        masters = {name: master.narrow(-2, start, stop - start) for name, master in masters.items()}
    shape = (*q.shape[:-2], stop - start, q.shape[-1]) if value.ndim > 1 else tuple(q.shape)
    for piece in slabs(shape, entry.recipe):
        check.see(cut(parts, entry.recipe, piece), {name: master[piece] for name, master in masters.items()})
    return check


def _compared(entry: Entry, value: Tensor, masters: Mapping[str, Tensor]) -> dict[str, Problem | None]:
    """What masters say of a dense tensor's local part."""
    check, local = DenseCheck(entry, [*masters]), local_of(value)
    dense = getattr(local, "dense", local)  # of storage="high_precision"
    for piece in slabs(dense.shape, None):
        check.see(dense[piece], {name: master[piece] for name, master in masters.items()})
    return check.master_problems()


def _placed(value: Tensor) -> object:
    """Where a tensor's shards lie: a master that lies elsewhere is not compared."""
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def _cut_dims(value: Tensor) -> set[int]:
    """The dims along which ranks hold pieces."""
    if not isinstance(value, DTensor):
        return set()
    sizes = value.device_mesh.shape
    return {
        placement.dim % value.ndim
        for size, placement in zip(sizes, value.placements, strict=True)
        if hasattr(placement, "dim") and size > 1
    }


def _whole_blocks(value: Tensor, recipe: Recipe) -> tuple[int, int]:
    """The rows of this rank that are whole square blocks, as (first, behind the last)."""
    rows, group = local_of(value).shape[-2] if value.ndim > 1 else 1, row_multiple(recipe)
    cuts = cut_blocks_of(value, recipe) if group > 1 else None
    if cuts is None:
        return 0, rows
    start = min(-cuts.start % group, rows)
    return start, start + (rows - start) // group * group
