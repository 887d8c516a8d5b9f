"""Where tensors come from: a live state dict, a checkpoint on disk, a Hugging Face directory.

    Source   entries, and their parts as whole tensors, one entry at a time
    Stored   a source on disk: its files, entries that are bytes, the place of each entry in a nested state dict

Names, recipes and shapes are known at once; nothing is read before it is asked for. No process group and no model are
needed, except that reading the shards of a live state dict is a collective.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dcp_adapters.entry import Entry
from fsdp_hooks.byte_sums import Piece


class Source:
    """Tensors by name.

    entries: one for each tensor, the same on all ranks and in the same order.
    """

    entries: Mapping[str, Entry]

    def parts(self, name: str) -> dict[str, Tensor]:
        """The whole parts of a tensor, on the CPU; do not write to them."""
        raise NotImplementedError

    def part(self, name: str, part: str) -> Tensor:
        """One part."""
        return self.parts(name)[part]

    def pieces(self, name: str, part: str) -> Iterator[Piece]:
        """One part in pieces that cover it once, as they are stored: one at a time is in memory."""
        yield Piece.whole(self.part(name, part))

    def read(self, name: str) -> Tensor:
        """A whole tensor: a QuantizedTensor where it is quantized."""
        return self.entries[name].tensor(self.parts(name))

    def scalar(self, name: str, part: str) -> float:
        """A part of one element, as this rank knows it; never a collective."""
        return float(self.part(name, part))

    # -- of live shards ------------------------------------------------------------------------------------------------

    def is_collective(self, name: str) -> bool:
        """Whether all ranks must take part in reading this tensor, in the same order, whichever rank keeps it."""
        return False

    def help_read(self, name: str) -> None:
        """This rank's share of a collective `parts` whose result other ranks keep."""

    def replicas(self, name: str) -> list[Tensor]:
        """This rank's own copies of the parts of a tensor that is not sharded; all ranks should have the same."""
        return []


class Stored(Source):
    """A source on disk.

    Attributes:
        path: the directory.
        layout: how a Hugging Face directory is quantized, "" where it is not; None for a checkpoint.
        format_version: the manifest's; None without a manifest.
        blobs: names of the entries that are bytes.
        has_checksums: whether a table of checksums was saved with it.
        paths: key -> path in the nested state dict; empty where it is flat.
    """

    path: Path
    layout: str | None = None
    format_version: int | None = None
    blobs: list[str]
    has_checksums = False
    paths: Mapping[str, tuple[Any, ...]]

    @property
    def names(self) -> list[str]:
        """The names of all tensors and entries of bytes, in the order in which they were saved."""
        return [*self.entries, *self.blobs]

    def chunks(self, name: str) -> int:
        """The number of pieces in which a tensor (its payload) was written."""
        raise NotImplementedError

    def file_bytes(self) -> dict[str, int]:
        """Stored bytes of the entries in each data file, as far as the storage tells."""
        raise NotImplementedError

    def blob_size(self, name: str) -> int:
        """Stored bytes of an entry of bytes."""
        raise KeyError(name)

    def read_blob(self, name: str) -> bytes:
        """An entry of bytes, as it is stored; it is never unpickled."""
        raise KeyError(name)
