"""Checksums of stored chunks."""

import io

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

__all__ = ["CHECKSUMS", "chunk_key", "digest_of"]

CHECKSUMS = "qtensor.checksums"


def chunk_key(index: MetadataIndex) -> bytes:
    """Digest of a chunk's name and offset."""
    offset = ",".join(str(o) for o in index.offset or ())
    return xxhash.xxh3_64_digest(f"{index.fqn}@{offset}".encode())


def digest_of(data: Tensor | io.BytesIO) -> bytes:
    """Digest of a chunk's bytes."""
    if isinstance(data, io.BytesIO):
        return xxhash.xxh3_64_digest(data.getvalue())
    return xxhash.xxh3_64_digest(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
