"""Gather changes, in the order of a layout's numbering, to frames.

A frame is full at MOST_CHANGES changes, or at the end of its run. So where frames end depends on the changes alone, and
whoever brings them, in pieces of whatever size, writes the same frames.
"""

from dcp_adapters.delta.coding.changes import Changes, join
from dcp_adapters.delta.coding.codec import MOST_CHANGES, Coded, encode
from dcp_adapters.delta.patches.layout import StateLayout


class Encoder:
    """Call `add` for every tensor of every run that changed, in the order of the layout; then `frames`."""

    def __init__(self, layout: StateLayout) -> None:
        self._runs = layout.runs
        self._place = {
            key: (number, start)
            for number, run in enumerate(layout.runs)
            for key, start in zip(run.keys, run.starts, strict=True)
        }
        self._frames: list[tuple[int, Coded]] = []
        self._run = 0
        self._next = 0  # the position after the last one coded
        self._held: list[Changes] = []
        self._count = 0  # of changes held

    def add(self, key: str, changes: Changes) -> None:
        """Add changes of a tensor, ascending, by positions in it.

        Raises:
            ValueError: they are not after all that were added before.
        """
        number, start = self._place[key]
        if not len(changes):
            return
        if number != self._run:
            if number < self._run:
                raise ValueError(f"{key}: its dtype was done before")
            self._flush(everything=True)
            self._run, self._next = number, 0
        positions = changes.positions + start
        last = int(self._held[-1].positions[-1]) if self._held else self._next - 1
        if int(positions[0]) <= last:
            raise ValueError(f"{key}: changes at {int(positions[0])} after some at {last}; expected ascending ones")
        self._held.append(Changes(positions, changes.steps))
        self._count += len(changes)
        self._flush(everything=False)

    def frames(self) -> list[tuple[int, Coded]]:
        """Return all frames, each with the number of its run."""
        self._flush(everything=True)
        return self._frames

    def _flush(self, *, everything: bool) -> None:
        # A frame is as full as it can be, whatever pieces came: so many ranks and one process write the same bytes.
        while self._count >= (1 if everything else MOST_CHANGES):
            held = join(self._held, self._runs[self._run].unit)
            frame = Changes(held.positions[:MOST_CHANGES], held.steps[:MOST_CHANGES])
            self._frames.append((self._run, encode(frame, self._next)))
            self._next = int(frame.positions[-1]) + 1
            rest = Changes(held.positions[MOST_CHANGES:], held.steps[MOST_CHANGES:])
            self._held, self._count = [rest] if len(rest) else [], len(rest)
