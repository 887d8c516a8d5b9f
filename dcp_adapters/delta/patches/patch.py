"""A delta: from which state to which, and the changes between them. patch_format.py says how it looks as bytes."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import xxhash

from dcp_adapters.delta.coding.changes import Changes
from dcp_adapters.delta.coding.codec import Coded, check_coded, decode
from dcp_adapters.delta.coding.damage import damaged
from dcp_adapters.delta.coding.zstd import compress, decompress
from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.plain.words import short

LEVEL = 19  # of zstd, for entries of bytes
Read = Callable[[str], bytes]  # the bytes of a frame or an entry, by `frame_name` and `blob_name`


@dataclass(frozen=True)
class CodedFrame:
    """A frame as the table knows it; `coded` has no data. run: number of the dtype's run. checksum: of its bytes."""

    run: int
    coded: Coded
    checksum: str


@dataclass(frozen=True)
class Blob:
    """A changed entry of bytes; size: uncompressed."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Delta:
    """The changes from one state to another of the same names, recipes and shapes.

    Attributes:
        base, result: the digests of the two states (state_digest.py).
        base_version, version: numbers that the maker gave them; None if it gave none.
        layout: what both states have.
        frames, blobs: what changed. read: hands out their bytes.
        where: what messages call it.

    Example:
        ```python
        >>> state = {"weight": torch.zeros(64, 64)}
        >>> sent = HeldVersion(state, version=0)
        >>> state["weight"][0, 0] = 1.0
        >>> delta = sent.since(state, version=1)
        >>> delta.base_version, delta.version
        (0, 1)
        ```
    """

    base: str
    result: str
    layout: StateLayout
    frames: tuple[CodedFrame, ...]
    blobs: tuple[Blob, ...]
    read: Read = field(compare=False, repr=False)
    base_version: int | None = None
    version: int | None = None
    where: str = "the delta"

    @staticmethod
    def made(
        layout: StateLayout,
        states: tuple[str, str],
        frames: list[tuple[int, Coded]],
        blobs: Mapping[str, bytes],
        versions: tuple[int | None, int | None] = (None, None),
    ) -> "Delta":
        """Make one in memory, from the digests of the two states, coded frames and changed entries of bytes."""
        held: dict[str, bytes] = {}
        records, changed = [], []
        for number, (run, coded) in enumerate(frames):
            held[frame_name(number)] = coded.data
            records.append(CodedFrame(run, replace(coded, data=b""), checksum(coded.data)))
        for number, (name, data) in enumerate(sorted(blobs.items())):
            stored = held[blob_name(number)] = compress(data, LEVEL)
            changed.append(Blob(name, len(data), checksum(stored)))
        return Delta(*states, layout, tuple(records), tuple(changed), held.__getitem__, *versions)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the frames."""
        return sum(sum(frame.coded.lengths) for frame in self.frames)

    @property
    def changed(self) -> int:
        """Count the units that change."""
        return sum(frame.coded.count for frame in self.frames)

    def changes(self, key: str) -> Iterator[Changes]:
        """Yield what changes in a tensor, ascending by position in it, in pieces.

        Raises:
            ValueError: a frame is damaged.
        """
        number, at = self._places[key]
        run = self.layout.runs[number]
        first, end = run.starts[at], run.end(at)
        frames = self._frames_of.get(number, [])
        # The frame before the first one that begins in the tensor may reach into it.
        begin = bisect_right(frames, first, key=lambda held: held[1].coded.start) - 1
        for place in range(max(begin, 0), len(frames)):
            index, frame = frames[place]
            if frame.coded.start >= end:
                break
            found = self._decode(index, _next_start(frames, place))
            low, high = (int(torch.searchsorted(found.positions, edge)) for edge in (first, end))
            if high > low:
                yield Changes(found.positions[low:high] - first, found.steps[low:high])

    def blob(self, name: str) -> bytes | None:
        """Return the new bytes of an entry; None if they stay. Raises ValueError if they are damaged."""
        for number, blob in enumerate(self.blobs):
            if blob.name == name:
                what = f"{self.where}: {name}"
                data = decompress(self._read_checked(blob_name(number), blob.checksum), blob.size, what)
                if len(data) != blob.size:
                    raise damaged(what, f"{len(data)} bytes, expected {blob.size}")
                return data
        return None

    def check_table(self) -> None:
        """Raise ValueError if the numbers that describe the frames contradict the layout."""
        runs = self.layout.runs
        for number, frames in self._frames_of.items():
            if number >= len(runs):
                raise damaged(self.where, f"a frame of run {number} of {len(runs)}")
            before = -1
            for index, frame in frames:
                what = f"{self.where}: frame {index}"
                start = frame.coded.start
                if start <= before or (before < 0 and start):
                    raise damaged(what, f"it begins at {start}, the one before at {before}")
                before = start
                check_coded(frame.coded, runs[number].unit, runs[number].extent, what)
        strange = [blob.name for blob in self.blobs if blob.name not in self.layout.blobs]
        if strange:
            raise damaged(self.where, f"{short(strange[0])} is no entry of bytes of its state")

    def check(self) -> None:
        """Decode everything. Raises ValueError if something is damaged."""
        for frames in self._frames_of.values():
            for place, (index, _) in enumerate(frames):
                self._decode(index, _next_start(frames, place))
        for blob in self.blobs:
            self.blob(blob.name)

    # -- frames --------------------------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return {key: (number, at) for number, run in enumerate(self.layout.runs) for at, key in enumerate(run.keys)}

    @cached_property
    def _frames_of(self) -> dict[int, list[tuple[int, CodedFrame]]]:
        found: dict[int, list[tuple[int, CodedFrame]]] = {}
        for index, frame in enumerate(self.frames):
            found.setdefault(frame.run, []).append((index, frame))
        return found

    @cached_property
    def _last(self) -> dict[int, tuple[int, Changes]]:
        """Hold the frame decoded last of each run: tensors are asked for one after the other."""
        return {}

    def _decode(self, index: int, following: int | None) -> Changes:
        frame = self.frames[index]
        held = self._last.get(frame.run)
        if held is not None and held[0] == index:
            return held[1]
        what = f"{self.where}: frame {index}"
        run = self.layout.runs[frame.run]
        data = self._read_checked(frame_name(index), frame.checksum)
        found = decode(replace(frame.coded, data=data), run.unit, run.extent, what)
        # A frame begins where the one before ends: so one that is missing, or of another delta, is noticed.
        if following is not None and int(found.positions[-1]) + 1 != following:
            raise damaged(what, "the next one does not begin where it ends")
        self._last[frame.run] = index, found
        return found

    def _read_checked(self, name: str, expected: str) -> bytes:
        data = self.read(name)
        if checksum(data) != expected:
            raise damaged(self.where, f"{name} has checksum {checksum(data)}, expected {expected}")
        return data


def _next_start(frames: list[tuple[int, CodedFrame]], place: int) -> int | None:
    """Return where the next frame of a run begins; None after the last."""
    return frames[place + 1][1].coded.start if place + 1 < len(frames) else None


def frame_name(number: int) -> str:
    """Name the bytes of a frame."""
    return f"frame.{number:06d}"


def blob_name(number: int) -> str:
    """Name the bytes of a changed entry of bytes."""
    return f"blob.{number:06d}"


def checksum(data: bytes) -> str:
    """Return 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)
