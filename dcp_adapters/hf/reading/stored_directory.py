"""A Hugging Face directory as the commands see it: logical tensors.

Each rank of a load reads slices through `reader.py`; here whole tensors are read, one at a time, in one process.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dcp_adapters.hf.files.directory import FileTensor
from dcp_adapters.hf.models.architectures import Architecture
from dcp_adapters.hf.reading.reader import HuggingFaceReader, OpenFiles
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.rotations import is_marker
from dcp_adapters.records.source import Stored
from fsdp_hooks.kernels.byte_sums import TensorPiece
from fsdp_hooks.torch_private import cpu_by_default


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether a path holds safetensors, and no checkpoint."""
    path = Path(path)
    return not (path / ".metadata").is_file() and any(path.glob("*.safetensors"))


class StoredDirectory(Stored):
    """A directory of safetensors, dense or quantized in a layout that `import_hf` reads.

    Args:
        path: the directory.
        wanted: what it is compared with, by name; a weight of all experts is put together from the experts' linears
            if it is named here.
        architecture: as of HuggingFaceReader.

    Raises:
        FileNotFoundError, ValueError: as HuggingFaceReader does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        wanted: Mapping[str, Entry] | None = None,
        architecture: Architecture | None = None,
    ) -> None:
        self._reader = HuggingFaceReader(path, wanted=wanted, architecture=architecture)
        self.path, self._made = self._reader.path, self._reader.presented()
        self._files = OpenFiles(self.path)  # each is opened once, its header parsed once
        self.layout, self.entries, self.blobs = self._made.layout, self._made.entries, list[str]()
        self.paths: Mapping[str, tuple[Any, ...]] = {}

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Map the model's tensors to shapes, as `Architecture.reads` takes them: each as if it were dense."""
        found = {}
        for name, entry in self.entries.items():
            if name in self._made.scales or is_marker(name):
                continue
            # Rows of linears [E, N, K] when quantized; transformers' own dense weight is the transpose.
            whole = entry.recipe is not None and len(entry.shape) == 3
            found[name] = (entry.shape[0], entry.shape[2], entry.shape[1]) if whole else entry.shape
        return found

    def chunks(self, name: str) -> int:
        """Return the number of tensors in the files that make up the payload."""
        return len(self._made.placed[self.entries[name].part_keys()[0]].chunks)

    def file(self, name: str) -> str:
        """Return the file that the payload is in, or begins in."""
        return self._made.placed[self.entries[name].part_keys()[0]].chunks[0].held.tensor.file

    def held(self, name: str) -> list[FileTensor]:
        """Return the tensors of the files that make up a tensor."""
        keys = self.entries[name].part_keys()
        return [chunk.held.tensor for key in keys for chunk in self._made.placed[key].chunks]

    def as_held(self, tensor: FileTensor) -> Tensor:
        """Read a tensor of a file as it is."""
        with cpu_by_default():
            held: Tensor = self._files.piece(tensor)[...]
        return held

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read from the files."""
        with cpu_by_default():
            return self._reader.read_from(self._files, name)

    def pieces(self, name: str, part: str) -> Iterator[TensorPiece]:
        """Yield the chunks from the files."""
        placed = self._made.placed[self.entries[name].key(part)]
        for chunk in placed.chunks:
            with cpu_by_default():
                piece = placed.piece(chunk, self._files.piece)
            yield piece

    def file_bytes(self) -> dict[str, int]:
        """Return the bytes of each file's tensors, in the dtypes of the parts that they hold."""
        sizes: dict[str, int] = {}
        for placed in self._made.placed.values():
            for chunk in placed.chunks:
                held = chunk.held
                if held.tensor.is_said:
                    continue
                # One row of the file may stand for many of the chunk; then the file's own shape counts.
                extents = chunk.sizes if held.rows == 1 else held.tensor.shape
                count = math.prod(extents) * placed.dtype.itemsize
                sizes[held.tensor.file] = sizes.get(held.tensor.file, 0) + count
        return sizes
