"""A row of the table for a weight with compressed states; `fused.table.filled` fills in what is of a step."""

from dataclasses import dataclass

# in words of 8 bytes: addresses and counts
WORDS = (
    *("grad", "weight", "scale", "remainder", "first", "first_scale", "second", "second_scale"),
    *("rows", "columns", "length", "top", "left", "begin"),
)
BLOCK = 32
# of 4 bytes, behind the words: what a rule reads (10, fp32), -1 / root in two parts, whether `usual` may, two keys
RECIPROCAL, USUAL, KEYS, NUMBERS = 10, 12, 13, 16
ROW = len(WORDS) + NUMBERS // 2


@dataclass(frozen=True)
class Cut:
    """A shard as rows: [rows, length], which follow each other in the whole weight from (top, left) on."""

    rows: int
    length: int
    top: int
    left: int


@dataclass(frozen=True)
class Addresses:
    """A row of the table, but for what is of a step: its gradient, its numbers, where its programs begin.

    Attributes:
        stored: addresses of the weight (payload, bf16, or fp32 that is its own master), its scales and remainder, the
            first moment and its scales, the second one and its scales; 0 for what there is not.
        cut: the shard.
    """

    stored: tuple[int, ...]
    cut: Cut

    def row(self, begin: int) -> list[int]:
        """Return the row's words, with 0 for those that are filled in."""
        columns = -(-self.cut.length // BLOCK)
        places = (self.cut.rows, columns, self.cut.length, self.cut.top, self.cut.left)
        return [0, *self.stored, *places, begin, *[0] * (NUMBERS // 2)]
