"""The metadata of a save, and what happens at the moment when they are written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata


@dataclass(eq=False)
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

    before: Callable[[set[str]], None] = field(kw_only=True)

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
