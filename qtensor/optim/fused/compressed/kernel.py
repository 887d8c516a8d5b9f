"""The kernels of the fused step on compressed states: a table of pointers in; parts, remainders and moments out.

A program takes some tiles below each other: TILE blocks of 32, WIDTH of them beside each other. What is drawn by
columns is the same for all of its tiles.

`step` takes them carefully (careful.py). `step_usual` takes a shorter way (usual.py), and leaves tiles that have other
numbers than usual ones as they are, in a list, for `step_left`. In one kernel, the careful way would take twice the
registers, from the shorter one too.
"""

import triton
import triton.language as tl

from qtensor.optim.fused.compressed import places
from qtensor.optim.fused.compressed.careful import careful
from qtensor.optim.fused.compressed.draws import GOLDEN as _GOLDEN
from qtensor.optim.fused.compressed.draws import row_keys, spread
from qtensor.optim.fused.compressed.usual import usual
from qtensor.optim.fused.kernel import aligned

GOLDEN = _GOLDEN
ROWS, COLUMNS, TOP, LEFT, BEGIN = places.ROWS, places.COLUMNS, places.TOP, places.LEFT, places.BEGIN
GRAD, WEIGHT_AT, SCALE, REMAINDER = places.GRAD, places.WEIGHT_AT, places.SCALE, places.REMAINDER
FIRST, SECOND, ROW, NUMBERS, KEYS = places.FIRST, places.SECOND, places.ROW, places.NUMBERS, places.KEYS
RECIPROCAL, USUAL, LANES, ALIGNED = places.RECIPROCAL, places.USUAL, places.LANES, places.ALIGNED


@triton.jit
def step(
    table: tl.tensor,
    numbers: tl.tensor,
    words32: tl.tensor,
    owner: tl.tensor,
    WEIGHT: tl.constexpr,
    MOMENTS: tl.constexpr,
    DRAWN: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """Step the tiles of a program. `numbers`, `words32`: the table again, as fp32 and int32; `owner`: see ../kernel.py.

    WEIGHT: "mxfp8", "dense" (bf16 and a remainder) or "own" (fp32). MOMENTS: "float8" or "fp32".
    """
    row = tl.load(owner + tl.program_id(0))
    words, own = table + row * ROW, numbers + (row * (2 * ROW) + NUMBERS)
    keys = words32 + (row * (2 * ROW) + NUMBERS + KEYS)
    at = tl.arange(0, TILE)
    first, behind, left = tiles_of(words, tl.program_id(0), TILE // WIDTH, WIDTH, TURNS)
    beside = at % WIDTH < tl.load(words + COLUMNS).to(tl.int32) - left
    columns = drawn_columns(words, left + at % WIDTH)
    for top in range(first, behind, TILE // WIDTH):
        under = top + at // WIDTH
        there = beside & (under < behind)
        of_rows = row_keys(tl.load(keys), tl.load(keys + 1), under + tl.load(words + TOP).to(tl.int32))[:, None]
        careful(
            words, own, top, left, at, there, of_rows, columns,
            WEIGHT, MOMENTS, DRAWN, GRADS, ALIGNED_GRADS, MULTIPLE, TILE, WIDTH,
        )  # fmt: skip


@triton.jit
def step_usual(
    table: tl.tensor,
    numbers: tl.tensor,
    words32: tl.tensor,
    owner: tl.tensor,
    left_over: tl.tensor,
    WEIGHT: tl.constexpr,
    DRAWN: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """Step usual tiles of "mxfp8" and "dense" with moments in "float8".

    `left_over`, int32: how many tiles are left, and of each its program and its first row.
    """
    row = tl.load(owner + tl.program_id(0))
    words, own = table + row * ROW, numbers + (row * (2 * ROW) + NUMBERS)
    keys = words32 + (row * (2 * ROW) + NUMBERS + KEYS)
    at = tl.arange(0, TILE)
    first, behind, left = tiles_of(words, tl.program_id(0), TILE // WIDTH, WIDTH, TURNS)
    blocks = tl.load(words + COLUMNS).to(tl.int32)
    beside = at % WIDTH < blocks - left
    columns = drawn_columns(words, left + at % WIDTH)
    # all that a tile reads of the table: it would be read again for each, since tiles write
    rows = tl.load(words + TOP).to(tl.int32)
    key, key_behind, may = tl.load(keys), tl.load(keys + 1), tl.load(own + USUAL)
    sign, l2, decay, weight = tl.load(own + 0), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    keep, add = tl.load(own + 5), tl.load(own + 6)
    root, eps, size = tl.load(own + 7), tl.load(own + 8), tl.load(own + 9)
    high, low = tl.load(own + RECIPROCAL), tl.load(own + (RECIPROCAL + 1))
    grads = tl.load(words + GRAD).to(tl.pointer_type(GRADS))
    if ALIGNED_GRADS:
        grads = tl.multiple_of(grads, ALIGNED)
    weights = aligned(words + WEIGHT_AT, tl.uint8 if WEIGHT == "mxfp8" else tl.bfloat16)
    scales, remainders = aligned(words + SCALE, tl.uint8), aligned(words + REMAINDER, tl.int16)
    firsts, first_scales = aligned(words + FIRST, tl.uint8), aligned(words + (FIRST + 1), tl.uint8)
    seconds, second_scales = aligned(words + SECOND, tl.uint8), aligned(words + (SECOND + 1), tl.uint8)
    for top in range(first, behind, TILE // WIDTH):
        under = top + at // WIDTH
        there = beside & (under < behind)
        of_rows = row_keys(key, key_behind, under + rows)[:, None]
        hard = usual(
            grads, weights, scales, remainders, firsts, first_scales, seconds, second_scales,
            blocks.to(tl.int64) * top + left, at // WIDTH * blocks + at % WIDTH, there, of_rows, columns,
            sign, l2, decay, weight, keep, add, root, high, low, eps, size, may,
            WEIGHT, DRAWN,
        )  # fmt: skip
        if hard:
            place = left_over + 1 + 2 * tl.atomic_add(left_over, 1, sem="relaxed")
            tl.store(place, tl.program_id(0))
            tl.store(place + 1, top)


@triton.jit
def step_left(
    table: tl.tensor,
    numbers: tl.tensor,
    words32: tl.tensor,
    owner: tl.tensor,
    left_over: tl.tensor,
    WEIGHT: tl.constexpr,
    DRAWN: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """Step the tiles that `step_usual` left over, by any number of programs."""
    at = tl.arange(0, TILE)
    for number in range(tl.program_id(0), tl.load(left_over), tl.num_programs(0)):
        program, top = tl.load(left_over + (1 + 2 * number)), tl.load(left_over + (2 + 2 * number))
        row = tl.load(owner + program)
        words, own = table + row * ROW, numbers + (row * (2 * ROW) + NUMBERS)
        keys = words32 + (row * (2 * ROW) + NUMBERS + KEYS)
        _, behind, left = tiles_of(words, program, TILE // WIDTH, WIDTH, TURNS)
        beside = at % WIDTH < tl.load(words + COLUMNS).to(tl.int32) - left
        columns = drawn_columns(words, left + at % WIDTH)
        under = top + at // WIDTH
        there = beside & (under < behind)
        of_rows = row_keys(tl.load(keys), tl.load(keys + 1), under + tl.load(words + TOP).to(tl.int32))[:, None]
        careful(
            words, own, top, left, at, there, of_rows, columns,
            WEIGHT, "float8", DRAWN, GRADS, ALIGNED_GRADS, LANES, TILE, WIDTH,
        )  # fmt: skip


@triton.jit
def tiles_of(
    words: tl.tensor, program: tl.tensor, HIGH: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr
) -> tl.tensor:
    """Return (first row of a program, the one behind its last, its first column of blocks)."""
    program = (program - tl.load(words + BEGIN)).to(tl.int32)
    across = tl.cdiv(tl.load(words + COLUMNS).to(tl.int32), WIDTH)
    group = program // across
    first = group * (HIGH * TURNS)
    behind = tl.minimum(first + HIGH * TURNS, tl.load(words + ROWS).to(tl.int32))
    return first, behind, (program - group * across) * WIDTH


@triton.jit
def drawn_columns(words: tl.tensor, blocks: tl.tensor) -> tl.tensor:
    """Return what draws take of the columns of these blocks, int32 [blocks, LANES]."""
    columns = blocks[:, None] * LANES + tl.arange(0, LANES)[None, :] + tl.load(words + LEFT).to(tl.int32)
    return spread(columns * GOLDEN)
