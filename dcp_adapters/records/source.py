"""Sources of tensors: a live state dict, a checkpoint on disk, a Hugging Face directory.

    Source        entries, and their parts as whole tensors, one entry at a time
    TensorGroup   some entries of a source on their way to the ranks that keep them
    Stored        a source on disk: its files, entries that are bytes, the place of each entry in a nested state dict

Names, recipes and shapes are known at once; nothing is read before it is asked for. No process group and no model are
needed, except that reading the shards of a live state dict is a collective.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.records.entry import Entry
from fsdp_hooks.kernels.byte_sums import TensorPiece
from fsdp_hooks.ranks.across_ranks import Ranks, rank_of


@dataclass(frozen=True)
class Keep:
    """Who keeps what is read, and where.

    rank: the global number of the one that keeps it; None: all. device: where it is brought; None: it stays where it
    was gathered. own: whether it must be in memory of its own, since the source may be written meanwhile.
    """

    rank: int | None
    device: torch.device | None
    own: bool = False

    @property
    def is_here(self) -> bool:
        """Tell whether this rank keeps it."""
        return self.rank is None or self.rank == rank_of(None)


class TensorGroup:
    """The tensors that `Source.begin` has begun to read."""

    def parts(self, name: str) -> dict[str, Tensor] | None:
        """Return a tensor's whole parts on ranks that keep it, None elsewhere; all ranks ask alike, once for each."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for what was begun, and drop it."""


class Source:
    """Tensors by name.

    entries: one for each tensor, the same on all ranks and in the same order. prefix: what was cut off its names.
    """

    entries: Mapping[str, Entry]
    prefix: str = ""

    def check_spanned(self, group: Ranks) -> None:
        """Raise ValueError if ranks outside of the group hold shards: reading takes all of them."""

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the whole parts of a tensor, on the CPU; do not write to them."""
        raise NotImplementedError

    def part(self, name: str, part: str) -> Tensor:
        """Return one part."""
        return self.parts(name)[part]

    def pieces(self, name: str, part: str) -> Iterator[TensorPiece]:
        """Yield one part in pieces that cover it once, as they are stored: one at a time is in memory."""
        yield TensorPiece.whole(self.part(name, part))

    def read(self, name: str) -> Tensor:
        """Return a whole tensor: a QuantizedTensor if it is quantized."""
        return self.entries[name].tensor(self.parts(name))

    def scalar(self, name: str, part: str) -> float:
        """Return a part of one element, as this rank knows it; never a collective."""
        return float(self.part(name, part))

    def local(self, name: str) -> Tensor:
        """Return what this rank has of a dense tensor: its shard, or all of it; never a collective."""
        return self.part(name, "")

    def own_name(self, name: str) -> str:
        """Return what the tensor is called where it comes from, if a source gives it another name."""
        return name

    # -- of live shards ------------------------------------------------------------------------------------------------

    def begin(self, names: Sequence[str], keep: Keep) -> TensorGroup:
        """Begin to read these tensors. For shards this is a collective: all ranks call it alike."""
        return _Read(self, keep)

    def way(self, name: str) -> str:
        """Say how it is read: "" by each rank for itself; else by all ranks, whichever keeps it."""
        return ""

    def replicas(self, name: str) -> list[Tensor]:
        """Return this rank's copies of the parts of a tensor that is not sharded; all ranks should have the same."""
        return []

    def shared(self, name: str) -> tuple[str, Tensor] | None:
        """Return scales of this rank's shard that other shards have, too, and a name for them; None if none."""
        return None


class _Read(TensorGroup):
    """Tensors that are read when they are asked for, by the ranks that keep them alone."""

    def __init__(self, source: Source, keep: Keep) -> None:
        self._source, self._keep = source, keep

    def parts(self, name: str) -> dict[str, Tensor] | None:
        if not self._keep.is_here:
            return None
        return {
            part: tensor.to(self._keep.device or tensor.device) for part, tensor in self._source.parts(name).items()
        }


class Stored(Source):
    """A source on disk.

    Attributes:
        path: the directory.
        layout: how a Hugging Face directory is quantized, "" if it is not; None for a checkpoint.
        format_version: the manifest's; None without a manifest.
        blobs: names of the entries that are bytes.
        has_checksums: whether a table of checksums was saved with it.
        paths: key -> path in the nested state dict; empty if it is flat.
        digests: of tensors, by name, as they were recorded when it was saved.
        converted: the tensors that `convert` has rewritten and not the masters beside them.
        base: path from the directory to that of the checkpoint that this one is a delta to; None: it is a full one.
    """

    path: Path
    layout: str | None = None
    format_version: int | None = None
    blobs: list[str]
    has_checksums = False
    digests: Mapping[str, str] = MappingProxyType({})
    converted: frozenset[str] = frozenset()
    base: str | None = None
    paths: Mapping[str, tuple[Any, ...]]

    @property
    def names(self) -> list[str]:
        """List the names of all tensors and entries of bytes, in the order in which they were saved."""
        return [*self.entries, *self.blobs]

    def chunks(self, name: str) -> int:
        """Return the number of pieces in which a tensor (its payload) was written."""
        raise NotImplementedError

    def file_bytes(self) -> dict[str, int]:
        """Return the stored bytes of the entries in each data file, as far as the storage tells."""
        raise NotImplementedError

    def blob_size(self, name: str) -> int:
        """Return how many bytes of an entry of bytes are stored."""
        raise KeyError(name)

    def read_blob(self, name: str) -> bytes:
        """Read an entry of bytes, as it is stored; it is never unpickled."""
        raise KeyError(name)
