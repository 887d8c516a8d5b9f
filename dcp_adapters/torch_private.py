"""What this package takes from torch that torch does not promise, in one place.

The rules are those of `fsdp_hooks/torch_private.py`, which imports no DCP. Here are private names, and behaviour
learned by reading DCP's planners, readers and writers, each with the reason for its use. `tests/test_torch_private.py`
fails when one of them changes. No other module may rely on them.

DCP does not let planners choose the order in which a load reads, or the moment at which a checkpoint becomes valid.
This is relied on instead:

    FileSystemReader   groups read items in a dict, by the path that the storage data names for them, and reads the
                       groups in the order of their first items; hands the planner each read item as it got it; joins
                       its directory, a Path, with the path just before it opens the file
    FileSystemWriter   pickles the metadata in the last step before the final rename
"""

import dataclasses
import datetime as dt
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.distributed_c10d import ProcessGroupGloo

if sys.platform == "win32":
    from pathlib import WindowsPath as NativePath
else:
    from pathlib import PosixPath as NativePath

__all__ = [
    "DELTA",
    "Alias",
    "Committed",
    "OwnPath",
    "ProcessGroupGloo",
    "StorageInfo",
    "Unreadable",
    "all_reduce_max",
    "any_marked",
    "flatten_state_dict",
    "gloo_group",
    "is_marked",
    "marked",
    "prefix_of",
    "set_element",
    "unmarked",
    "writes_safetensors",
]

# The save and load planners must flatten exactly as stock DCP does (a public DefaultSavePlanner only flattens as a side
# effect of set_up_planner), and must know which rows of a part a rank holds before any tensor is touched.
assert callable(flatten_state_dict)
# It also puts byte entries back into the nested dict, which we unpickle more strictly than stock does.
assert callable(set_element)

# Where the bytes of a chunk lie: the only record of `.metadata` without a public name. Code that reads the file without
# unpickling it has to make such records.
assert callable(StorageInfo)


# How chunks are marked that are stored as what changed since a base: as transformed by an extension. DCP's readers look
# extensions up by name, and raise ValueError ("Unknown extension name='qtensor.delta'") at one that they do not know,
# whatever planner reads; so nobody takes what is stored for the chunk.
DELTA = "qtensor.delta/1"


class Unreadable(Metadata):
    """What a reader gives dcp.load in place of metadata that it could not read: it raises why when it is used.

    dcp.load catches what `read_metadata()` raises, asks once more for metadata of the rank alone, and fails with
    "metadata is None" where there is none either: torch 2.11 without a word of the reason, later ones in a text only.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(state_dict_metadata={})
        self.reason = reason

    @staticmethod
    def refuse(metadata: Metadata) -> None:
        """Raise the reason where `metadata` stands for what could not be read."""
        if isinstance(metadata, Unreadable):
            raise metadata.reason


class OwnPath(NativePath):
    """A relative path that a reader treats as a file of its own; `look` can check the file before it is opened.

    Each instance equals only itself, so each makes a group of items. In `directory / path` Python asks the operand of
    the more derived class first, which is this one: so `look` gets the full path just before the file is opened.
    Readers that build paths in another way (fsspec) see an ordinary path, and `look` is not called. Our own
    SafeFileSystemReader checks files itself; it opens those of byte entries in stock's way, which calls `look`.
    """

    look: Callable[[Path], None] | None = None

    @staticmethod
    def of(relative_path: str, look: Callable[[Path], None] | None = None) -> "OwnPath":
        """A path; `look` is called with the file's path in the reader's directory, whether the file exists or not."""
        path = OwnPath(relative_path)
        path.look = look
        return path

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __rtruediv__(self, directory: Any) -> Path:  # type: ignore[override] # what it gives needs no look
        path = Path(directory, os.fspath(self))
        if self.look is not None:
            self.look(path)
        return path


@dataclasses.dataclass(frozen=True)
class Alias(MetadataIndex):
    """Stands for another index in the storage data, so that a read item can have a path of its own there."""

    original: MetadataIndex | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(eq=False)
class Committed(Metadata):
    """Metadata that refuses to be written while a chunk of it has no place in the storage.

    A writer hands the metadata its results and pickles it in the last step before the rename. Stock FileSystemWriter
    loses the exception of a writing thread (thread_count >= 2) and with it the chunks of that thread: pickling is where
    that can still fail the save. What reaches the disk is a plain Metadata in which each name is written once: the keys
    of different ranks are different strings, and every rank that loads would read and keep them all.

    Stock's writer of torch 2.11 pickles a copy (by dataclasses.replace), so `before` is a field like the others.

    Attributes:
        before: called at this moment with the names of the files (`overwrite.commit`).
        coded: names of tensors whose chunks are stored as what changed since a base, and are marked so (`DELTA`).
    """

    before: Callable[[set[str]], None] = dataclasses.field(kw_only=True)
    coded: frozenset[str] = dataclasses.field(kw_only=True, default=frozenset())

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(vars(self))
        del state["before"], state["coded"]
        if isinstance(self.storage_data, dict):
            state["storage_data"] = placed = self._by_shared_keys(self.storage_data)
            self.before({str(getattr(info, "relative_path", "")) for info in placed.values()})
        return Metadata, (self.state_dict_metadata,), state

    def _by_shared_keys(self, stored: dict[Any, Any]) -> dict[Any, Any]:
        """`stored` under equal keys, made of `state_dict_metadata`'s names and offsets; raises if a chunk is lost."""
        placed = {}
        for name, entry in self.state_dict_metadata.items():
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
            for number, chunk in enumerate(chunks):
                index = MetadataIndex(name, index=None if chunk is None else number)
                if chunk is not None:
                    object.__setattr__(index, "offset", chunk.offsets)  # the constructor would copy it
                if index not in stored:
                    where = "" if chunk is None else f" at {tuple(chunk.offsets)}"
                    raise RuntimeError(
                        f"{name}{where}: the storage writer did not write it, although no error was reported; a "
                        "writing thread may have failed (disk full?). The checkpoint is incomplete and gets no "
                        ".metadata"
                    )
                placed[index] = marked(name, stored[index]) if name in self.coded else stored[index]
        return {**stored, **placed} if len(placed) < len(stored) else placed


def marked(name: str, info: Any) -> StorageInfo:
    """Where a chunk lies, marked as what changed since a base. Raises RuntimeError where a storage has no such mark."""
    if not isinstance(info, StorageInfo):
        raise RuntimeError(
            f"{name}: the storage writer keeps no record of how a chunk was transformed, so it cannot hold what "
            "changed since a base; save with FileSystemWriter, or without delta_to. The checkpoint gets no .metadata"
        )
    return dataclasses.replace(info, transform_descriptors=[*(info.transform_descriptors or ()), DELTA])


def is_marked(info: Any) -> bool:
    """Whether a chunk is stored as what changed since a base."""
    descriptors = getattr(info, "transform_descriptors", None) or [None]
    return bool(descriptors[-1] == DELTA)


def any_marked(infos: Iterable[Any]) -> bool:
    """Whether one of these chunks is."""
    return any(is_marked(info) for info in infos)


def unmarked(info: StorageInfo) -> StorageInfo:
    """The place of the bytes that stand for such a chunk."""
    return dataclasses.replace(info, transform_descriptors=list(info.transform_descriptors or ())[:-1] or None)


def prefix_of(storage_data: Any) -> str | None:
    """What the names of a rank's files begin with, if its writer says so in the storage data of the rank's plan.

    FileSystemWriter says it in a dataclass, and names its files after what stands there. Before the global plan is made
    it says so only where a rank saves for itself (use_collectives=False).
    """
    prefix = getattr(storage_data, "prefix", None)
    return prefix if isinstance(prefix, str) else None


def writes_safetensors(storage_data: Any) -> bool:
    """Whether a plan with this storage data goes to HuggingFaceStorageWriter, of which planners are not told."""
    return isinstance(storage_data, dict) and storage_data.keys() <= {"fqn_to_index_mapping", "shard_index"}


def gloo_group(group: dist.ProcessGroup, name: str, timeout: dt.timedelta) -> ProcessGroupGloo:
    """A gloo group of the same ranks, under a name that no other group has; only these ranks know it.

    `dist.new_group` is a collective of the default group, so it must not be called by some ranks only, and it numbers
    groups by how many a rank knows. This group needs only the store of `group`, in which its ranks meet. It has the
    given `timeout`, and is freed with its last reference.
    """
    store = dist.PrefixStore(name, group.get_group_store())
    return ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), timeout=timeout)


def all_reduce_max(group: ProcessGroupGloo, tensor: Tensor) -> None:
    """Elementwise maximum over a group that is not registered with torch.distributed, in place."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    unregistered: Any = group  # its methods have no types
    unregistered.allreduce([tensor], options).wait()
