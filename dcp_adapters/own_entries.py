"""The checkpoint's own entries, manifest and checksum table: checked before memory is made for them."""

import math

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["check_own_entry"]


def check_own_entry(name: str, entry: TensorStorageMetadata, metadata: Metadata) -> None:
    """Raise ValueError where an entry is no uint8 tensor, or claims to be larger than what is stored for it."""
    claimed = math.prod(entry.size)
    stored = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    lengths = [getattr(info, "length", None) for index, info in stored.items() if index.fqn == name]
    known = sum(length for length in lengths if length is not None)
    if entry.properties.dtype != torch.uint8 or (lengths and None not in lengths and claimed > known):
        raise ValueError(
            f"the checkpoint's {name} claims to be {entry.properties.dtype} {tuple(entry.size)}, and {known} bytes are "
            "stored for it; expected a uint8 tensor that fits them. The checkpoint is damaged"
        )
