"""A save into a directory where another save has written, or is writing: at every moment one of the two loads.

File writers open `__<rank>_<n>.distcp` for writing, whoever owns it. Two saves into one directory, or one that dies
over an older checkpoint, would then leave the metadata of one with files of both; where shapes agree, so do sizes and
offsets, and the mixture would load. These steps prevent that, on local paths:

    make_room  the coordinator, after all checks and before any rank writes: removes the files that the `.metadata` in
               place does not name, those of the checkpoint before it. What it names stays, and loads.
    own_names  every rank, before it writes: chooses new file names if there is a checkpoint, or if its first file
               exists already (from a save that died, or from one at the same time).
    commit     the coordinator, when all ranks have written: checks that the files are still there. Then the writer
               replaces the old `.metadata` with the new one, and from then on the new checkpoint loads.

So the files of a replaced checkpoint stay until the next save, for loads that have begun: DCP calls no planner after
the rename. `remove_replaced` removes them earlier. `clear` removes the whole old checkpoint before anything is written,
for disks without room for two.
"""

import dataclasses
import logging
import mmap
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint import SavePlan

from dcp_adapters.plain.durable import sync
from dcp_adapters.save.steps.step import GlobalSave, SaveStep, Saving
from dcp_adapters.torch_private import prefix_of

LOG = logging.getLogger(__name__)
DATA = re.compile(r"__\d+_\w+\.distcp", re.ASCII)
NAMED = re.compile(DATA.pattern.encode(), re.ASCII)
RANK_METADATA = re.compile(r"__\d+\.metadata")
BEGUN = re.compile(r"(__\d+)?\.metadata\.[0-9a-f]{8}\.tmp")  # of a save that was interrupted at its commit
END_OF_PICKLE = b"."

Directory = str | os.PathLike[str] | None


class Overwrite(SaveStep):
    """One rank's part in one save."""

    def __init__(self, how: Literal["keep", "delete_first"], saving: Saving) -> None:
        self.how, self.checkpoint_id = how, saving.checkpoint_id
        self.alone = False  # whether this rank saves for itself

    def planned(self, save: GlobalSave) -> None:
        """Make room, and tell all ranks whether there was a checkpoint."""
        self.alone = save.apart is not None
        room = make_room if self.how == "keep" else clear
        save.answers["overwrite"] = room(self.checkpoint_id, own=save.apart)

    def finish_plan(self, plan: SavePlan, answers: Mapping[str, Any]) -> SavePlan:
        """Return the plan with file names that are this save's own."""
        if not plan.items:
            return plan
        names = own_names(self.checkpoint_id, plan.storage_data, taken=answers["overwrite"])
        return dataclasses.replace(plan, storage_data=names)

    def commit(self, files: set[str]) -> None:
        """Check that the files are still there."""
        commit(self.checkpoint_id, files, alone=self.alone)


def make_room(checkpoint_id: Directory, *, own: str | None = None) -> bool:
    """Remove what the checkpoint in place has replaced; that checkpoint stays.

    Without metadata there is no checkpoint and nothing is removed: data files may belong to a save under way.

    Args:
        checkpoint_id: a local directory, which need not exist. None and URLs ("s3://...") are left alone: how to reach
            the store behind a URL is known only to the storage writer.
        own: what the names of this rank's files begin with, if it saves for itself (use_collectives=False). Then only
            such files are removed; another rank may have just written the others.

    Returns:
        Whether there was a checkpoint.

    Raises:
        OSError: a file cannot be removed, or the metadata cannot be read; the checkpoint in place is as it was.
    """
    directory = _local_directory(checkpoint_id)
    if directory is None or not directory.is_dir():
        return False
    # listed before the metadata are read: a save that ends in between has files that the older metadata do not name
    present = [path.name for path in directory.iterdir()]
    of_ranks = sorted(name for name in present if RANK_METADATA.fullmatch(name))
    whole = directory / ".metadata"
    visible = [whole] if whole.exists() else [directory / name for name in of_ranks]
    if not visible:
        return False
    data = [name for name in present if DATA.fullmatch(name) and (own is None or name.startswith(own))]
    keep = visible if own is None else [*visible, *(directory / name for name in of_ranks)]
    named = _find_named_files(keep)
    if named is None:
        return True
    # `dcp.load` falls back on the ranks' own metadata only without `.metadata`: beside one they are never read again
    stale = [] if own is not None or visible != [whole] else [directory / name for name in of_ranks]
    stale += [directory / name for name in data if name not in named]
    stale += [directory / name for name in present if own is None and BEGUN.fullmatch(name)]
    if stale:
        for path in visible:
            # the metadata that stay may be in memory alone: a crash after the removal could leave neither checkpoint
            sync(path)
        sync(directory)
    for path in stale:
        _removed(path)
    LOG.debug("%s: its checkpoint stays until the new one is complete; %d older files removed", directory, len(stale))
    return True


def remove_replaced(checkpoint_id: str | os.PathLike[str]) -> None:
    """Remove the files that saves over older checkpoints have left beside the one that loads.

    The next save into the directory does the same. Call it between saves, on one rank, never during one: no metadata
    name the files of an unfinished save. A load of the replaced checkpoint that still runs fails with an error that
    names a missing file.

    Args:
        checkpoint_id: a local directory; if it holds no complete checkpoint, nothing is removed.

    Raises:
        ValueError: it is a URL.
        OSError: a file cannot be removed.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="latest", planner=QuantizedSavePlanner())  # maybe over an older one
        >>> remove_replaced("latest")
        ```
    """
    if _local_directory(checkpoint_id) is None:
        raise ValueError(f"{checkpoint_id}: expected a local directory; behind URLs saves overwrite files in place")
    make_room(checkpoint_id)


def clear(checkpoint_id: Directory, *, own: str | None = None) -> bool:
    """Remove the checkpoint that is about to be overwritten, its metadata first; durable when it returns.

    Args, returns and raises as `make_room`. A rank that saves for itself removes only `.metadata`, which `dcp.load`
    would prefer to the rank's own. Otherwise the metadata of ranks that saved for themselves (`__0.metadata`) is
    removed as well, since `dcp.load` falls back on it.
    """
    directory = _local_directory(checkpoint_id)
    if directory is None or not directory.is_dir():
        return False
    # first the metadata: without them the rest is no checkpoint, wherever this is interrupted
    metadata = [directory / ".metadata"]
    if own is None:
        metadata += sorted(path for path in directory.iterdir() if RANK_METADATA.fullmatch(path.name))
    found = [path for path in metadata if _removed(path)]
    if not found:
        return False
    sync(directory)
    if own is None:
        for path in directory.iterdir():
            if DATA.fullmatch(path.name) or BEGUN.fullmatch(path.name):
                _removed(path)
    LOG.info("%s held a checkpoint, which has been removed before the new one is written", directory)
    return True


def own_names(checkpoint_id: Directory, storage_data: Any, *, taken: bool) -> Any:
    """Return the writer's storage data, with a new prefix unless this rank's usual names are unused.

    `taken`: there is or was another checkpoint; a save that began earlier may still be writing its files.
    Writers that name no prefix, and stores behind URLs, are left as they are.
    """
    directory, prefix = _local_directory(checkpoint_id), prefix_of(storage_data)
    if directory is None or prefix is None or not directory.is_dir():
        return storage_data
    if not taken:
        # O_EXCL: of two saves that begin at once, the file system gives the usual names to one
        try:
            os.close(os.open(directory / f"{prefix}0.distcp", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            taken = True
    return dataclasses.replace(storage_data, prefix=f"{prefix}{uuid.uuid4().hex[:8]}_") if taken else storage_data


def commit(checkpoint_id: Directory, files: Iterable[str], *, alone: bool) -> None:
    """Check the new files, before the new metadata replace those in place.

    Args:
        checkpoint_id: as in `make_room`.
        files: the names of the files that the new metadata name.
        alone: a rank saves for itself: the old `.metadata`, which `dcp.load` would prefer, is removed last.

    Raises:
        FileNotFoundError: another save has removed some of the files; the checkpoint in place is as it was.
    """
    directory = _local_directory(checkpoint_id)
    if directory is None or not (directory / ".metadata").exists():
        return
    gone = sorted({name for name in files if DATA.fullmatch(name) and not (directory / name).exists()})
    if gone:
        raise removed_by_another(directory / gone[0])
    if alone:
        _removed(directory / ".metadata")
        sync(directory)


def removed_by_another(path: Path) -> FileNotFoundError:
    """Return the error for a file of this save that is no longer there."""
    return FileNotFoundError(
        f"{path}: another save into the same directory has removed it while this one was being written; the checkpoint "
        "in place stays. Let one save at a time use a directory"
    )


def _find_named_files(metadata: Iterable[Path]) -> set[str] | None:
    """Return the data files that metadata name, and perhaps more; None if they cannot be told.

    The names are found in the bytes of the pickle: nothing is unpickled, and a gigabyte takes seconds.
    """
    named: set[str] = set()
    for path in metadata:
        try:
            stream = path.open("rb")
        # another save has just replaced them, so what they named is not known
        except FileNotFoundError:
            return None
        with stream:
            if not os.fstat(stream.fileno()).st_size:  # which cannot be mapped
                return None
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as stored:
                found = {match[0].decode() for match in NAMED.finditer(stored)}
                # cut-off metadata name too few files, and the others would be removed
                if not found or stored[-1:] != END_OF_PICKLE:
                    return None
        named |= found
    return named


def _local_directory(checkpoint_id: Directory) -> Path | None:
    return None if checkpoint_id is None or "://" in os.fspath(checkpoint_id) else Path(checkpoint_id)


def _removed(path: Path) -> bool:
    """Remove a file; return whether there was one. A rank that saves for itself may have been faster."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
