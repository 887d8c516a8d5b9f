"""Check the places where metadata says that chunks are stored: can the files there hold them, and do they?

    file_faults      all files, for a reader that looks at its directory itself
    check_ordinary   one file, before DCP's reader opens it: opening a fifo would wait for a writer
    check_archives   the archive of each tensor chunk to be read from it, before anything is loaded: it must hold a
                     tensor of the dtype and size in `.metadata`; what is no plain tensor must load in torch

Planners do not know a reader's directory: torch_private.OwnPath gives the last two the paths of the files.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_adapters.stored.reading.metadata_checks import METADATA, Fault, chunk_in_words, stored_chunks
from dcp_adapters.stored.reading.tensor_archive import FileSlice, Headers

WAY_OUT = "Nothing has been loaded; use another checkpoint"
THIS_RANK = "This rank has loaded nothing, others may have; use another checkpoint"


def shared_places(places: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield chunks that are stored in bytes of another: (number of its place, that of the other, the first byte)."""
    spans = sorted(
        [(info.relative_path, info.offset, info.offset + info.length, number) for number, info in enumerate(places)]
    )
    # Sorted by start, it is enough to know who reached farthest so far.
    file, reached, before = None, 0, -1
    for path, start, end, number in spans:
        if path != file:
            file, reached, before = path, 0, -1
        if before >= 0 and start < reached and start < end:
            yield number, before, start
        if end > reached:
            reached, before = end, number


def file_faults(directory: str | os.PathLike[str], storage: Mapping[MetadataIndex, Any]) -> list[Fault]:
    """Find faults of the files that sound metadata names: outside of the directory, not ordinary, too short, shared.

    A missing file is no fault here; reading it raises an error.
    """
    ends: dict[str, tuple[int, MetadataIndex]] = {}
    for index, info in storage.items():
        end = info.offset + info.length
        if end > ends.get(info.relative_path, (-1, None))[0]:
            ends[info.relative_path] = (end, index)
    faults = []
    for name, (end, index) in sorted(ends.items()):
        found = look_at(directory, name)
        if isinstance(found, Fault):
            faults.append(found)
        elif found is not None and found < end:
            faults.append(cut_off_fault(name, index, end, found))
    indices = list(storage)
    return faults + [
        Fault(storage[indices[one]].relative_path, chunk_in_words(indices[one]), sharing_message(start, indices[other]))
        for one, other, start in shared_places(list(storage.values()))
    ]


def sharing_message(start: int, other: MetadataIndex) -> str:
    """Say what is wrong with a chunk that is stored in bytes of another."""
    return f"it shares bytes from {start} on with {chunk_in_words(other)}"


def look_at(directory: str | os.PathLike[str], name: str) -> int | Fault | None:
    """Return the length of a file of the checkpoint, or what is wrong with it; None if there is none."""
    root, path = Path(directory).resolve(), Path(directory, name)
    try:
        # A name without ".." may still be a link that leads out.
        if not path.resolve().is_relative_to(root):
            return Fault(name, "", f"it is a link to {path.resolve()}, outside of the checkpoint")
        found = path.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return Fault(name, "", f"it can not be looked at: {error}")
    return found.st_size if stat.S_ISREG(found.st_mode) else Fault(name, "", "it is no ordinary file")


def cut_off_fault(file: str, index: MetadataIndex, end: int, size: int) -> Fault:
    """Make the fault of a chunk that ends beyond the end of its file."""
    return Fault(file, chunk_in_words(index), f"the file has {size} bytes, and this chunk ends at {end}: it is cut off")


def check_ordinary(path: Path) -> int | None:
    """Return the length of a file in bytes; None if it is missing, which reading it reports.

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
        ValueError: one cannot be read, or does not hold what the metadata says.
    """
    known, said = Headers(), stored_chunks(metadata, chunks)
    with path.open("rb", buffering=0) as stream:
        for index, info in sorted(chunks.items(), key=lambda held: held[1].offset):
            if index not in said or getattr(info, "transform_descriptors", None):
                continue
            held = _dtype_and_shape(path, index, stream, info, known)
            dtype, chunk = said[index]
            message = contradiction(held, dtype, chunk.sizes)
            if message is not None:
                raise ValueError(f"{path}: {chunk_in_words(index)}: {message}. {THIS_RANK}")


def contradiction(held: tuple[torch.dtype, tuple[int, ...]], dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """Say what is wrong with the dtype and shape that a file holds of a chunk; None if metadata says the same."""
    said = dtype, tuple(shape)
    return None if held == said else f"the file holds {held[0]} {held[1]}, {METADATA} says {said[0]} {said[1]}"


def unreadable_message(path: Path, index: MetadataIndex, error: BaseException, state: str) -> str:
    """Word the error of a chunk that could not be read; `state`: what has become of the target, and what to do."""
    return f"{path}: {chunk_in_words(index)}: it can not be read: {type(error).__name__}: {error}. {state}"


def _dtype_and_shape(
    path: Path, index: MetadataIndex, stream: IO[bytes], info: Any, known: Headers
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Find dtype and shape of what an archive holds."""
    try:
        header = known.read(stream, info.offset, info.length, "its archive")
    # A tensor of another library's class, perhaps. Its archive is built here to be judged, by the unpickler that DCP's
    # reader uses, and dropped: an archive that only fails later would leave the target half loaded.
    except ValueError:
        chunk = FileSlice(stream, info.offset, info.length)
        try:
            value = torch.load(cast("IO[bytes]", chunk), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(unreadable_message(path, index, error, THIS_RANK)) from error
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{path}: {chunk_in_words(index)}: the file holds a {type(value).__name__}, expected a tensor. "
                f"{THIS_RANK}"
            ) from None
        return value.dtype, tuple(value.shape)
    return header.dtype, header.shape
