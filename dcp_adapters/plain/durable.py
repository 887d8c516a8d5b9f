"""Files that survive a crash of the machine, and directories and files that appear only when they are complete.

While a directory is written, it has a hidden name beside its own (`hidden_name`), and an error removes it
(`remove_on_error`); `give_name` gives it its own name. Files are written likewise, and named by `give_file_name`.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Some network file systems cannot sync a directory; there a removal is as durable as they make it.
CAN_NOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
# What a file system without hard links answers to a link.
NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK})


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a directory, are on the disk, if the file system can do that."""
    # Windows opens no directory, and flushes files that are open for writing alone.
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


def sync_name(directory: Path) -> None:
    """Wait until a directory's own name is on the disk; do nothing if the directory above it may not be read."""
    with suppress(PermissionError):
        sync(directory.absolute().parent)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing; the names of those above are durable when it returns.

    Its own name is not (see `sync_name`): all ranks make the directory of a checkpoint, and the one that commits syncs.
    """
    missing: list[Path] = []
    above = path.absolute().parent
    while not above.is_dir():
        missing.append(above)
        above = above.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)  # another rank may be faster
        sync_name(directory)
    path.mkdir(exist_ok=True)


def refuse_taken(final: Path) -> None:
    """Raise unless a directory can be given this name: it must be free, or be that of an empty directory.

    Raises:
        FileExistsError, FileNotFoundError: it is taken, or the directory above it does not exist.
    """
    # A mount point can not be replaced, and the directory that this process is in must not be, however empty.
    here = final.is_dir() and final.samefile(os.curdir)
    if not final.name or here or (os.name == "posix" and final.is_mount()):
        raise FileExistsError(f"{final} can not be replaced when all is written; give a new directory in it")
    if final.is_symlink() or (final.exists() and not (final.is_dir() and not any(final.iterdir()))):
        raise FileExistsError(f"{final} exists already; choose another name, nothing is overwritten")
    if not final.absolute().parent.is_dir():
        raise FileNotFoundError(f"{final.absolute().parent}: no such directory; create it first")


def hidden_name(final: Path) -> Path:
    """Make a name for a directory or file that is not finished yet; a new one each time."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")


@contextmanager
def remove_on_error(begun: Path) -> Iterator[None]:
    """Remove the directory that the block has begun, if the block fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise


def give_name(begun: Path, final: Path) -> None:
    """Give a finished directory its final name, replacing an empty directory; durable when it returns.

    Raises:
        FileExistsError: something else has taken the name meanwhile; nothing is overwritten.
    """
    try:
        if final.is_symlink():
            raise FileExistsError
        if os.name != "posix" and final.is_dir():
            final.rmdir()  # elsewhere no rename replaces a directory
        begun.rename(final)  # on POSIX in one step; replaces only an empty directory
    except OSError as error:
        if not isinstance(error, (FileExistsError, NotADirectoryError)) and error.errno != errno.ENOTEMPTY:
            raise
        raise FileExistsError(
            f"{final} was made by another while this one was written; nothing is overwritten"
        ) from error
    sync(final.absolute().parent)


def give_file_name(begun: Path, final: Path) -> None:
    """Give a finished and synced file its final name; durable when it returns.

    Of several writers of one name, one gets it. On a file system without hard links an empty file takes the name, and
    is replaced in the next moment: a crash in between leaves it there.

    Raises:
        FileExistsError: the name is taken; nothing is overwritten.
    """
    try:
        try:
            final.hardlink_to(begun)  # unlike a rename it never replaces a file
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _rename_to_free(begun, final)
        else:
            begun.unlink()
    except FileExistsError:
        raise FileExistsError(
            f"{final} was made by another while this one was written; nothing is overwritten"
        ) from None
    sync(final.absolute().parent)


def _rename_to_free(begun: Path, final: Path) -> None:
    """Rename a file to a name that nothing has. Raises FileExistsError if something has it."""
    final.touch(exist_ok=False)  # makes the file, or raises, in one step; from here on the name is ours
    try:
        begun.replace(final)
    except BaseException:
        with suppress(OSError):
            final.unlink()
        raise
