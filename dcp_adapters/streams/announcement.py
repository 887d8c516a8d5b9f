"""What a sender says before the first bucket: everything but the bytes.

version    counts the complete passes of a stream, from 1 on
records    of all tensors, in the order in which they come
sizes      how many tensors are in each bucket
json       file name -> content of the files of JSON that an engine reads beside the weights
base       None where all tensors come. Else one tensor of bytes comes, a delta, and leads from this version
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.streams.buckets import TensorRecord, buckets_of, room_of

DELTA = "delta"  # the name of its bytes
ALIKE = "let sender and receiver have the same version of this library"


@dataclass(frozen=True)
class Announcement:
    """One version of the weights, before its bytes."""

    version: int
    records: tuple[TensorRecord, ...]
    sizes: tuple[int, ...]
    json: Mapping[str, Any]
    base: int | None = None

    @staticmethod
    def of_delta(version: int, base: int, nbytes: int) -> "Announcement":
        """That of a delta, as one tensor of bytes in one bucket."""
        return Announcement(version, (TensorRecord(DELTA, torch.uint8, (nbytes,)),), (1,), {}, base)

    @cached_property
    def buckets(self) -> list[tuple[TensorRecord, ...]]:
        """The tensors of each bucket."""
        return buckets_of(self.records, self.sizes)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(map(room_of, self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.nbytes for record in self.records)

    def to_bytes(self) -> bytes:
        """As it travels."""
        tensors = [[record.name, dtype_name(record.dtype), list(record.shape)] for record in self.records]
        told = {"version": self.version, "tensors": tensors, "sizes": list(self.sizes), "json": self.json}
        return json.dumps(told | {"base": self.base}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Announcement":
        """As it came. Raises ValueError where it says what cannot be."""
        try:
            told = json.loads(data)
            records = tuple(_record(*each) for each in told["tensors"])
            sizes = tuple(int(size) for size in told["sizes"])
            base = None if told["base"] is None else int(told["base"])
            found = Announcement(int(told["version"]), records, sizes, dict(told["json"]), base)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"an announcement of weights cannot be read ({type(error).__name__}: {error}); {ALIKE}"
            ) from None
        if (
            sum(sizes) != len(records)
            or min(sizes, default=1) < 1
            or len({each.name for each in records}) < len(records)
        ):
            raise ValueError(
                f"an announcement of {len(records)} tensors has buckets of {sum(sizes)}, or two tensors of one name; "
                f"{ALIKE}"
            )
        if base is not None and found != Announcement.of_delta(found.version, base, found.nbytes):
            raise ValueError(
                f"an announcement of a delta has {len(records)} tensors or files of JSON; expected its bytes alone; "
                f"{ALIKE}"
            )
        return found


def _record(name: str, dtype: str, shape: Sequence[int]) -> TensorRecord:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not isinstance(name, str):
        raise ValueError(f"{name!r} has the dtype {dtype!r}, which this torch does not have")
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0 or math.prod(sizes) > 2**62:
        raise ValueError(f"{name} has the shape {sizes}")
    return TensorRecord(name, found, sizes)
