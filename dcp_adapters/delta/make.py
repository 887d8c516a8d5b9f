"""Make a delta from two stored states, one tensor of each in memory at a time; and the digest of one state."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dcp_adapters.delta.coding.changes import changes_between
from dcp_adapters.delta.patches.encoder import Encoder
from dcp_adapters.delta.patches.layout import StateLayout, layout_differences
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.state_digest import blob_digest, state_digest
from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.source import Source, Stored
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums


@dataclass(frozen=True)
class Summed:
    """A state in figures. sums: key -> byte sum of the part. blobs: name -> digest."""

    layout: StateLayout
    sums: Mapping[str, int]
    blobs: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Return the one value that stands for the state."""
        return state_digest(self.layout, self.sums, self.blobs)


def layout_of(source: Source) -> StateLayout:
    """Return what a source has."""
    return StateLayout.of(source.entries.values(), source.blobs if isinstance(source, Stored) else ())


def sum_state(source: Source, *, advance: Advance = ignore_progress) -> Summed:
    """Read all of a state; `advance` is told the bytes of each part."""
    layout = layout_of(source)
    sums = {}
    for key, (name, part) in layout.owners.items():
        tensor = source.part(name, part)
        sums[key] = sum_of(tensor)
        advance(tensor.nbytes)
    return Summed(layout, sums, {name: blob_digest(_blob(source, name)) for name in layout.blobs})


def delta_between(
    old: Source,
    new: Source,
    *,
    versions: tuple[int | None, int | None] = (None, None),
    advance: Advance = ignore_progress,
) -> Delta:
    """Make what leads from one state to another.

    Args:
        old: a checkpoint, a directory, or tensors in memory.
        new: another of the same kind.
        versions: numbers of the two, for people and for gaps to be named; what counts are the digests.
        advance: told the bytes of the old state that are done.

    Raises:
        ValueError: names, recipes, dtypes or shapes differ; all differences are named.
    """
    layout = layout_of(old)
    refuse_other_layout(layout, layout_of(new))
    refuse_empty(layout)
    encoder = Encoder(layout)
    sums: tuple[dict[str, int], dict[str, int]] = {}, {}
    for run in layout.runs:
        for key in run.keys:
            before, after = (side.part(*layout.owners[key]) for side in (old, new))
            for changes in changes_between(before, after):
                encoder.add(key, changes)
            sums[0][key], sums[1][key] = sum_of(before), sum_of(after)
            advance(before.nbytes)
    blobs = {name: (_blob(old, name), _blob(new, name)) for name in sorted(layout.blobs)}
    digests = [
        state_digest(layout, sums[side], {name: blob_digest(held[side]) for name, held in blobs.items()})
        for side in (0, 1)
    ]
    changed = {name: held[1] for name, held in blobs.items() if held[0] != held[1]}
    return Delta.made(layout, (digests[0], digests[1]), encoder.frames(), changed, versions)


def refuse_other_layout(
    old: StateLayout, new: StateLayout, sides: tuple[str, str] = ("the old state", "the new one")
) -> None:
    """Raise ValueError if one state cannot become the other by changes of bytes."""
    problems = layout_differences(old, new, sides)
    if problems:
        raise ValueError(
            f"a delta needs equal names, recipes, dtypes and shapes, and {len(problems)} entries differ:"
            f"{in_lines(problems)}\nSend or save the new state in full"
        )


def refuse_empty(layout: StateLayout) -> None:
    """Raise ValueError if two states hold nothing: a delta between them would say that they are equal."""
    if not layout.entries and not layout.blobs:
        raise ValueError("both states hold no tensors, so nothing leads from one to the other")


def sum_of(tensor: Tensor) -> int:
    """Return the byte sum of a whole part."""
    return int(byte_sums([TensorPiece.whole(tensor)]))


def _blob(source: Source, name: str) -> bytes:
    assert isinstance(source, Stored)
    return source.read_blob(name)
