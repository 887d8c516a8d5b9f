"""The names that a checkpoint's `.metadata` may hold, and what each of them stands for when the file is read.

These are DCP's records, torch's dtypes, and the four kinds of calls that pickling them takes. Nothing else can be
reached from the file. A name selects something in this module; the module that it names is not imported.
"""

from collections.abc import Callable
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_adapters.torch_private import StorageInfo

MOST_DIMS = 64  # torch's own kernels take no more
MOST_PATH_PARTS = 1024
LARGEST = 2**63 - 1

# class -> the fields that every torch from 2.11 on writes, in the order of TensorProperties' state. Later torch appends
# fields; a file may hold more than these, or than the running torch knows.
FIELDS: dict[type, tuple[str, ...]] = {
    Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    BytesStorageMetadata: (),
    ChunkStorageMetadata: ("offsets", "sizes"),
    TensorProperties: ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    MetadataIndex: ("fqn", "offset", "index"),
    StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
    StorageMeta: ("checkpoint_id", "save_id", "load_id", "modules"),
}
DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # indexed by DCP's codes


class Function:
    """A function that REDUCE may call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


def _size(values: Any) -> torch.Size:
    if type(values) not in (tuple, list) or len(values) > MOST_DIMS or any(type(value) is not int for value in values):
        raise ValueError(f"a size that is no sequence of at most {MOST_DIMS} integers")
    if any(not -LARGEST <= value <= LARGEST for value in values):
        raise ValueError("a size or offset that is not below 2**63")
    return torch.Size(values)


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in LAYOUTS:
        raise ValueError("a layout that torch does not have")
    return LAYOUTS[name]


def _memory_format(code: Any) -> torch.memory_format:
    if type(code) is not int or not 0 <= code < len(MEMORY_FORMATS):
        raise ValueError("a memory format that DCP does not have")
    return MEMORY_FORMATS[code]


def _path_of(flavour: type[PurePath]) -> Function:
    """Make paths as values: PosixPath and WindowsPath exist on one system only, and nothing here touches a file."""

    def path(*parts: Any) -> PurePath:
        if len(parts) > MOST_PATH_PARTS or any(type(part) is not str for part in parts):
            raise ValueError(f"a path that is not made of at most {MOST_PATH_PARTS} strings")
        return flavour(*parts)

    return Function(path)


POSIX, WINDOWS = PATHS = _path_of(PurePosixPath), _path_of(PureWindowsPath)
NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): Function(_size),
    ("torch.serialization", "_get_layout"): Function(_layout),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): Function(_memory_format),
    **{
        (module, f"{pure}{kind}Path"): function
        for module in ("pathlib", "pathlib._local")  # where Python 3.13 keeps them
        for pure in ("Pure", "")
        for kind, function in (("Posix", POSIX), ("Windows", WINDOWS))
    },
    **{(kind.__module__, kind.__qualname__): kind for kind in FIELDS},
    **DTYPES,
}
