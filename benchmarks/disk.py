"""Writes and reads bytes without any format, cold or warm, to measure a disk; and sizes of what is on it.

Cold means that nothing of the file is in this machine's page cache; a virtual machine's disk may have other caches.
"""

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, aliased."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_raw(path: Path, tensors: Iterable[Tensor]) -> None:
    """All bytes of all tensors into one file, in order, then fsync."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            data = memory_of(tensor)
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())


def read_raw(path: Path, tensors: Iterable[Tensor]) -> None:
    """A file of `write_raw` back into the memory that it came from."""
    with path.open("rb", buffering=0) as file:
        for tensor in tensors:
            data = memory_of(tensor)
            while data:
                count = file.readinto(data)
                if not count:
                    raise EOFError(f"{path} is shorter than the tensors")
                data = data[count:]


def files_of(path: Path) -> list[Path]:
    """A file, or all files below a directory."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def forget(path: Path) -> None:
    """Drop the page cache's copy of a synced file, or of all files below a directory."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(path: Path) -> None:
    """Read everything once, so that the page cache has it."""
    for file in files_of(path):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def touch(nbytes: int) -> None:
    """Use that much memory and give it back, so that it is ready for whoever needs it next.

    In a virtual machine the first use of a page waits for the host, several times as long as copying takes.
    """
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)


def remove(path: Path) -> None:
    """A directory or a file, or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def directory_bytes(path: Path) -> int:
    """The length of all files below a directory."""
    return sum(file.stat().st_size for file in files_of(path))


def entry_bytes(checkpoint: Path, names: Collection[str]) -> int:
    """Bytes in a checkpoint's files of the named entries and of their parts."""
    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    assert isinstance(stored, dict)
    owners = set(names)
    return sum(
        info.length for index, info in stored.items() if index.fqn in owners or index.fqn.rpartition(".")[0] in owners
    )


def require_free(folder: Path, needed: int) -> None:
    """Raise OSError unless the filesystem of a folder has that many bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{folder} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed")
