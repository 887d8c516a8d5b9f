"""What digests of weights are made of: a sum for each part, a digest for each tensor, one for all of them.

    part     fsdp_hooks.kernels.byte_sums: 64 bits that add up over shards
    tensor   xxh3_128 of its parts' names, dtypes, shapes and sums         32 hex digits
    whole    xxh3_128 of the tensors' names and digests, sorted by name    32 hex digits

All that decides a weight's values counts, and nothing else does: bytes, dtypes and shapes of payload and scales, or of
a dense tensor. The fields of a recipe, the dtype that a quantized tensor appears to have and the history of a delayed
scale do not; engines and Hugging Face directories know nothing of them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from dcp_adapters.records.entry import Entry, PartShape
from dcp_adapters.records.recipe_names import dtype_name
from qtensor.spec.format import PartSpec

DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


class PartSum(NamedTuple):
    """A whole part of a tensor; `total` is its byte sum, modulo 2^64. A dense tensor is one part, named ""."""

    part: str
    dtype: torch.dtype
    shape: Sequence[int]
    total: int


class DigestDifference(NamedTuple):
    """A tensor that two sides do not hold alike: only one has it, or bytes, dtypes or shapes differ."""

    name: str
    kind: str  # only_in_a, only_in_b, other


def is_digested(spec: PartSpec) -> bool:
    """Tell whether a part is in the digest: all but histories are."""
    return spec.length is None


def digested_parts(entry: Entry) -> dict[str, PartShape]:
    """Return part -> (dtype, global shape) of the parts that are in the digest."""
    parts = entry.parts()
    return {spec.name: parts[spec.name] for spec in entry.specs() if is_digested(spec)}


def tensor_digest(sums: Iterable[PartSum]) -> str:
    """Return the digest of a tensor, from the sums of all of its parts, in any order."""
    rows = sorted([part, dtype_name(dtype), list(shape), total % 2**64] for part, dtype, shape, total in sums)
    return _hash(rows)


def whole_digest(tensors: Mapping[str, str]) -> str:
    """Return the digest of tensors of these names and digests, in any order."""
    return _hash(sorted(tensors.items()))


def first_difference(a: Mapping[str, str], b: Mapping[str, str]) -> DigestDifference | None:
    """Find the first tensor, in the order of `a`, that `b` does not hold alike; else the first that only `b` has."""
    for name, own in a.items():
        if name not in b:
            return DigestDifference(name, "only_in_a")
        if b[name] != own:
            return DigestDifference(name, "other")
    return next((DigestDifference(name, "only_in_b") for name in b if name not in a), None)


def add_twins(tensors: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Add the tensors that only `other` has, if another tensor there holds the same and both sides have that one.

    So a tied weight is found if a file leaves it out.
    """
    names = {own: name for name, own in other.items() if name in tensors}
    return {
        **tensors,
        **{name: tensors[names[own]] for name, own in other.items() if name not in tensors and own in names},
    }


def _hash(record: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, separators=(",", ":")).encode())
