"""Hashes of values that are passed by reference: they show whether somebody has filled the same memory anew."""

from collections import deque
from typing import Any

import torch
import xxhash
from torch import Tensor

from dcp_adapters.plain.plain_memory import memory_of
from fsdp_hooks.lazy_bits import resolve
from layerwise.inputs.values.calls import is_value, state_of_container
from layerwise.inputs.values.stores import is_ordinary

DEPTH = 4  # how far into objects to look


def add_tensor(digest: xxhash.xxh3_64, tensor: Tensor) -> None:
    """Add a tensor to a digest; of one that is more than its bytes, only dtype and shape."""
    digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if is_ordinary(tensor) and tensor.numel():
        # Lazy conjugates and negatives are computed first: their memory does not hold their values.
        data = resolve(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(memory_of(data))


def content_hash(value: Any) -> int:
    """Hash what an object holds: values, arrays and tensors, as far as DEPTH reaches."""
    digest = xxhash.xxh3_64()
    _add_content(digest, value, DEPTH)
    return digest.intdigest()


def _add_content(digest: xxhash.xxh3_64, value: Any, depth: int) -> None:
    if isinstance(value, Tensor):
        add_tensor(digest, value)
        return
    if is_value(value):
        digest.update(repr(value).encode())
        return
    digest.update(type(value).__qualname__.encode())
    # Arrays of numpy and others: their values are no attributes, but in memory that a loader may fill anew.
    to_bytes = None if isinstance(value, type) else getattr(value, "tobytes", None)
    if isinstance(value, bytearray) or callable(to_bytes):
        digest.update(to_bytes() if callable(to_bytes) else bytes(value))
    state = list(value) if isinstance(value, tuple | set | frozenset | deque) else state_of_container(value)
    if state is None or not depth:
        return
    for key, held in state.items() if isinstance(state, dict) else enumerate(state):
        digest.update(repr(key).encode() if is_value(key) else b"?")
        _add_content(digest, held, depth - 1)
