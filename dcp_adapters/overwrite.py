"""What a save does to the checkpoint that stands where it is about to write.

File writers overwrite in place: they truncate and rewrite the data files one by one, while the `.metadata` of the old
checkpoint stays until the very end. A save that dies in between leaves old metadata over files of two saves; their
sizes and offsets agree as long as the shapes do, so it loads, and what it loads is a mixture. Taking the old metadata
away before the first file is touched makes of it what it is, an incomplete checkpoint:

    plans checked  ->  retire: .metadata becomes .metadata.retired  ->  data files  ->  new .metadata, by rename

Nothing brings the old checkpoint back once its files are being written; who needs it saves into a directory a step.
What fails before the first file is written leaves the old one whole: renaming its metadata back revives it.

Two saves into one directory at the same time are not kept apart: their files replace each other's, and the metadata of
the last to finish describes them.
"""

import errno
import os
import re
from pathlib import Path

__all__ = ["RETIRED", "retire"]

METADATA = ".metadata"
RETIRED = ".retired"  # suffix of metadata that describes nothing any more
RANK_METADATA = re.compile(r"__\d+\.metadata")
# Some network file systems can not sync a directory; there a rename is as durable as they make it.
CAN_NOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


def retire(checkpoint_id: str | os.PathLike[str] | None, *, ranks: int) -> list[Path]:
    """Rename the metadata of a checkpoint that is about to be overwritten; durable when it returns.

    The coordinator calls it after all checks, before it answers the other ranks: no rank has written anything then. An
    earlier `.metadata.retired` is replaced.

    Args:
        checkpoint_id: a local directory, which need not exist. None and URLs ("s3://...") are left alone: how to reach
            the store behind a URL is known only to the storage writer.
        ranks: how many ranks plan this save together. With more than one, metadata that ranks have saved each for
            itself (`__0.metadata`, use_collectives=False) goes as well, because `dcp.load` falls back on it; a rank
            that plans alone leaves it, for it can not tell its own from what another rank has just finished.

    Returns:
        The renamed files; empty where there is no checkpoint.

    Raises:
        OSError: the directory can not be written; the old checkpoint is untouched.
    """
    if checkpoint_id is None or "://" in os.fspath(checkpoint_id):
        return []
    directory = Path(checkpoint_id)
    metadata = [directory / METADATA]
    if ranks > 1 and directory.is_dir():
        metadata += sorted(path for path in directory.iterdir() if RANK_METADATA.fullmatch(path.name))
    retired = []
    for path in metadata:
        to = path.with_name(path.name + RETIRED)
        try:
            path.replace(to)
        except (FileNotFoundError, NotADirectoryError):
            continue  # nothing to overwrite, or a rank that plans alone was faster
        retired.append(to)
    if retired:
        _sync_directory(directory)
    return retired


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CAN_NOT_SYNC:
            raise
    finally:
        os.close(descriptor)
