"""Rebuild chunks that are stored as what changed since a base, and hand them on to the read items that want them.

    plan          all items of such a chunk are replaced by one, which reads what is stored for the chunk
    load_bytes    the whole chunk is rebuilt from that and the base, and compared with its checksum; only then each
                  item gets its piece, as if the reader had read it

So whatever stands above (resharding, casts, conversions, checks) sees the items that it planned. One chunk is in memory
at a time.
"""

import io
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST, BaseLink
from dcp_adapters.stored.reading.base import Base
from dcp_adapters.stored.reading.order import REBUILT, has_files
from dcp_adapters.torch_private import Alias, is_marked, unmarked

LOG = logging.getLogger(__name__)
WRITTEN = "Some tensors of the target may be loaded already"


class Rebuilding:
    """Rebuilds the marked chunks for one reader of a checkpoint; does nothing for a full one.

    Args:
        link: to the base; None for a full checkpoint.
        metadata: of the checkpoint; places with aliases are added to its storage data.
    """

    def __init__(self, link: BaseLink | None, metadata: Metadata) -> None:
        self.link, self.metadata = link, metadata
        self.base: Base | None = None
        self._numbers = itertools.count()
        self._waiting: dict[MetadataIndex, tuple[MetadataIndex, list[ReadItem]]] = {}  # by destination

    def replace_items(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Return the items to read in place of these, in their order.

        Raises:
            ValueError: a chunk is marked that may not be.
        """
        stored = self.metadata.storage_data
        if not has_files(stored):
            return list(items)
        out: list[ReadItem] = []
        chunks: dict[MetadataIndex, list[ReadItem]] = {}
        for item in items:
            index = item.storage_index
            if item.type is LoadItemType.BYTE_IO or not is_marked(stored.get(index)):
                out.append(item)
                continue
            # A full checkpoint has no base. The manifest and the checksums are what rebuilding needs: they come first.
            if self.link is None or index.fqn in (MANIFEST, CHECKSUMS):
                raise ValueError(
                    f"{index.fqn} is stored as what changed since a base, which the manifest does not name; the "
                    "checkpoint is damaged, use another one"
                )
            if index not in chunks:
                chunks[index] = []
                out.append(self._item(index, chunks[index]))
            chunks[index].append(item)
        return out

    def _item(self, index: MetadataIndex, items: list[ReadItem]) -> ReadItem:
        # A byte item: readers hand its bytes to the planner as they are, and unpickle nothing. Several items may want
        # pieces of one chunk, which is rebuilt once.
        stored, zero = self.metadata.storage_data, torch.Size([0])
        number = torch.Size([next(self._numbers)])
        alias, into = Alias(REBUILT, number, original=index), MetadataIndex(REBUILT, number)
        stored[alias] = unmarked(stored[index])
        self._waiting[into] = index, items
        return ReadItem(LoadItemType.BYTE_IO, into, zero, alias, zero, zero)

    @property
    def is_needed(self) -> bool:
        """Tell whether a chunk has to be rebuilt and the base has not been opened."""
        return bool(self._waiting) and self.base is None

    def open(self, directory: Path) -> None:
        """Find the base of the checkpoint in `directory`, once, if a chunk has to be rebuilt. Raises as Base.of."""
        if self.is_needed:
            assert self.link is not None
            self.base = Base.of(self.link, directory)
            LOG.info("%s is a delta: its chunks are rebuilt from %s", directory, self.base.directory)

    @staticmethod
    def is_for(item: ReadItem) -> bool:
        """Tell whether an item is an own one, which `replace_items` put in the place of others."""
        return item.dest_index.fqn == REBUILT

    def pieces(self, item: ReadItem, value: io.BytesIO, checksum: bytes | None) -> Iterator[tuple[ReadItem, Tensor]]:
        """Yield the items that an own item replaces, each with its piece of the chunk. Raises as Base.rebuild."""
        index, items = self._waiting.pop(item.dest_index)
        # A reader may keep its storage data for the next load, and that load would count these among the chunks.
        self.metadata.storage_data.pop(Alias(REBUILT, item.dest_index.offset), None)
        assert self.base is not None
        try:
            chunk = self.base.rebuild(index, self.metadata, value.getvalue(), checksum)
        except (ValueError, OSError) as error:
            if WRITTEN in str(error):  # of the reader of the base
                raise
            kind = OSError if isinstance(error, OSError) else ValueError
            raise kind(f"{error}. {WRITTEN}") from error
        for each in items:
            piece = chunk
            for dim, (start, length) in enumerate(zip(each.storage_offsets, each.lengths, strict=True)):
                piece = piece.narrow(dim, start, length)
            yield each, piece

    def chunk_of(self, item: ReadItem) -> MetadataIndex:
        """Return the chunk that an own item is for."""
        return self._waiting[item.dest_index][0]
