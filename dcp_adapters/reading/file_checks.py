"""A look at a file of a checkpoint before DCP's reader opens it, and at the archives in it before anything is loaded.

A planner is never told in which directory a reader reads; `torch_private.OwnPath` hears of it where it can, just
before the file is opened:

    no ordinary file    refused: to open a fifo would wait for whoever writes into it
    archives            of each tensor chunk to be read, what it says it holds: a plain tensor of the dtype and size in
                        `.metadata`; where it is something else, whether torch can load it at all
"""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_adapters.reading.metadata_checks import METADATA, named, stored_chunk
from dcp_adapters.reading.tensor_archive import FileSlice, read_header

WAY_OUT = "Nothing has been loaded; use another checkpoint"


def check_ordinary(path: Path) -> int | None:
    """The length of a file in bytes, None where there is none: reading it says so.

    Raises:
        ValueError: it is no ordinary file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: no ordinary file. {WAY_OUT}")
    return found.st_size


def check_archives(path: Path, chunks: Mapping[MetadataIndex, Any], metadata: Metadata) -> None:
    """Look into the archives of tensor chunks, given with their places in the file.

    Raises:
        ValueError: one can not be read, or holds something else than the metadata says.
    """
    with path.open("rb") as stream:
        for index, info in sorted(chunks.items(), key=lambda held: held[1].offset):
            entry = metadata.state_dict_metadata[index.fqn]
            if not isinstance(entry, TensorStorageMetadata) or getattr(info, "transform_descriptors", None):
                continue
            sizes = stored_chunk(entry, index).sizes
            held = _held(path, index, FileSlice(stream, info.offset, info.length))
            if held != (entry.properties.dtype, tuple(sizes)):
                raise ValueError(
                    f"{path}: {named(index)}: the file holds {held[0]} {held[1]}, {METADATA} says "
                    f"{entry.properties.dtype} {tuple(sizes)}. {WAY_OUT}"
                )


def unreadable(path: Path, index: MetadataIndex, error: BaseException, state: str) -> str:
    """What to say of a chunk that could not be read; `state`: what has become of the target, and what to do."""
    return f"{path}: {named(index)}: it can not be read: {type(error).__name__}: {error}. {state}"


def _held(path: Path, index: MetadataIndex, chunk: FileSlice) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of what an archive holds."""
    try:
        header = read_header(chunk, "its archive")
    except ValueError:  # a tensor of another class, perhaps, whose archive only torch understands
        chunk.seek(0)
        try:
            value = torch.load(cast("IO[bytes]", chunk), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(unreadable(path, index, error, WAY_OUT)) from error
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{path}: {named(index)}: the file holds a {type(value).__name__}, expected a tensor. {WAY_OUT}"
            ) from None
        return value.dtype, tuple(value.shape)
    return header.dtype, header.shape
