"""Blocks and their numbers; for packed formats two at a time: words that values are read in, bytes of two nibbles.

A tile is [TILE blocks, lanes]. A lane is a number or, for packed formats, a pair: one tensor holds the even columns,
another one the odd ones.
"""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
NAN_BITS = tl.constexpr(0x7FC00000)  # a launch compares what a kernel names with what it was: NaN is never equal
INF_BITS = tl.constexpr(0x7F800000)
FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """Return the bits of fp32 numbers, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits: tl.tensor) -> tl.tensor:
    """Return the fp32 numbers of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def place(LAST_FIRST: tl.constexpr) -> tl.tensor:
    """Return which tile this program has; the last one is the first to begin if a kernel before it ended there."""
    return tl.num_programs(0) - 1 - tl.program_id(0) if LAST_FIRST else tl.program_id(0)


@triton.jit
def blocks_at(blocks: tl.tensor, columns: tl.tensor, SQUARE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return `blocks_of` the tile of this program."""
    return blocks_of(tl.program_id(0), blocks, columns, SQUARE, TILE)


@triton.jit
def blocks_of(
    tile: tl.tensor, blocks: tl.tensor, columns: tl.tensor, SQUARE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Return (first block of a tile, int64; its blocks, counted from there; which of them there are).

    A tile is TILE blocks that follow each other or, for square blocks, TILE // SQUARE blocks of each of SQUARE rows.
    `columns` is how many blocks a row has, `blocks` how many there are.
    """
    if SQUARE == 1:
        first = tile.to(tl.int64) * TILE
        at = tl.arange(0, TILE)
        there = at < tl.minimum(blocks - first, TILE).to(tl.int32)
    else:
        WIDTH: tl.constexpr = TILE // SQUARE
        tiles = tl.cdiv(columns, WIDTH)
        group = tile // tiles
        column = (tile - group * tiles) * WIDTH
        first = (group * SQUARE).to(tl.int64) * columns + column
        across = tl.arange(0, TILE) % WIDTH
        at = tl.arange(0, TILE) // WIDTH * columns + across
        left = tl.minimum(blocks - first, SQUARE * columns).to(tl.int32)
        there = (across < columns - column) & (at < left)
    return first, at, there


@triton.jit
def pairs_at(at: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Return where the pairs (or other lanes) of blocks stand among all of them: [TILE, PAIRS]."""
    return at[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]


@triton.jit
def halves(word: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the numbers of words, fp32: (those of even columns, which are the low halves; those of odd ones)."""
    if ELEMENT == tl.bfloat16:
        low, high = number_of(word << 16), number_of(word & -0x10000)
    elif ELEMENT == tl.float16:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low, high = number_of(word.to(tl.int32)), number_of((word >> 32).to(tl.int32))
    return low, high


@triton.jit
def joined(
    low: tl.tensor, high: tl.tensor, ELEMENT: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr
) -> tl.tensor:
    """Return the inverse of `halves`: [TILE, 2 * PAIRS] in the dtype that values are stored in, see `rounded`."""
    return rounded(tl.reshape(tl.join(low, high), [TILE, 2 * PAIRS]), ELEMENT)


@triton.jit
def rounded(x: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return fp32 numbers in the dtype that values are stored in; in fp32 every NaN is the default one."""
    if ELEMENT == tl.float32:
        bits = bits_of(x)
        x = number_of(tl.where((bits & 0x7FFFFFFF) > INF_BITS, NAN_BITS, bits))
    return x.to(ELEMENT)


@triton.jit
def finite(x: tl.tensor) -> tl.tensor:
    """Return x, with 0 in place of what is not finite."""
    return tl.where(tl.abs(x) < INF, x, 0.0)


@triton.jit
def whole(x: tl.tensor) -> tl.tensor:
    """Return x, with NaN in place of what is not finite."""
    return tl.fma(x, 0.0, x)


@triton.jit
def larger_number(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the larger of two numbers, or the one that is no NaN."""
    return tl.maximum(a, b)


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(low: tl.tensor, high: tl.tensor, SQUARE: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude of each block, [TILE]; NaN or infinite if an element is."""
    return largest(_larger(tl.abs(low), tl.abs(high)), SQUARE)


@triton.jit
def number_amax_of(low: tl.tensor, high: tl.tensor, SQUARE: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude of each block's elements that are no NaN, [TILE]; 0 if there is none."""
    return largest_number(larger_number(tl.abs(low), tl.abs(high)), SQUARE)


@triton.jit
def largest(magnitudes: tl.tensor, SQUARE: tl.constexpr) -> tl.tensor:
    """Return the largest of each block's magnitudes [TILE, lanes]."""
    return _of_square(tl.reduce(magnitudes, 1, _larger), SQUARE)


@triton.jit
def largest_number(magnitudes: tl.tensor, SQUARE: tl.constexpr) -> tl.tensor:
    """Return the largest of each block's magnitudes [TILE, lanes] that are no NaN; 0 if there is none."""
    return _of_square(tl.maximum(tl.reduce(magnitudes, 1, larger_number), 0.0), SQUARE)


@triton.jit
def _of_square(amax: tl.tensor, SQUARE: tl.constexpr) -> tl.tensor:
    """Return the largest of the rows' amaxes of each square block, in each of its rows."""
    if SQUARE > 1:
        rows = tl.reshape(amax, [SQUARE, amax.shape[0] // SQUARE])
        amax = tl.reshape(tl.broadcast_to(tl.reduce(rows, 0, _larger)[None, :], rows.shape), amax.shape)
    return amax


@triton.jit
def nearest(x: tl.tensor, LEAST: tl.constexpr, ONE: tl.constexpr) -> tl.tensor:
    """Return (power of two below x, but at least LEAST; x + ONE times it) for x >= 0.

    fp32 has no bits for less than 2^-23 of the sum's leading bit: with ONE = 2^(23 - m), it is rounded to m bits behind
    that of x, ties to even, and its lowest bits count steps of that size. The product is exact.
    """
    power = tl.maximum(number_of(bits_of(x) & INF_BITS), LEAST)
    return power, tl.fma(power, ONE, x)


@triton.jit
def byte_of(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the byte of two codes; only the low nibbles of both count."""
    return ((low & 0xF) | (high << 4)).to(tl.uint8)
