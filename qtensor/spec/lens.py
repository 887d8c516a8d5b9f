"""How a view looks at the parts of a quantized tensor, and what a write through it may change."""

import dataclasses
from enum import IntEnum


class Reach(IntEnum):
    """What a write may change; a view of a view reaches no further than either of the two."""

    ALL = 0  # a tensor of its own, or all of one
    ROWS = 1  # some rows of a larger tensor, with which it shares the tensor-wide parts
    BROKEN_BLOCKS = 2  # rows that begin or end within a block of rows that share scales
    NOTHING = 3  # some columns, which are a copy: a write into it would not reach the tensor


@dataclasses.dataclass(frozen=True)
class Lens:
    """How a tensor looks at its parts; the default is a tensor of its own.

    described: the shape that the parts describe; set on a view of another shape.
    transposed: whether the last two dims are exchanged; then `described` is set, too.
    """

    reach: Reach = Reach.ALL
    described: tuple[int, ...] | None = None
    transposed: bool = False

    @property
    def some_rows(self) -> bool:
        """Whether it sees some rows of a larger tensor."""
        return self.reach in (Reach.ROWS, Reach.BROKEN_BLOCKS)

    @property
    def severed(self) -> bool:
        """Whether it sees a copy of some columns."""
        return self.reach is Reach.NOTHING

    def owned(self) -> "Lens":
        """The lens of a copy that looks the same but owns its parts."""
        return dataclasses.replace(self, reach=Reach.ALL) if self.reach else self

    def seen_as(self, described: tuple[int, ...] | None, *, transposed: bool = False) -> "Lens":
        """The lens of a view in another shape; `described` is None for a view in the shape the parts describe."""
        return Lens(self.reach, described, transposed)


OWN = Lens()
