"""Make and apply deltas between checkpoints or directories on disk.

    write_delta     OLD, NEW -> a file
    patched_copy    BASE, deltas -> OUT: everything is read and checked, then OUT is written beside its name, and gets
                    it when it is complete

A checkpoint is written anew by the save planner, with checksums of its own. A Hugging Face directory is copied, and the
tensors that change are written over in the copy, so that everything else in it stays as it is.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcp_adapters.convert.convert_checkpoint import ConversionPlan, convert_checkpoint
from dcp_adapters.delta.chain import check_chain, deltas_left
from dcp_adapters.delta.make import Summed, delta_between, layout_of, refuse_other_layout, sum_of, sum_state
from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.patch_format import open_delta, save_delta
from dcp_adapters.delta.patches.state_digest import blob_digest
from dcp_adapters.delta.stored_states import Patched, StoredFiles, open_state
from dcp_adapters.hf.files.file_digests import DIGESTS, file_tensor_digest, renewed_note
from dcp_adapters.hf.files.header import METADATA, read_header, write_header
from dcp_adapters.plain.durable import give_name, hidden_name, refuse_taken, remove_on_error, sync
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.plain_memory import memory_of
from dcp_adapters.plain.progress_bar import Advance, ignore_progress, progress_bar
from dcp_adapters.plain.tables import human_bytes
from dcp_adapters.records.source import Stored

DELTA_FORMAT, APPLY_FORMAT = "dcp_adapters.delta/1", "dcp_adapters.apply/1"

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenDelta:
    """A delta that `write_delta` has written.

    Attributes:
        old, new: what it was made from.
        out: the file.
        delta: what is in it.
        nbytes: of the file.

    Example:
        ```python
        >>> for step, value in ((1, 0.0), (2, 1.0)):
        ...     dcp.save({"w": torch.full((64,), value)}, checkpoint_id=f"step-{step}", planner=QuantizedSavePlanner())
        >>> written = write_delta("step-1", "step-2", "1-to-2.delta")
        >>> written.nbytes > 0, written.weights
        (True, 64)
        ```
    """

    old: str
    new: str
    out: str
    delta: Delta
    nbytes: int

    @property
    def weights(self) -> int:
        """Count the logical elements of all tensors."""
        return sum(entry.numel for entry in self.delta.layout.entries.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added under the same format."""
        return {
            "format": DELTA_FORMAT,
            "old": self.old,
            "new": self.new,
            "out": self.out,
            "base": self.delta.base,
            "result": self.delta.result,
            "tensors": len(self.delta.layout.entries),
            "weights": self.weights,
            "changed": self.delta.changed,
            "bytes": self.nbytes,
            "full_bytes": self.delta.layout.nbytes,
        }

    def render(self) -> str:
        """Say it to people."""
        bits = 8 * self.nbytes / max(self.weights, 1)
        return (
            f"{self.out}: {human_bytes(self.nbytes)} for {human_bytes(self.delta.layout.nbytes)} in full, "
            f"{bits:.3g} bits a weight, {self.delta.changed} changes"
        )


@dataclass(frozen=True)
class PatchedCopy:
    """What `patched_copy` did.

    Attributes:
        base, out: what it read, and where the result is.
        deltas: how many were given.
        applied: how many of them were needed.
        result: the digest of the result.
        written: False where `out` was the result already.

    Example:
        ```python
        >>> for step, value in ((1, 0.0), (2, 1.0)):
        ...     dcp.save({"w": torch.full((64,), value)}, checkpoint_id=f"step-{step}", planner=QuantizedSavePlanner())
        >>> write_delta("step-1", "step-2", "1-to-2.delta")
        >>> copy = patched_copy("step-1", ["1-to-2.delta"], "copy")
        >>> copy.applied, copy.written
        (1, True)
        ```
    """

    base: str
    out: str
    deltas: int
    applied: int
    result: str
    written: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added under the same format."""
        return {"format": APPLY_FORMAT, **vars(self)}

    def render(self) -> str:
        """Say it to people."""
        if not self.written:
            return f"{self.out}: it holds {self.result} already, nothing was written"
        skipped = self.deltas - self.applied
        past = f", {skipped} left out, which {self.base} is past already" if skipped else ""
        return f"{self.out}: {self.applied} deltas applied{past}; it holds {self.result}"


def write_delta(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    verify_checksums: bool = True,
    progress: bool = False,
) -> WrittenDelta:
    """Write what leads from one state to another as a file.

    Args:
        old: a checkpoint, or a Hugging Face directory.
        new: another of the same kind, with the same names, recipes and shapes.
        out: the file; it must not exist, and its directory does.
        verify_checksums: compare what is read with a checkpoint's checksums.
        progress: a bar on a terminal.

    Raises:
        ValueError: names, recipes, dtypes or shapes differ, all of them named; a checkpoint and a directory.
        CheckpointUnusable: a checkpoint cannot be read, or is damaged.
        FileExistsError, FileNotFoundError: `out` is taken, or its directory does not exist.

    Example:
        ```python
        >>> for step, value in ((1, 0.0), (2, 1.0)):
        ...     dcp.save({"w": torch.full((64,), value)}, checkpoint_id=f"step-{step}", planner=QuantizedSavePlanner())
        >>> written = write_delta("step-1", "step-2", "1-to-2.delta")
        >>> written.out
        '1-to-2.delta'
        ```
    """
    out = Path(out)
    # Now, and not when both states have been read.
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} exists already; choose another name, nothing is overwritten")
    sides = [open_state(path, check=verify_checksums) for path in (old, new)]
    _refuse_other_kind(*sides)
    size = layout_of(sides[0]).nbytes
    told = log_work(LOG, "write_delta from %s to %s", old, new, nbytes=size)
    with told, progress_bar("comparing", size, enabled=progress) as advance:
        delta = delta_between(*sides, advance=advance)
    # A delta carries entries of bytes, but in a directory they are what config.json says, which is not written.
    if isinstance(sides[0], StoredFiles) and delta.blobs:
        raise ValueError(
            f"{old} and {new} say other things of their quantization (config.json or hf_quant_config.json), so equal "
            "bytes would mean other weights; export both with the same options"
        )
    save_delta(delta, out)
    return WrittenDelta(str(old), str(new), str(out), delta, out.stat().st_size)


def patched_copy(
    base: str | os.PathLike[str],
    deltas: Sequence[str | os.PathLike[str] | Delta],
    out: str | os.PathLike[str],
    *,
    progress: bool = False,
) -> PatchedCopy:
    """Write the state that deltas lead to from a base.

    Args:
        base: a checkpoint or a directory that is any of the states which the deltas pass; deltas before it are left
            out.
        deltas: files, or deltas, each of which leads on from where the one before it leads to.
        out: a directory that does not exist or is empty; or one that holds the result already, which is left as it is.
        progress: a bar on a terminal.

    Raises:
        ValueError: the deltas are no chain or damaged; the base is none of their states, or has other tensors.
        CheckpointUnusable: the base cannot be read.
        FileExistsError, FileNotFoundError: `out` holds something else, or the directory above it does not exist.

    Example:
        ```python
        >>> for step, value in ((1, 0.0), (2, 1.0)):
        ...     dcp.save({"w": torch.full((64,), value)}, checkpoint_id=f"step-{step}", planner=QuantizedSavePlanner())
        >>> write_delta("step-1", "step-2", "1-to-2.delta")
        >>> patched_copy("step-1", ["1-to-2.delta"], "copy")
        >>> digest("copy") == digest("step-2")
        True
        ```
    """
    opened = [delta if isinstance(delta, Delta) else open_delta(delta) for delta in deltas]
    check_chain(opened)
    final, source, result = Path(out), open_state(base), opened[-1].result
    refuse_other_layout(opened[0].layout, layout_of(source), (opened[0].where, str(base)))
    if _holds(final, opened[-1]):
        return PatchedCopy(str(base), str(out), len(opened), 0, result, written=False)
    refuse_taken(final)
    total = layout_of(source).nbytes
    with progress_bar("reading", total, enabled=progress) as advance:
        before = sum_state(source, advance=advance)
    left = deltas_left(opened, before.digest, str(base))
    patched = Patched(source, left)
    with progress_bar("checking", total, enabled=progress) as advance:
        after = _check_result(patched, before, result, advance)
    told = log_work(LOG, "patched_copy: applying %d deltas into %s", len(left), final, nbytes=total)
    with told, progress_bar("writing", total, enabled=progress) as advance:
        if isinstance(source, StoredFiles):
            _write_files(patched, source, after, final, advance)
        else:
            # A conversion that converts nothing: it writes a source, one tensor at a time, with checksums of its own.
            convert_checkpoint(patched, final, ConversionPlan(torch.bfloat16, frozenset()), advance=advance)
    return PatchedCopy(str(base), str(out), len(opened), len(left), result, written=True)


def _refuse_other_kind(old: Stored, new: Stored) -> None:
    if isinstance(old, StoredFiles) != isinstance(new, StoredFiles):
        kinds = ["a Hugging Face directory" if isinstance(side, StoredFiles) else "a checkpoint" for side in (old, new)]
        raise ValueError(f"{old.path} is {kinds[0]}, {new.path} {kinds[1]}; a delta is between two of a kind")


def _holds(out: Path, delta: Delta) -> bool:
    """Tell whether a directory holds what a delta leads to."""
    if not out.is_dir() or not any(out.iterdir()):
        return False
    try:
        there = open_state(out, check=True)
        return layout_of(there) == delta.layout and sum_state(there).digest == delta.result
    except (ValueError, OSError):
        return False


def _changed_keys(layout: StateLayout, deltas: Sequence[Delta]) -> list[str]:
    return [key for run in layout.runs for key in run.keys if any(any(delta.changes(key)) for delta in deltas)]


def _check_result(patched: Patched, before: Summed, result: str, advance: Advance = ignore_progress) -> Summed:
    """Sum the patched state. Raises ValueError if the deltas, all decoded here, do not lead to what they say."""
    layout = before.layout
    sums = dict(before.sums)
    for key in _changed_keys(layout, patched.deltas):
        tensor = patched.part(*layout.owners[key])
        sums[key] = sum_of(tensor)
        advance(tensor.nbytes)
    blobs = {name: blob_digest(patched.read_blob(name)) for name in layout.blobs}
    after = Summed(layout, sums, blobs)
    if after.digest != result:
        raise ValueError(
            f"the deltas lead to digest {after.digest} from {patched.path}, and the last one says {result}: one of "
            "them is damaged, or made by other code; nothing was written. Get them again, or take a full version"
        )
    return after


def _write_files(patched: Patched, source: StoredFiles, after: Summed, final: Path, advance: Advance) -> None:
    begun = hidden_name(final)
    with remove_on_error(begun):
        shutil.copytree(source.path, begun)
        names = set(_changed_keys(layout_of(source), patched.deltas))
        digests = {name: file_tensor_digest(*after.layout.parts[name], total) for name, total in after.sums.items()}
        for file in source.file_bytes():
            here = [name for name, tensor in source.tensors.items() if tensor.file == file and name in names]
            with (begun / file).open("r+b") as stream:
                size, header = read_header(stream)
                metadata = header.get(METADATA, {})
                # The digests that the file notes of its tensors would contradict the new bytes.
                if here and DIGESTS in metadata:
                    metadata[DIGESTS] = renewed_note(metadata[DIGESTS], file, digests)
                    write_header(stream, size, header)
                for name in here:
                    tensor = patched.part(name, "")
                    stream.seek(8 + size + header[name]["data_offsets"][0])
                    stream.write(memory_of(tensor))
                    advance(tensor.nbytes)
        for path in begun.rglob("*"):
            sync(path)
        sync(begun)
        give_name(begun, final)
