"""Making what was written outlast a crash of the machine."""

import errno
import os
from pathlib import Path

__all__ = ["sync"]

# Some network file systems can not sync a directory; there a removal is as durable as they make it.
CAN_NOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a directory, are on the disk, where the file system can do that."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CAN_NOT_SYNC:
            raise
    finally:
        os.close(descriptor)
