"""AtomicFileSystemWriter: stock DCP's writer, with a commit that is one rename, and less Python for each tensor.

Stock FileSystemWriter removes the old `.metadata`, then renames the new one: a process that is killed in between leaves
none. Up to torch 2.14 it also syncs the new one before all of it has left the process, and it never syncs the
directory: after a crash of the machine `.metadata` may be empty or missing, or the whole directory. And all writers
share one name for the new one (`.metadata.tmp`): of two saves at once, one renames what the other has half written.

Its data files are those of stock's writer; `data_files.py` writes them, unless the writer is given an extension or
another serialization, or overlaps copies from a device with its writing (one thread, if there is a device).
"""

import io
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcp_adapters.plain.durable import make_directory, sync, sync_name
from dcp_adapters.save.data_files import DataWriter, data_files
from dcp_adapters.save.steps.overwrite import removed_by_another
from dcp_adapters.torch_private import prefix_of

LOG = logging.getLogger(__name__)
BEGUN = ".metadata.tmp"  # what stock calls the new metadata, behind "__<rank>" if a rank saves for itself


class _Flushed(io.BufferedWriter):
    """A file that flushes its buffer when its descriptor is asked for, as is done to sync it."""

    def fileno(self) -> int:
        if not self.closed:
            self.flush()
        return super().fileno()


class AtomicFiles(FileSystem):
    """Files whose renames replace an older file atomically; with `syncs` the names also survive a crash."""

    def __init__(self, *, syncs: bool) -> None:
        self.syncs = syncs
        # two saves at once must not share the name of the new metadata: one would rename what the other has half
        # written
        self.own = uuid.uuid4().hex[:8]

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file. One that is written includes what is still buffered in a sync; others are the superclass's."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Flushed(io.FileIO(self._begun(path), "wb")) as written:
            yield written

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a directory and those above it; with `syncs` the names of these are durable."""
        if self.syncs:
            make_directory(Path(path))
        else:
            super().mkdir(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file; not `.metadata`, which the rename that follows replaces."""
        # stock removes the old one before it renames the new one; a process killed in between would leave none
        if not Path(path).name.endswith(".metadata"):
            super().rm_file(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Replace `new_path`; with `syncs` all names are durable before that, and the rename after it.

        Also the directory's own name, whoever made it: a save that was killed, or stock's writer, has not synced it.
        """
        final = Path(new_path)
        if self.syncs:
            # after a crash, metadata must not name files whose names are not on the disk
            sync(final.parent)
            sync_name(final.parent)
        begun = self._begun(path)
        try:
            begun.replace(final)
        except FileNotFoundError as error:
            raise removed_by_another(begun) from error
        if self.syncs:
            sync(final.parent)

    def _begun(self, path: str | os.PathLike[str]) -> Path:
        """Return the path; for new metadata, a path of this writer alone."""
        path = Path(path)
        name = path.name
        return path.with_name(f"{name.removesuffix('tmp')}{self.own}.tmp") if name.endswith(BEGUN) else path


class AtomicFileSystemWriter(FileSystemWriter):
    """`torch.distributed.checkpoint.FileSystemWriter`, with a commit that is one rename, and faster for small tensors.

    With `QuantizedSavePlanner` a save over an older checkpoint leaves the old one or the new one, wherever it is
    interrupted. Files and their names are synced before the rename, and the rename before the save returns.

    The files hold the same bytes as stock's. Without CRC32 (`torch.serialization.set_crc32_options(False)`) torch.save
    runs for a few tensors of each dtype and shape, not for all; the others are written as it would write them. With
    thread_count=1 and a GPU stock's code writes, which copies from the GPU meanwhile.

    Args:
        path: the directory to save into; `checkpoint_id` of `dcp.save` takes its place.
        **kwargs: those of FileSystemWriter. sync_files=False syncs nothing.

    Raises:
        ValueError: a thread_count below 1.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, storage_writer=AtomicFileSystemWriter("latest"), planner=QuantizedSavePlanner())
        ```
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.fs = AtomicFiles(syncs=self.sync_files)
        if self.thread_count < 1:
            raise ValueError(f"AtomicFileSystemWriter(thread_count={self.thread_count}): expected 1 or more")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items.

        Raises what a writing thread raised, which stock's writer loses, and with extensions or safetensors still does.
        """
        prefix = prefix_of(plan.storage_data)
        # only what DataWriter is known to write as stock does; a plan without a prefix comes from another writer
        if prefix is None or not self._writes_archives() or self._overlaps_copies():
            LOG.debug("AtomicFileSystemWriter: stock's code writes the data files of this save")
            return super().write_data(plan, planner)
        files = data_files(plan.items, prefix, self.thread_count if self.single_file_per_rank else None)
        writer = DataWriter(self.fs, Path(self.path), planner, sync=self.sync_files)
        done: Future[list[WriteResult]] = Future()
        done.set_result(writer.write(files, self.thread_count))
        return done

    def _writes_archives(self) -> bool:
        plain = not self.transforms.extensions
        return plain and self.serialization_format is SerializationFormat.TORCH_SAVE

    def _overlaps_copies(self) -> bool:
        """Return whether stock copies tensors from a device while it writes others."""
        return self.thread_count == 1 and self.per_thread_copy_ahead > 0 and torch.accelerator.is_available()
