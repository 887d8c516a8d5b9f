"""What checkpoints take from torch that torch does not promise, in one place.

The rules are those of `fsdp_hooks/torch_private.py`, which imports no DCP: private names, and what was learned by
reading DCP's planners, readers and writers, each with its reason. `tests/test_torch_private.py` fails when one of them
changes. Nothing else may rely on either.

DCP gives planners no say in the order in which a load reads, nor in the moment at which a checkpoint counts. What is
relied on instead:

    FileSystemReader   groups read items by the path that the storage data names for them, as keys of a dict, and reads
                       group after group in the order in which they came up; hands the planner each read item as it got
                       it; joins its directory, a Path, with the path just before it opens the file
    FileSystemWriter   pickles the metadata as the last step of a save but one, the rename
"""

import dataclasses
import datetime as dt
import os
import sys
from collections.abc import Callable
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
    "Alias",
    "Committed",
    "OwnPath",
    "ProcessGroupGloo",
    "StorageInfo",
    "all_reduce_max",
    "flatten_state_dict",
    "gloo_group",
    "prefix_of",
    "set_element",
    "writes_safetensors",
]

# The save and load planners must flatten exactly as stock DCP does (a public DefaultSavePlanner only flattens as a side
# effect of set_up_planner), and must know which rows of a part a rank holds before any tensor is touched.
assert callable(flatten_state_dict)
# It also puts byte entries back into the nested dict, which we unpickle more strictly than stock does.
assert callable(set_element)

# Where the bytes of a chunk stand: the one record of `.metadata` without a public name. Who reads that file without
# unpickling it has to make such records.
assert callable(StorageInfo)


class OwnPath(NativePath):
    """A relative path that a reader takes for a file of its own, and whose file may be looked at before it is opened.

    It is its own key in a dict, so each makes a group of items. A path of a class below that of the directory is asked
    for what the two give when they are joined, as Python asks the more special of two operands: so `look` hears of the
    directory just before the file is opened. Readers that build paths in another way (fsspec, our own
    SafeFileSystemReader, which looks itself) see a path like any other, and `look` is not called.
    """

    look: Callable[[Path], None] | None = None

    @staticmethod
    def of(relative_path: str, look: Callable[[Path], None] | None = None) -> "OwnPath":
        """A path; `look` is called with that of the file in the reader's directory, whether it is there or not."""
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
    """Stands for another index in the storage data, so that its read item has a path of its own there."""

    original: MetadataIndex | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(eq=False)
class Committed(Metadata):
    """Metadata that refuses to be written while a chunk of it has no place in the storage.

    A writer hands the metadata its results and pickles it as the very last step of a save. Stock FileSystemWriter
    loses the exception of a writing thread (thread_count >= 2) and with it the chunks of that thread: pickling is where
    that can still fail the save. What reaches the disk is a plain Metadata, in which each name is written once: keys
    that came from as many ranks are as many strings, and every rank that loads would read and keep them all.

    Stock's writer of torch 2.11 pickles a copy (by dataclasses.replace), so `before` is a field like the others.

    Attributes:
        before: what else is to be done at this moment, given the names of the files (`overwrite.commit`).
    """

    before: Callable[[set[str]], None] = dataclasses.field(kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(vars(self))
        del state["before"]
        if isinstance(self.storage_data, dict):
            state["storage_data"] = placed = self._by_shared_keys(self.storage_data)
            self.before({str(getattr(info, "relative_path", "")) for info in placed.values()})
        return Metadata, (self.state_dict_metadata,), state

    def _by_shared_keys(self, stored: dict[Any, Any]) -> dict[Any, Any]:
        """`stored`, its keys equal but made of the names and offsets of `state_dict_metadata`; raises what is lost."""
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
                placed[index] = stored[index]
        return {**stored, **placed} if len(placed) < len(stored) else placed


def prefix_of(storage_data: Any) -> str | None:
    """What the names of a rank's files begin with, where its writer says so in the storage data of the rank's plan.

    FileSystemWriter does, in a dataclass; with another prefix in it, it writes files of other names. It does so before
    the global plan is made only where a rank saves for itself (use_collectives=False).
    """
    prefix = getattr(storage_data, "prefix", None)
    return prefix if isinstance(prefix, str) else None


def writes_safetensors(storage_data: Any) -> bool:
    """Whether a plan with this storage data goes to HuggingFaceStorageWriter, of which planners are not told."""
    return isinstance(storage_data, dict) and storage_data.keys() <= {"fqn_to_index_mapping", "shard_index"}


def gloo_group(group: dist.ProcessGroup, name: str, timeout: dt.timedelta) -> ProcessGroupGloo:
    """A gloo group of the same ranks, under a name that no other one has; known to these ranks alone.

    `dist.new_group` is a collective of the default group, which must not be called where only some ranks come by, and
    it numbers groups by how many a rank knows. This one only meets the others in the store of `group`. It has the
    `timeout` it is given, and goes with its last reference.
    """
    store = dist.PrefixStore(name, group.get_group_store())
    return ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), timeout=timeout)


def all_reduce_max(group: ProcessGroupGloo, tensor: Tensor) -> None:
    """Elementwise maximum over a group that is not registered with torch.distributed, in place."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    unregistered: Any = group  # its methods have no types
    unregistered.allreduce([tensor], options).wait()
