"""States on disk and in memory, as sources: deltas are made from them and applied to them.

checkpoint                StoredCheckpoint: quantized tensors in parts, entries of bytes
Hugging Face directory    StoredFiles: the tensors of the files as they are, under the names that engines know; how
                          they are quantized counts as one entry of bytes
tensors                   InMemory
any of them, patched      Patched
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from dcp_adapters.delta.coding.changes import units
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.hf.files.config_sections import said_of_quantization
from dcp_adapters.hf.files.directory import read_directory
from dcp_adapters.hf.reading.schemes import DTYPES
from dcp_adapters.hf.reading.stored_directory import is_directory
from dcp_adapters.records.entry import Entry, parts_of
from dcp_adapters.records.expand import entry_of
from dcp_adapters.records.source import Source, Stored
from dcp_adapters.stored.checkpoint import StoredCheckpoint

QUANTIZATION = "quantization_config"


class StoredFiles(Stored):
    """The tensors in the files of a Hugging Face directory, none of them interpreted.

    Raises:
        FileNotFoundError, ValueError: as read_directory does; a dtype that torch does not have.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        directory = read_directory(path, any_name=True)
        self.path, self.tensors = directory.path, directory.tensors
        unknown = [f"{tensor.name} ({tensor.dtype})" for tensor in self.tensors.values() if tensor.dtype not in DTYPES]
        if unknown:
            raise ValueError(f"{self.path}: {unknown[0]} has a dtype that is not known here")
        self.entries = {
            name: Entry(name, None, tensor.shape, DTYPES[tensor.dtype]) for name, tensor in self.tensors.items()
        }
        told = [said_of_quantization(directory.config), directory.quantization]
        # Equal bytes under another quantization_config are other weights, so it is part of the state and its digest.
        self._quantization = b"" if told == [None, None] else json.dumps(told, sort_keys=True).encode()
        self.blobs = [QUANTIZATION] if self._quantization else []
        self.paths = {}

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read a tensor from its file."""
        tensor = self.tensors[name]
        with safe_open(self.path / tensor.file, "pt", device="cpu") as opened:
            return {"": opened.get_tensor(name)}

    def chunks(self, name: str) -> int:
        """Return 1: a tensor is in one file."""
        return int(name in self.tensors)

    def file_bytes(self) -> dict[str, int]:
        """Return the bytes of each file's tensors."""
        sizes: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            sizes[tensor.file] = sizes.get(tensor.file, 0) + self.entries[name].nbytes
        return sizes

    def blob_size(self, name: str) -> int:
        """Return how many bytes say how the directory is quantized."""
        return len(self.read_blob(name))

    def read_blob(self, name: str) -> bytes:
        """Return what config.json and hf_quant_config.json say of the quantization, as JSON with sorted keys."""
        if name != QUANTIZATION:
            raise KeyError(name)
        return self._quantization


class InMemory(Source):
    """Whole tensors, quantized or dense, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.entries = {name: entry_of(name, tensor) for name, tensor in self.tensors.items()}

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the parts of a tensor on the CPU."""
        return {part: tensor.detach().to("cpu") for part, tensor in parts_of(self.tensors[name]).items()}


class Patched(Stored):
    """A stored state after some deltas, patched as it is read."""

    def __init__(self, stored: Stored, deltas: Sequence[Delta]) -> None:
        self.stored, self.deltas = stored, deltas
        self.path, self.layout, self.format_version = stored.path, stored.layout, stored.format_version
        self.entries, self.blobs, self.paths = stored.entries, stored.blobs, stored.paths

    @property
    def names(self) -> list[str]:
        """Return the names as they are stored."""
        return self.stored.names

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the parts with the changes of all deltas."""
        return {part: self.part(name, part) for part in self.entries[name].parts()}

    def part(self, name: str, part: str) -> Tensor:
        """Read a part, and make the changes of all deltas in it."""
        tensor = self.stored.part(name, part).contiguous()
        add_changes(tensor, self.entries[name].key(part), self.deltas)
        return tensor

    def blob_size(self, name: str) -> int:
        """Return the size in the base: how much there is to read."""
        return self.stored.blob_size(name)

    def read_blob(self, name: str) -> bytes:
        """Return what the last delta that changes the entry makes of it, or what is stored."""
        changed = (delta.blob(name) for delta in reversed(self.deltas))
        last = next((data for data in changed if data is not None), None)
        return self.stored.read_blob(name) if last is None else last


def add_changes(tensor: Tensor, key: str, deltas: Sequence[Delta]) -> None:
    """Write the changes of a whole part into a contiguous CPU tensor of its own. Raises ValueError as Delta.changes."""
    flat = units(tensor)
    for delta in deltas:
        for changes in delta.changes(key):
            flat[changes.positions] += changes.steps


def open_state(path: str | os.PathLike[str], *, check: bool = False) -> Stored:
    """Open a checkpoint (compared with its checksums as it is read, with `check`), or the files of a directory.

    Raises:
        CheckpointUnusable: there is no checkpoint, or it cannot be read.
        FileNotFoundError, ValueError: as StoredFiles.
    """
    return StoredFiles(path) if is_directory(path) else StoredCheckpoint(Path(path), check=check)
