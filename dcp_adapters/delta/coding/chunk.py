"""Code a stored chunk of a tensor as what changed since an older version of it, the base.

    one line of JSON, then bytes
    {"kind": "same"}                            nothing more
    {"kind": "changes", "frames": [[start, changes, shift, [length, ..]], ..]}     the streams of codec.py
    {"kind": "whole"}                           the chunk's own bytes, where changes save less than a tenth of them

Whether they do is judged while changes are coded. After the first run of a million dense changes that saves nothing,
pieces spread over the rest tell what it may take: a chunk that is dense all over is given up then, and one that begins
dense is not.

Whoever decodes a chunk compares the result with a checksum: decoding finds contradictions, and no bytes that changed.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.delta.coding.changes import Changes, changed_units, changes_between, unit_of, units
from dcp_adapters.delta.coding.codec import BEST, FAST, MOST_CHANGES, Coded, decode, encode
from dcp_adapters.delta.coding.damage import damaged
from dcp_adapters.plain.plain_memory import memory_of

WORTH = 0.9  # of the bytes of a chunk: what is not smaller is stored whole
LOOKS, LOOK = 16, 2**15  # pieces of the rest that are looked at, and the units of each: half a million changes at most
MOST_LINE = 2**26  # bytes of JSON: half a million frames


def encode_chunk(old: Tensor, new: Tensor) -> bytes:
    """Code what leads from one plain contiguous CPU tensor to another of the same dtype and shape.

    Raises:
        ValueError: dtypes or shapes differ.
        ImportError: there is no zstd.
    """
    frames: list[Coded] = []
    stored = done = 0
    looked = False
    for changes in _frames(old, new):
        frames.append(_encode(changes, done))
        begun, done = done, int(changes.positions[-1]) + 1
        stored += len(frames[-1].data)
        spanned, expected = (done - begun) * changes.steps.element_size(), float(stored)
        # Only a dense start is a reason to look at the rest: the look costs half a million changes.
        if not looked and len(changes) == MOST_CHANGES and len(frames[-1].data) > WORTH * spanned:
            looked, expected = True, stored + _may_take(old, new, done)
        if expected > WORTH * new.nbytes:
            return _line({"kind": "whole"}) + memory_of(new).raw
    if not frames:
        return _line({"kind": "same"})
    table = [[frame.start, frame.count, frame.shift, list(frame.lengths)] for frame in frames]
    return _line({"kind": "changes", "frames": table}) + b"".join(frame.data for frame in frames)


def decode_chunk(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], old: Callable[[], Tensor], what: str
) -> Tensor:
    """Decode a chunk to a CPU tensor of its own.

    Args:
        data: of `encode_chunk`.
        dtype: of the chunk.
        shape: of the chunk.
        old: reads the base, as a contiguous CPU tensor of that dtype and shape, which becomes the result; called only
            if the base is needed.
        what: what messages call the chunk.

    Raises:
        ValueError: the data contradict themselves or the chunk.
    """
    end = data.find(b"\n", 0, MOST_LINE)
    try:
        record = json.loads(data[: max(end, 0)])
        kind, frames = record["kind"], [_parse_frame(*row) for row in record.get("frames", [])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(what, f"{type(error).__name__}: {error}") from error
    body = memoryview(data)[end + 1 :]
    expected = sum(sum(frame.lengths) for frame in frames)
    if kind == "whole":
        chunk = torch.empty(shape, dtype=dtype, device="cpu")
        expected = chunk.nbytes
    if kind not in ("whole", "same", "changes") or bool(frames) != (kind == "changes") or len(body) != expected:
        raise damaged(what, f"{len(body)} bytes and {len(frames)} frames of the kind {str(kind)[:20]}")
    if kind == "whole":
        memoryview(memory_of(chunk)).cast("B")[:] = body
        return chunk
    chunk = old()
    flat, begun = units(chunk), 0
    for frame in frames:
        length = sum(frame.lengths)
        changes = decode(_with_data(frame, bytes(body[begun : begun + length])), unit_of(dtype), flat.numel(), what)
        flat[changes.positions] += changes.steps
        begun += length
    return chunk


def _frames(old: Tensor, new: Tensor) -> Iterator[Changes]:
    """Yield all changes, in runs that the codec takes."""
    for found in changes_between(old, new):
        runs = zip(found.positions.split(MOST_CHANGES), found.steps.split(MOST_CHANGES), strict=True)
        yield from (Changes(positions, steps) for positions, steps in runs)


def _may_take(old: Tensor, new: Tensor, begun: int) -> float:
    """Judge by pieces how many bytes the changes from a unit on may take; 0 if coding them all costs as little."""
    before, after = units(old)[begun:], units(new)[begun:]
    count = after.numel()
    if count <= LOOKS * LOOK:
        return 0.0
    found = 0
    for number in range(LOOKS):
        start = number * (count - LOOK) // (LOOKS - 1)
        changes = changed_units(before[start : start + LOOK], after[start : start + LOOK])
        found += len(_encode(changes, 0).data) if len(changes) else 0
    return found * count / (LOOKS * LOOK)


def _encode(changes: Changes, start: int) -> Coded:
    """Code one frame; dense changes at a fast level, since these are what takes the time of a save."""
    span = int(changes.positions[-1]) + 1 - start
    return encode(changes, start, level=FAST if span < 4 * len(changes) else BEST)


def _parse_frame(start: Any, count: Any, shift: Any, lengths: Any) -> Coded:
    numbers = [start, count, shift, *lengths]
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise TypeError("a frame is not described by counts")
    return Coded(start, count, shift, tuple(lengths), b"")


def _with_data(frame: Coded, data: bytes) -> Coded:
    return Coded(frame.start, frame.count, frame.shift, frame.lengths, data)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
