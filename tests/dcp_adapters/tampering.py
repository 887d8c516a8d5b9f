"""A small checkpoint written by hand, chunk by chunk, and tools that damage it."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_adapters import Manifest
from dcp_adapters.records.checksums import CHECKSUMS, chunk_key, digest_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON
from dcp_adapters.torch_private import StorageInfo
from qtensor import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import values

RECIPES = {
    "row": Float8CurrentScaling(),
    "tensor": Float8CurrentScaling(element="e5m2", granularity="tensor"),
    "delayed": Float8DelayedScaling(amax_history_len=4),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
SHAPE, CUT = (8, 32), 5  # rows 0..4 come from rank 0, rows 5..7 from rank 1
FILES = ("__0_0.distcp", "__1_0.distcp")


class Checkpoint:
    """A directory with a checkpoint in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metadata(self) -> Metadata:
        """As stock torch reads it (our own files only)."""
        return pickle.loads((self.path / ".metadata").read_bytes())

    @contextmanager
    def editing(self) -> Iterator[Metadata]:
        """The metadata, written back at the end."""
        metadata = self.metadata
        yield metadata
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))

    def add(self, name: str, tensor: Tensor, offset: tuple[int, ...], metadata: Metadata, *, rank: int = 0) -> None:
        """Write one chunk behind what a file holds already, and list its place."""
        held = io.BytesIO()
        torch.save(tensor, held)
        self.add_bytes(MetadataIndex(name, offset), held.getvalue(), metadata, rank=rank)

    def add_bytes(self, index: MetadataIndex, data: bytes, metadata: Metadata, *, rank: int = 0) -> None:
        file = self.path / FILES[rank]
        start = file.stat().st_size if file.exists() else 0
        with file.open("ab") as stream:
            stream.write(data)
        metadata.storage_data[index] = StorageInfo(FILES[rank], start, len(data))

    def replace(self, name: str, tensor: Tensor, offset: tuple[int, ...] = (), *, honest: bool = True) -> None:
        """Other bytes for a chunk; `honest`: its checksum is that of the new bytes."""
        with self.editing() as metadata:
            self.add(name, tensor, offset, metadata)
        if honest and name != CHECKSUMS:
            table = self.tensor(CHECKSUMS, (0, 0))
            index = MetadataIndex(name, offset)
            row = [row[:8] for row in table.tolist()].index(list(chunk_key(index)))
            table[row, 8:] = torch.tensor(list(digest_of(tensor)), dtype=torch.uint8)
            self.replace(CHECKSUMS, table, (0, 0))

    def tensor(self, name: str, offset: tuple[int, ...] = ()) -> Tensor:
        """A stored chunk."""
        return torch.load(io.BytesIO(self.raw(MetadataIndex(name, offset))), weights_only=True)

    def raw(self, index: MetadataIndex) -> bytes:
        """The bytes of a chunk's archive."""
        info = self.metadata.storage_data[index]
        return (self.path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]

    def flip(self, name: str, offset: tuple[int, ...], byte: int, bit: int) -> None:
        """Change one bit of a chunk's elements in the file."""
        info = self.metadata.storage_data[MetadataIndex(name, offset)]
        file = self.path / info.relative_path
        data = bytearray(file.read_bytes())
        archive = zipfile.ZipFile(io.BytesIO(bytes(data[info.offset : info.offset + info.length])))
        record = next(record for record in archive.infolist() if record.filename.endswith("/data/0"))
        header = info.offset + record.header_offset
        lengths = (
            int.from_bytes(data[header + 26 : header + 28], "little"),
            int.from_bytes(data[header + 28 : header + 30], "little"),
        )
        data[header + 30 + sum(lengths) + byte] ^= 1 << bit
        file.write_bytes(bytes(data))


def tensors() -> dict[str, Tensor]:
    """Name -> part or dense tensor of what the checkpoint holds."""
    held = {"bias": values((8,), 1), "count": torch.tensor(3.0)}
    for number, (name, recipe) in enumerate(RECIPES.items()):
        parts = quantize(values(SHAPE, number), recipe).parts()
        held |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return held


def manifest() -> Manifest:
    return Manifest({name: Entry(name, recipe, SHAPE, torch.bfloat16) for name, recipe in RECIPES.items()})


def write(path: Path) -> Checkpoint:
    """The checkpoint: rows cut between two files, a byte entry, both copies of the manifest, the checksums."""
    path.mkdir()
    checkpoint = Checkpoint(path)
    metadata = Metadata({}, {}, {}, StorageMeta(path, "saved"), "1.0.0")
    rows = []
    for name, tensor in {**tensors(), MANIFEST: manifest().to_tensor()}.items():
        whole = not tensor.ndim or name == MANIFEST or tensor.shape[0] != SHAPE[0]
        pieces = [tensor] if whole else list(tensor.split([CUT, SHAPE[0] - CUT]))
        metadata.state_dict_metadata[name] = entry(tensor, [])
        for rank, piece in enumerate(pieces):
            offset = (rank * CUT, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
            metadata.state_dict_metadata[name].chunks.append(ChunkStorageMetadata(torch.Size(offset), piece.shape))
            checkpoint.add(name, piece.clone(), offset, metadata, rank=rank)
            rows.append(chunk_key(MetadataIndex(name, offset)) + digest_of(piece))
    step = io.BytesIO()
    torch.save(7, step)
    metadata.state_dict_metadata["step"] = BytesStorageMetadata()
    checkpoint.add_bytes(MetadataIndex("step"), step.getvalue(), metadata)
    rows.append(chunk_key(MetadataIndex("step")) + digest_of(step))
    table = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
    metadata.state_dict_metadata[CHECKSUMS] = entry(table, [ChunkStorageMetadata(torch.Size([0, 0]), table.shape)])
    checkpoint.add(CHECKSUMS, table, (0, 0), metadata)
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    metadata.planner_data[MANIFEST_JSON] = manifest().to_json()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return checkpoint


def entry(tensor: Tensor, chunks: list[Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)


def copied(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    shutil.copytree(checkpoint.path, path)
    return Checkpoint(path)
