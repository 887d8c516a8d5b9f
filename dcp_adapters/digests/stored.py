"""Digests of what is on disk: a checkpoint, or a directory of safetensors; one chunk of one tensor in memory."""

import math
import os
from collections.abc import Mapping

from dcp_adapters.hf.models.architectures import Architecture
from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.hf.sources.sources import StoredSource
from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.source import Source
from dcp_adapters.records.weight_sums import PartSum, digested_parts, tensor_digest
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from fsdp_hooks.kernels.byte_sums import byte_sums


def stored_source(
    path: str | os.PathLike[str],
    prefix: str | None = None,
    wanted: Mapping[str, Entry] | None = None,
    architecture: Architecture | None = None,
) -> StoredSource:
    """Return the weights of a checkpoint, or of a directory.

    Args:
        path: where it is.
        prefix: as of StoredSource; None finds the subtree of a checkpoint, and takes all names of a directory.
        wanted: what a directory is compared with, see StoredDirectory.
        architecture: as of StoredDirectory.

    Raises:
        CheckpointUnusable: neither is there, or it cannot be read.
        FileNotFoundError, ValueError: as of StoredDirectory and StoredSource.
    """
    if not is_directory(path):
        return StoredSource(StoredCheckpoint(path), prefix, what="a digest")
    return StoredSource(StoredDirectory(path, wanted=wanted, architecture=architecture), prefix or "", what="a digest")


def source_digests(source: Source, *, advance: Advance = ignore_progress) -> dict[str, str]:
    """Return name -> digest of each tensor, in the order of the source.

    Args:
        source: a checkpoint, a directory, or tensors in memory.
        advance: told the bytes of each tensor that is done.

    Raises:
        ValueError: chunks of a tensor are missing, or data cannot be read.
    """
    digests = {}
    for name, entry in source.entries.items():
        sums = []
        for part, (dtype, shape) in digested_parts(entry).items():
            total = counted = 0
            for piece in source.pieces(name, part):
                total, counted = total + int(byte_sums([piece])[0]), counted + piece.data.numel()
            # A sum alone does not tell whether every element is in it.
            if counted != math.prod(shape):
                raise ValueError(f"{entry.key(part)}: its chunks hold {counted} elements of {shape}; run verify on it")
            sums.append(PartSum(part, dtype, shape, total))
        digests[name] = tensor_digest(sums)
        advance(entry.nbytes)
    return digests
