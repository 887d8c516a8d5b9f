"""The checkpoint's own entries, manifest and checksum table: room for their bytes, no more than is stored of them."""

import math

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

DIMS = {1: "one dim", 2: "two dims"}


def own_buffer(name: str, metadata: Metadata, dims: int, where: str = "the checkpoint") -> Tensor | None:
    """An uninitialised uint8 tensor to read an entry into; None where the checkpoint has no such entry.

    Raises:
        ValueError: the entry is no uint8 tensor with so many dims, or claims to be larger than what is stored of it.
    """
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    stored = [info for index, info in (metadata.storage_data or {}).items() if index.fqn == name]
    most = sum(getattr(info, "length", math.inf) for info in stored)
    fits = len(entry.size) == dims and min(entry.size, default=0) >= 0 and math.prod(entry.size) <= most
    if entry.properties.dtype != torch.uint8 or not fits:
        raise ValueError(
            f"{where}: the entry {name} claims to be {entry.properties.dtype} {tuple(entry.size)} and {most} bytes of "
            f"it are stored, expected {DIMS[dims]} of torch.uint8; the checkpoint is damaged, use another one"
        )
    try:
        return torch.empty(entry.size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # stored by its own account only: a reader that does not look at its files
        raise ValueError(
            f"{where}: the entry {name} claims to be {tuple(entry.size)}, more than there is room for; the checkpoint "
            "is damaged, use another one"
        ) from error
