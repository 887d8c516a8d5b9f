"""Find the full checkpoint that a delta was made against, check it, and read it piece by piece.

A delta names the directory of its base relative to its own, so that both can be moved together, and the digest of the
base's `.metadata`. Each save draws an id that stands there: so another save under the same name is noticed before
anything is read. The base's data are not read for that; what is made of them is compared with the delta's checksums.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_adapters.delta.coding.chunk import decode_chunk
from dcp_adapters.delta.coding.zstd import require_zstd
from dcp_adapters.records.checksums import digest_of
from dcp_adapters.records.manifest import BaseLink, base_of
from dcp_adapters.stored.reading.metadata_checks import METADATA, chunk_in_words, stored_chunk
from dcp_adapters.stored.reading.reader import SafeFileSystemReader

WAY_OUT = "use another checkpoint"


@dataclass(frozen=True)
class Base:
    """An opened base.

    Attributes:
        delta: the directory of the checkpoint that is, or will be, a delta to it.
        link: what the delta says of the base.
        directory: of the base.
        metadata: of the base.
        reader: of the base; it may be used by several threads.
    """

    delta: Path
    link: BaseLink
    directory: Path
    metadata: Metadata
    reader: SafeFileSystemReader

    @staticmethod
    def to_save(path: str | os.PathLike[str], checkpoint_id: str | os.PathLike[str] | None) -> "Base":
        """Open the base of a checkpoint that is about to be saved.

        Raises:
            ValueError: one of the two is no local directory; they are the same; the base is a delta itself, or cannot
                be read.
            FileNotFoundError: there is no checkpoint at `path`.
            ImportError: there is no zstd.
        """
        for name, given in (("delta_to", path), ("the directory to save into", checkpoint_id)):
            if given is None or "://" in os.fspath(given):
                raise ValueError(
                    f"{name} is {given}, expected a local directory: a delta finds its base by the path from its own "
                    "directory; save in full"
                )
        assert checkpoint_id is not None
        delta, directory = Path(checkpoint_id).resolve(), Path(path).resolve()
        if delta == directory:
            raise ValueError(f"delta_to={directory} is the directory to save into; give a delta one of its own")
        try:
            digest = _digest(directory)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(
                f"delta_to={directory}: no {METADATA}, so this is no checkpoint or one whose saving never finished; "
                "give the directory of a full save"
            ) from error
        return Base._open(delta, BaseLink(Path(os.path.relpath(directory, delta)).as_posix(), digest), directory)

    @staticmethod
    def of(link: BaseLink, delta: Path) -> "Base":
        """Open the base of a checkpoint in the directory `delta`.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: another checkpoint is; it is a delta itself, or cannot be read.
            ImportError: there is no zstd.
        """
        directory = Path(os.path.normpath(delta.resolve() / link.path))
        _check(delta, link, directory, "nothing has been loaded. Put it back, or use another checkpoint")
        return Base._open(delta, link, directory)

    @staticmethod
    def _open(delta: Path, link: BaseLink, directory: Path) -> "Base":
        require_zstd()
        reader = SafeFileSystemReader(directory)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        # A chain of deltas would take a read of each of them for every chunk, and be lost with any of them.
        further = base_of(metadata)
        if further is not None:
            raise ValueError(
                f"{delta} cannot be a delta to {directory}, which is itself a delta to "
                f"{os.path.normpath(directory / further.path)}: give the full save"
            )
        return Base(delta, link, directory, metadata, reader)

    def check_unchanged(self) -> None:
        """Compare the base's `.metadata` with the one that was opened.

        Raises:
            FileNotFoundError, ValueError: it is gone, or another checkpoint is in its place.
        """
        _check(self.delta, self.link, self.directory, "the delta is not saved. Save again, or in full")

    def holds(self, key: str, dtype: torch.dtype, size: torch.Size) -> bool:
        """Tell whether the base has a tensor of this name, dtype and global shape."""
        record = self.metadata.state_dict_metadata.get(key)
        return isinstance(record, TensorStorageMetadata) and (record.properties.dtype, record.size) == (dtype, size)

    def read(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Read a box of a tensor, which the base may hold in other chunks, into a contiguous CPU tensor of its own.

        Raises:
            ValueError, OSError: the base is damaged, or a file of it is gone.
        """
        record = self.metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        box = torch.empty(chunk.sizes, dtype=record.properties.dtype, device="cpu")
        items = create_read_items_for_chunk_list(key, record, [chunk])
        # DCP makes items for what overlaps the box, and is silent about a gap, which would stay uninitialised memory.
        if sum(item.lengths.numel() for item in items) != box.numel():
            raise ValueError(f"{self.directory}: its chunks do not make up {key}; {WAY_OUT}")
        self.reader.read_data(LoadPlan(items), _BoxPlanner(box)).wait()
        return box

    def rebuild(self, index: MetadataIndex, delta: Metadata, data: bytes, expected: bytes | None) -> Tensor:
        """Rebuild a chunk of the delta from what is stored for it and the base.

        Args:
            index: of the chunk.
            delta: metadata of the delta.
            data: what is stored for the chunk.
            expected: the checksum that was saved of the chunk; None if there is none, which is refused.

        Returns:
            The chunk, a CPU tensor of its own.

        Raises:
            ValueError: the delta or the base is damaged.
        """
        record = delta.state_dict_metadata[index.fqn]
        assert isinstance(record, TensorStorageMetadata)
        dtype, chunk = record.properties.dtype, stored_chunk(record, index)
        where = f"{self.delta}, a delta to {self.directory}: {chunk_in_words(index)}"

        def old() -> Tensor:
            if not self.holds(index.fqn, dtype, record.size):
                raise ValueError(f"{where}: the base has no {dtype} {tuple(record.size)} of this name; {WAY_OUT}")
            return self.read(index.fqn, chunk)

        # Steps add up to something on any base: only the checksum tells a wrong one from the one that was meant.
        tensor = decode_chunk(data, dtype, tuple(chunk.sizes), old, where)
        found = digest_of(tensor)
        if found != expected:
            saved = "none was saved" if expected is None else f"{expected.hex()} was saved"
            raise ValueError(
                f"{where}: delta and base make up a chunk with checksum {found.hex()}, and {saved}: bytes of one of "
                f"them have changed (`python -m dcp_adapters verify` on the base says whether its have); {WAY_OUT}"
            )
        return tensor


class _BoxPlanner(DefaultLoadPlanner):
    """Reads a box into one tensor."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self.box = box

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.box


def _digest(directory: Path) -> str:
    """Digest a base's `.metadata`. Raises FileNotFoundError, NotADirectoryError as are; OSError with what to do."""
    try:
        return xxhash.xxh3_128_hexdigest((directory / METADATA).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise OSError(
            f"{directory}: the {METADATA} of the base of a delta cannot be read ({error}); make it readable, or use "
            "another checkpoint"
        ) from error


def _check(delta: Path, link: BaseLink, directory: Path, state: str) -> None:
    try:
        digest = _digest(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{delta} is a delta to {directory}, where there is no checkpoint (no {METADATA}); {state}"
        ) from error
    if digest != link.digest:
        raise ValueError(
            f"{delta} is a delta to the checkpoint that was in {directory}, where another one is now ({METADATA} has "
            f"digest {digest}, expected {link.digest}); {state}"
        )
