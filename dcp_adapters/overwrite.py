"""What a save does where another one has written, or is writing: their files never end up under one `.metadata`.

File writers open `__<rank>_<n>.distcp` for writing, whoever owns it. Two saves into one directory, or one that dies
over an older checkpoint, then leave metadata of one over files of both; sizes and offsets agree as long as the shapes
do, so it would load. Two steps prevent that, on local paths:

    clear      the coordinator, after all checks and before any rank writes: the `.metadata` of the checkpoint that is
               overwritten goes, then its data files. A save that dies from here on leaves an incomplete checkpoint.
    own_names  every rank, before it writes: files have names of their own where something has been cleared, or where
               the first file exists already, of a save that died or of one at the same time.

So two saves at the same time leave the one that finishes last, whole, or, if the other has cleared its files away,
without files that are missing by name. Nothing brings an overwritten checkpoint back: who needs it saves into a
directory a step.
"""

import dataclasses
import os
import re
import uuid
from pathlib import Path
from typing import Any

from dcp_adapters.durable import sync

__all__ = ["clear", "own_names"]

DATA = re.compile(r"__\d+_\w+\.distcp")
RANK_METADATA = re.compile(r"__\d+\.metadata")


def clear(checkpoint_id: str | os.PathLike[str] | None, *, alone: bool) -> bool:
    """Remove the checkpoint that is about to be overwritten, its metadata first; durable when it returns.

    Without `.metadata` there is no checkpoint and nothing is removed: data files may belong to a save under way.

    Args:
        checkpoint_id: a local directory, which need not exist. None and URLs ("s3://...") are left alone: how to reach
            the store behind a URL is known only to the storage writer.
        alone: the rank saves for itself (use_collectives=False). Then only the `.metadata` goes, which `dcp.load` would
            prefer; other files may be what another rank has just written. Otherwise metadata that ranks have saved
            each for itself (`__0.metadata`) goes as well, since `dcp.load` falls back on it.

    Returns:
        Whether there was a checkpoint.

    Raises:
        OSError: the directory can not be written; the old checkpoint is as it was.
    """
    directory = _local(checkpoint_id)
    if directory is None or not directory.is_dir():
        return False
    metadata = [directory / ".metadata"]
    if not alone:
        metadata += sorted(path for path in directory.iterdir() if RANK_METADATA.fullmatch(path.name))
    found = [path for path in metadata if _removed(path)]
    if not found:
        return False
    sync(directory)
    if not alone:
        for path in directory.iterdir():
            if DATA.fullmatch(path.name):
                _removed(path)
    return True


def own_names(checkpoint_id: str | os.PathLike[str] | None, storage_data: Any, *, cleared: bool) -> Any:
    """The writer's storage data, with a prefix of its own unless the directory is new to this rank's names.

    `cleared` says that an older checkpoint was removed; a save that had begun before may still write its files. Writers
    that name no prefix, and stores behind URLs, are left as they are.
    """
    directory, prefix = _local(checkpoint_id), getattr(storage_data, "prefix", None)
    if directory is None or not isinstance(prefix, str) or not directory.is_dir():
        return storage_data
    if not cleared:
        try:
            os.close(os.open(directory / f"{prefix}0.distcp", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            cleared = True
    return dataclasses.replace(storage_data, prefix=f"{prefix}{uuid.uuid4().hex[:8]}_") if cleared else storage_data


def _local(checkpoint_id: str | os.PathLike[str] | None) -> Path | None:
    return None if checkpoint_id is None or "://" in os.fspath(checkpoint_id) else Path(checkpoint_id)


def _removed(path: Path) -> bool:
    """Whether there was such a file; a rank that saves for itself may have been faster."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
