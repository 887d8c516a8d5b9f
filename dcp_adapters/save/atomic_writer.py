"""AtomicFileSystemWriter: stock DCP's writer, with a commit that is one rename.

Stock FileSystemWriter removes the `.metadata` in place and renames the new one behind that: a process that is killed in
between leaves none. Up to torch 2.14 it also syncs the new one before the last of it has left the process, and it never
syncs the directory, so that a machine that crashes may come back with an empty `.metadata`, or with none.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from dcp_adapters.stored.durable import sync


class _Flushed(io.BufferedWriter):
    """A file that hands over what it buffers when its descriptor is asked for, which is done to sync it."""

    def fileno(self) -> int:
        if not self.closed:
            self.flush()
        return super().fileno()


class AtomicFiles(FileSystem):
    """Files whose renames replace what has the name, atomically; with `syncs` their names outlast a crash, too."""

    def __init__(self, *, syncs: bool) -> None:
        self.syncs = syncs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file that is written whole or not at all; reading is the superclass's."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Flushed(io.FileIO(path, "wb")) as written:
            yield written

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Nothing for metadata, which the rename that follows replaces."""
        if not Path(path).name.endswith(".metadata"):
            super().rm_file(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Behind the names of the data files; and durable when it returns."""
        if self.syncs:
            sync(Path(new_path).parent)
        Path(path).replace(new_path)
        if self.syncs:
            sync(Path(new_path).parent)


class AtomicFileSystemWriter(FileSystemWriter):
    """`torch.distributed.checkpoint.FileSystemWriter`, with a commit that is one rename.

    With `QuantizedSavePlanner` a save over an older checkpoint leaves, wherever it is interrupted, the old one or the
    new one. Files and their names are synced before the rename, and the rename before the save returns.

    Args:
        path: the directory to save into; `checkpoint_id` of `dcp.save` takes its place.
        **kwargs: those of FileSystemWriter. sync_files=False syncs nothing.
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.fs = AtomicFiles(syncs=self.sync_files)
