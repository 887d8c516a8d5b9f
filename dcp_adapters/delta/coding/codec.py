"""Code a run of changes as compressed bytes.

    gaps    from one position to the next, less 1. With s = log2 of the mean gap, less 5:
              gap mod 2^s     as s bits each, packed: these are nearly even, no code could shorten them
              gap // 2^s      as bytes, 255 for "255, and more follows"
    steps   zigzag (0, -1, 1, -2, .. as 0, 1, 2, 3, ..), one stream for the lowest bytes, one for the next, ...

Each stream is one zstd frame, so that each has a Huffman code of its own. Where each unit changes by chance, gaps are
geometric, and the quotients' code and the plain bits together come within a few per cent of their entropy. `s` brings
the quotients of weights that change often and of weights that seldom do to the same distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_adapters.delta.coding.changes import Changes
from dcp_adapters.delta.coding.damage import damaged
from dcp_adapters.delta.coding.zstd import compress, decompress
from dcp_adapters.plain.plain_memory import memory_of

MOST_CHANGES = 2**20  # of a frame; what decoding one takes is bounded by this
MOST_UNITS = 2**40  # of a run: sums of gaps stay below 2^63
BEST, FAST = 19, 3  # levels: frames of sparse changes are small beside the weights that were read for them
QUOTIENT = 5  # log2 of the mean quotient, about


@dataclass(frozen=True)
class Coded:
    """One frame.

    start: the position from which the first gap counts. count: of changes. shift: the s of the module docstring.
    lengths: bytes of each stream, as they stand in `data` one after the other.
    """

    start: int
    count: int
    shift: int
    lengths: tuple[int, ...]
    data: bytes


def encode(changes: Changes, start: int, *, level: int | None = None) -> Coded:
    """Code 1 to MOST_CHANGES changes, all at or after `start`; level: of zstd, None: the one of delta files."""
    count = len(changes)
    before = torch.cat([torch.tensor([start - 1], dtype=torch.int64, device="cpu"), changes.positions[:-1]])
    gaps = changes.positions - before - 1
    span = int(changes.positions[-1]) + 1 - start
    shift = max((span // count).bit_length() - 1 - QUOTIENT, 0)
    if level is None:
        level = FAST if count == MOST_CHANGES and span < 4 * count else BEST
    streams = [_pack(gaps, shift), _escape(gaps >> shift), *_planes(changes.steps)]
    data = [compress(stream, level) for stream in streams]
    return Coded(start, count, shift, tuple(map(len, data)), b"".join(data))


def decode(coded: Coded, unit: torch.dtype, extent: int, what: str) -> Changes:
    """Decode a frame of a run of `extent` units to its changes.

    Raises:
        ValueError: it is damaged. No more memory is taken than MOST_CHANGES and `extent` explain.
    """
    check_coded(coded, unit, extent, what)
    if sum(coded.lengths) != len(coded.data):
        raise damaged(what, f"{len(coded.data)} bytes, expected {sum(coded.lengths)}")
    streams = _split(coded)
    # Each stream is given the most that its contents can be, so a frame that would unpack to gigabytes stops there.
    lows = decompress(streams[0], -(-coded.count * coded.shift // 8), what)
    quotients = decompress(streams[1], coded.count + (extent >> coded.shift) // 255, what)
    planes = [decompress(stream, coded.count, what) for stream in streams[2:]]
    gaps = (_unescape(quotients, coded.count, extent >> coded.shift, what) << coded.shift) + _unpack(
        lows, coded.count, coded.shift, what
    )
    positions = (gaps + 1).cumsum(0) + (coded.start - 1)
    if int(positions[-1]) >= extent:
        raise damaged(what, f"it changes unit {int(positions[-1])} of {extent}")
    steps = _join_planes(planes, coded.count, unit, what)
    # Nothing writes these; with them, one change could be coded in several ways.
    if bool((steps == 0).any()):
        raise damaged(what, "it has steps of 0")
    return Changes(positions, steps)


def check_coded(coded: Coded, unit: torch.dtype, extent: int, what: str) -> None:
    """Raise ValueError if the numbers that describe a frame contradict each other."""
    fits = (
        0 < coded.count <= min(MOST_CHANGES, extent)
        and extent <= MOST_UNITS
        and 0 <= coded.start < extent
        and 0 <= coded.shift <= 40
        and len(coded.lengths) == 2 + unit.itemsize
        and all(length >= 0 for length in coded.lengths)
    )
    if not fits:
        raise damaged(
            what,
            f"{coded.count} changes from {coded.start} on in {extent} units, in "
            f"{len(coded.lengths)} streams with a shift of {coded.shift}",
        )


def _split(coded: Coded) -> list[bytes]:
    ends = [sum(coded.lengths[: number + 1]) for number in range(len(coded.lengths))]
    return [coded.data[end - length : end] for end, length in zip(ends, coded.lengths, strict=True)]


# -- streams -----------------------------------------------------------------------------------------------------------


def _pack(gaps: Tensor, shift: int) -> bytes:
    """Pack the lowest `shift` bits of each, one after the other."""
    if not shift:
        return b""
    bits = (gaps.unsqueeze(1) >> torch.arange(shift, dtype=torch.int64, device="cpu")) & 1  # [n, shift]
    flat = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8, device="cpu")
    flat[: bits.numel()] = bits.flatten()
    return _bytes((flat.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device="cpu")).sum(1).to(torch.uint8))


def _unpack(data: bytes, count: int, shift: int, what: str) -> Tensor:
    """Undo `_pack`: int64 [count]."""
    if len(data) != -(-count * shift // 8):
        raise damaged(what, f"{len(data)} bytes of gaps, expected {-(-count * shift // 8)}")
    if not shift:
        return torch.zeros(count, dtype=torch.int64, device="cpu")
    bits = (_tensor(data).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
    rows = bits.flatten()[: count * shift].view(count, shift).to(torch.int64)
    return (rows << torch.arange(shift, dtype=torch.int64, device="cpu")).sum(1)


def _escape(quotients: Tensor) -> bytes:
    """Write each as a byte below 255, after one 255 for each 255 in it."""
    ends = (quotients // 255 + 1).cumsum(0) - 1
    out = torch.full((int(ends[-1]) + 1,), 255, dtype=torch.uint8, device="cpu")
    out[ends] = (quotients % 255).to(torch.uint8)
    return _bytes(out)


def _unescape(data: bytes, count: int, most: int, what: str) -> Tensor:
    """Undo `_escape`: int64 [count]; none is above `most`."""
    values = _tensor(data).to(torch.int64)
    ends = (values < 255).nonzero().flatten()
    if ends.numel() != count or int(ends[-1]) != len(data) - 1:
        raise damaged(what, f"{ends.numel()} gaps, expected {count}")
    sums = values.cumsum(0)[ends]
    quotients = sums.diff(prepend=torch.zeros(1, dtype=torch.int64, device="cpu"))
    if int(quotients.max()) > most:
        raise damaged(what, "a gap is longer than what it is in")
    return quotients


def _planes(steps: Tensor) -> list[bytes]:
    """Split the steps, zigzag: the lowest bytes of all of them, then the next bytes of all, and so on."""
    zigzag = (steps << 1) ^ (steps >> (8 * steps.element_size() - 1))
    rows = zigzag.contiguous().view(torch.uint8).view(-1, steps.element_size())  # little-endian
    return [_bytes(rows[:, plane].contiguous()) for plane in range(rows.shape[1])]


def _join_planes(planes: Sequence[bytes], count: int, unit: torch.dtype, what: str) -> Tensor:
    """Undo `_planes`: `unit` [count]."""
    if any(len(plane) != count for plane in planes):
        raise damaged(what, f"{[len(plane) for plane in planes]} bytes of steps, expected {count}")
    zigzag = torch.stack([_tensor(plane) for plane in planes], dim=1).view(unit).flatten()
    # >> of a signed dtype repeats the sign; the mask makes it bring in zeros.
    most = torch.iinfo(unit).max
    return ((zigzag >> 1) & most) ^ -(zigzag & 1)


def _bytes(values: Tensor) -> bytes:
    whole = values.contiguous()  # named, since what memory_of returns does not keep it alive
    return memory_of(whole).raw


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
