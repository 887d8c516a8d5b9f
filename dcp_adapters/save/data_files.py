"""One rank's data files, as FileSystemWriter writes them, with less Python for each tensor.

The items are shared out to files, which threads write: byte entries as they are, tensors as torch.save writes them. The
files are those of stock's writer, byte for byte, and take less Python (`archives.py`). Two things are different. The
error of a thread is raised: stock's writer loses it, and with it the chunks of the thread. And whether CRC32 is written
is for the thread that saves to say: in stock's other threads it is on.
"""

import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_adapters.plain.plain_memory import memory_of, refuse_without_bytes
from dcp_adapters.save.archives import Frames
from dcp_adapters.torch_private import StorageInfo

SUFFIX = ".distcp"


@dataclass(frozen=True)
class DataFile:
    """A file and the items that are written to it, byte entries first."""

    name: str
    items: tuple[WriteItem, ...]


def data_files(items: Sequence[WriteItem], prefix: str, files: int | None) -> list[DataFile]:
    """Share items out to so many files of about the same size; if None, each gets a file of its own.

    One file has its tensors in the order of the items. Of several, each has its tensors by size, the largest first.
    """
    groups = [[item] for item in items] if files is None else _share_out(items, files)
    return [DataFile(f"{prefix}{number}{SUFFIX}", tuple(group)) for number, group in enumerate(groups)]


def _share_out(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    entries = [item for item in items if item.type is WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    if files == 1:
        return [[*entries, *tensors]]
    # as stock's writer does it, so that the files hold the same items: byte entries in turn, then each tensor, the
    # largest first, to the file with the fewest bytes so far
    groups, sizes = [entries[number::files] for number in range(files)], [0] * files
    for size, item in sorted(((_size(item), item) for item in tensors), key=lambda one: one[0], reverse=True):
        least = sizes.index(min(sizes))
        groups[least].append(item)
        sizes[least] += size
    return groups


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.size) * item.tensor_data.properties.dtype.itemsize


class DataWriter:
    """Writes data files into a directory.

    Args:
        fs: how files are opened.
        directory: where they are made.
        planner: what resolves items.
        sync: whether files are synced.
    """

    def __init__(self, fs: FileSystem, directory: Path, planner: SavePlanner, *, sync: bool) -> None:
        self.fs, self.directory, self.planner, self.sync = fs, directory, planner, sync
        self._lock = threading.Lock()
        # the option belongs to a thread: new ones would write CRC32 even if the caller switched it off
        self._crc32 = torch.serialization.get_crc32_options()
        self._written: list[WriteResult] = []
        self._failed: list[BaseException] = []

    def write(self, files: Sequence[DataFile], threads: int) -> list[WriteResult]:
        """Write the files with so many threads, of which the calling one is the first; returns where each item lies.

        Raises the first error of any thread; the others write no further tensor then.
        """
        queue = iter(files)
        others = [threading.Thread(target=self._work, args=(queue,)) for _ in range(1, threads)]
        for thread in others:
            thread.start()
        self._work(queue)
        for thread in others:
            thread.join()
        if self._failed:
            raise self._failed[0]
        return self._written

    def _work(self, queue: Iterator[DataFile]) -> None:
        frames = Frames()
        try:
            torch.serialization.set_crc32_options(self._crc32)
            while (file := self._next(queue)) is not None:
                written = self._write_file(file, frames)
                with self._lock:
                    self._written += written
        # a thread's error ends the thread alone; `write` raises it in the thread that waits
        except BaseException as error:  # noqa: BLE001
            self._failed.append(error)

    def _next(self, queue: Iterator[DataFile]) -> DataFile | None:
        with self._lock:
            return None if self._failed else next(queue, None)

    def _write_file(self, file: DataFile, frames: Frames) -> list[WriteResult]:
        written, at = [], 0
        with self.fs.create_stream(self.fs.concat_path(self.directory, file.name), "wb") as stream:
            for item in file.items:
                # another thread has failed, so nothing that is written here will be used
                if self._failed:
                    break
                data = self.planner.resolve_data(item)
                if isinstance(data, Tensor):
                    _write_tensor(stream, _settle(item.index.fqn, data), frames)
                else:
                    stream.write(data.getbuffer())
                begin, at = at, stream.tell()
                info = StorageInfo(file.name, begin, at - begin)
                written.append(WriteResult(index=item.index, size_in_bytes=at - begin, storage_data=info))
            if self.sync:
                os.fsync(stream.fileno())
        return written


def _settle(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as it is saved: on the CPU, without a gradient, in a storage that holds nothing else.

    Raises:
        ValueError: it has no bytes.
    """
    refuse_without_bytes([(name, tensor)])
    tensor = tensor.detach().cpu()
    # torch.save writes the whole storage, of which a view may be a small part
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()


def _write_tensor(stream: Any, tensor: Tensor, frames: Frames) -> None:
    frame = frames.of(tensor)
    if frame is None:
        torch.save(tensor, stream)
        return
    stream.write(frame.head)
    stream.write(memory_of(tensor))
    stream.write(frame.tail)
