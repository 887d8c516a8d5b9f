"""Where metadata says that chunks are stored, and whether the files there can hold them."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_adapters.reading.metadata_checks import Fault, named


def shared_places(storage: Mapping[MetadataIndex, Any]) -> Iterator[tuple[MetadataIndex, MetadataIndex, int]]:
    """Chunks that are stored in bytes of another one: (the chunk, the other, the first byte they share)."""
    places = sorted(
        ((info.relative_path, info.offset, info.offset + info.length, index) for index, info in storage.items()),
        key=lambda place: place[:3],
    )
    file, reached, before = None, 0, None
    for path, start, end, index in places:
        if path != file:
            file, reached, before = path, 0, None
        if before is not None and start < reached and start < end:
            yield index, before, start
        if end > reached:
            reached, before = end, index


def file_faults(directory: str | os.PathLike[str], storage: Mapping[MetadataIndex, Any]) -> list[Fault]:
    """Faults of the files that sound metadata names: outside of the directory, no ordinary file, too short, shared.

    A file that is missing is no fault here: reading it says so.
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
            faults.append(cut_off(name, index, end, found))
    return faults + [
        Fault(storage[index].relative_path, named(index), shares_bytes(start, other))
        for index, other, start in shared_places(storage)
    ]


def shares_bytes(start: int, other: MetadataIndex) -> str:
    """What is wrong with a chunk that is stored in bytes of another."""
    return f"it shares bytes from {start} on with {named(other)}"


def look_at(directory: str | os.PathLike[str], name: str) -> int | Fault | None:
    """Length of a file of the checkpoint, or what is wrong with it; None where there is none."""
    root, path = Path(directory).resolve(), Path(directory, name)
    try:
        if not path.resolve().is_relative_to(root):
            return Fault(name, "", f"it is a link to {path.resolve()}, outside of the checkpoint")
        found = path.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return Fault(name, "", f"it can not be looked at: {error}")
    return found.st_size if stat.S_ISREG(found.st_mode) else Fault(name, "", "it is no ordinary file")


def cut_off(file: str, index: MetadataIndex, end: int, size: int) -> Fault:
    """The fault of a chunk that ends behind the end of its file."""
    return Fault(file, named(index), f"the file has {size} bytes, and this chunk ends at {end}: it is cut off")
