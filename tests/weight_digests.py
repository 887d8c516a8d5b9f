"""The digests of weights as their definition says, in numpy and plain Python, sharing no code with the packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

M = 2**64 - 1


def splitmix(number: int) -> int:
    """The output of splitmix64 of this number, from seed 0; the first has number 1."""
    x = number * 0x9E3779B97F4A7C15 & M
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M
    return x ^ (x >> 31)


def odd(numbers: range) -> Any:
    return np.array([splitmix(number) | 1 for number in numbers], dtype=np.uint64)


def byte_sum(tensor: Tensor) -> int:
    """Rows of little-endian words of 32 bits, each word times its row's weight and its column's."""
    columns = (tensor.shape[-1] if tensor.ndim else 1) * tensor.itemsize
    if not tensor.numel():
        return 0
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().reshape(-1, columns)
    words = np.pad(data, ((0, 0), (0, -columns % 4))).view("<i4").astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        terms = words * odd(range(1, 2 * len(words) + 1, 2))[:, None] * odd(range(2, 2 * words.shape[1] + 1, 2))
        return int(terms.sum())


def tensor_value(parts: Mapping[str, Tensor]) -> str:
    rows = sorted(
        [part, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), byte_sum(tensor)]
        for part, tensor in parts.items()
        if part != "amax_history"
    )
    return xxhash.xxh3_128_hexdigest(json.dumps(rows, separators=(",", ":")).encode())


def values(state: Mapping[str, Any]) -> dict[str, str]:
    """Of whole tensors, quantized or not."""
    return {
        name: tensor_value(value.parts() if hasattr(value, "recipe") else {"": value}) for name, value in state.items()
    }


def value(state: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(values(state).items()), separators=(",", ":")).encode())
