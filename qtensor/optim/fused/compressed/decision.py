"""Which weights with compressed states take the fused step, and why the others do not: pure functions.

A weight is seen as [rows, length]. Its blocks are 32 numbers of a row, the last of which may have fewer.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qtensor.numerics.triton_kernels import ByHand
from qtensor.optim.fused.compressed.table import BLOCK, KEYS, NUMBERS, USUAL, Cut
from qtensor.optim.fused.decision import ADAM, Rule

EMPTY = "it has no elements"
TILE = 16  # blocks that a program holds at once, in one warp, 16 numbers of each thread
TURNS = 8  # tiles of a program, at most
LONGEST = 2**26  # numbers of a row, of which 16 are counted in 32 bits
MOST_ROWS = 2**31 - 2**8  # of a whole weight
SMALLEST_ROOT, LARGEST_ROOT, LARGEST_EPS = 2.0**-10, 2.0, 2.0**40  # of `usual`


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, beside gradients.

    Attributes:
        weight: "mxfp8" and "dense" (bf16), with a remainder; "own", fp32 that is its own master.
        moments: "float8" or "fp32".
        drawn: whether rounding is stochastic.
        multiple: divides the numbers of a row: 32, 16 or 1.
        width: blocks of a tile beside each other; the others stand below.
    """

    weight: str
    moments: str
    drawn: bool
    multiple: int
    width: int

    @property
    def usual(self) -> bool:
        """Whether the kernel has a shorter way for usual numbers."""
        return self.weight != "own" and self.moments == "float8"

    def programs(self, rows: int, length: int) -> int:
        """Return how many programs step so many rows."""
        return -(-rows // (TILE // self.width * TURNS)) * -(-length // (BLOCK * self.width))


def refuse_rule(rule: Rule | str) -> str:
    """Return why weights of a group take the general way; "": they need not."""
    if isinstance(rule, str):
        return rule
    return "" if rule is ADAM else "on compressed states only steps of Adam and AdamW are fused"


def weight_form(hand: ByHand | None) -> str:
    """Return why a quantized weight takes the general way; "": it need not."""
    options = hand.options if hand is not None else {}
    if hand is None or hand.module != "mxfp8":
        return "its format's remainders are written by the general way alone"
    if options["element"] != torch.float8_e4m3fn or options["scale_rounding"] != "up":
        return "it is MXFP8 of other elements than E4M3, or under scales that are rounded down"
    return "square blocks with remainders are written by the general way alone" if options["square"] else ""


def cut_of(shape: Sequence[int], pieces: Sequence[tuple[int, int]]) -> Cut | str:
    """Return a shard as rows, or why it has none.

    Args:
        shape: of the whole weight.
        pieces: (first, length) of the shard, along each dim.
    """
    *leading, (left, length) = pieces or [(0, 1)]
    rows = above = 1
    for number, (_, size) in enumerate(leading):
        rows *= size
        above *= shape[number] if number else 1
        if number and size != shape[number]:
            return "its rows do not follow each other in the whole weight"
    top = (leading[0][0] if leading else 0) * above
    if not rows * length:
        return EMPTY
    if length > LONGEST or top + rows > MOST_ROWS or left + length > 2**31 - BLOCK:
        return "it has more rows or columns than the kernel counts"
    return Cut(rows, length, top, left)


def form_of(weight: str, moments: str, cut: Cut, *, drawn: bool) -> Form:
    """Return what the kernel of a shard is compiled for: with the width that leaves least of its tiles empty."""
    columns = -(-cut.length // BLOCK)

    def empty(width: int) -> int:
        high = TILE // width
        return -(-columns // width) * -(-cut.rows // high)

    width = min((16, 8, 4, 2, 1), key=empty)
    multiple = next(each for each in (32, 16, 1) if cut.length % each == 0)
    return Form(weight, moments, drawn, multiple, width)


def packed(numbers: Sequence[float], keys: tuple[int, int]) -> bytes:
    """Return what a row holds behind its words; see `table.NUMBERS`.

    Args:
        numbers: `fused.decision.numbers_of` Adam.
        keys: of the weight's draws in this step.

    Raises:
        OverflowError: a number is finite and fp32 has none for it.
    """
    weight, root, eps = (abs(_single(numbers[place])) if place == 3 else _single(numbers[place]) for place in (3, 7, 8))
    usual = weight < 0.5 and SMALLEST_ROOT <= root <= LARGEST_ROOT and 0.0 <= eps <= LARGEST_EPS
    # of -1 / root; the product has 48 bits at most, so the rest is exact but for its last rounding
    high = -_single(1.0 / root) if usual else 0.0
    low = -_single((1.0 + high * root) / root) if usual else 0.0
    behind = bytes(4 * (NUMBERS - KEYS - 2))
    return struct.pack(f"{USUAL}ff2i", *numbers, high, low, float(usual), *keys) + behind


def refuse_state(state: Mapping[str, object], names: Sequence[str]) -> str:
    """Return why a state is not one that the kernel steps; "": it is."""
    if set(state) != {"step", *names}:
        return f"its state is {', '.join(map(str, state))}"
    return ""


def _single(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])
