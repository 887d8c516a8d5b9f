"""Which tensors travel together, and where each of them lies among the bytes of its bucket.

    bucket     tensors in their order, up to a number of bytes; a larger tensor is alone in its bucket
    place      each tensor begins at a multiple of ALIGNED bytes, so that its bytes can be viewed as any dtype

Both sides decide this from the same records, so that nobody has to be told.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 64


@dataclass(frozen=True)
class TensorRecord:
    """A tensor that a stream sends: its name in the checkpoint, its dtype and shape.

    Example:
        ```python
        >>> state = {"up.weight": quantize(torch.ones(4, 64), MXFP8BlockScaling())}
        >>> stream = WeightStream(state, config={"model_type": "mine"})
        >>> [(record.name, record.shape, record.nbytes) for record in stream.metadata()]
        [('up.weight', (4, 64), 256), ('up.weight_scale', (4, 2), 8)]
        ```
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that it takes in a bucket."""
        return -(-self.nbytes // ALIGNED) * ALIGNED


def difference(before: Iterable[TensorRecord], now: Iterable[TensorRecord]) -> str:
    """What has changed in a stream, in words: the first tensor that did."""
    old, new = ({each.name: each for each in records} for records in (before, now))
    for name, record in old.items():
        if name not in new:
            return f"{name} has gone"
        if new[name] != record:
            kinds = (f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (record, new[name]))
            return f"{name} changed from {' to '.join(kinds)}"
    added = next((name for name in new if name not in old), None)
    return "the order of the tensors has changed" if added is None else f"{added} has come"


def bucket_sizes(records: Sequence[TensorRecord], limit: int) -> tuple[int, ...]:
    """How many tensors are in each bucket of at most `limit` bytes."""
    sizes: list[int] = []
    filled = 0
    for record in records:
        if not sizes or filled + record.room > limit:
            sizes.append(0)
            filled = 0
        sizes[-1] += 1
        filled += record.room
    return tuple(sizes)


def buckets_of(records: Sequence[TensorRecord], sizes: Sequence[int]) -> list[tuple[TensorRecord, ...]]:
    """The tensors of each bucket."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [tuple(records[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def room_of(bucket: Sequence[TensorRecord]) -> int:
    """Bytes of a bucket."""
    return sum(record.room for record in bucket)


def views(bucket: Sequence[TensorRecord], memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor of a bucket, as views of its bytes.

    Args:
        bucket: what lies there.
        memory: uint8 [at least `room_of(bucket)`].
    """
    offset = 0
    for record in bucket:
        yield record.name, memory[offset : offset + record.nbytes].view(record.dtype).view(record.shape)
        offset += record.room


def fill(bucket: Sequence[TensorRecord], tensors: Mapping[str, Tensor], memory: Tensor) -> None:
    """Copy the tensors of a bucket to their places; the bytes between them become zeros."""
    offset = 0
    for record in bucket:
        end = offset + record.nbytes
        memory[offset:end].copy_(tensors[record.name].contiguous().view(-1).view(torch.uint8))
        offset += record.room
        memory[end:offset].zero_()
