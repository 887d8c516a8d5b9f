"""The kernels of the fused step, in Triton: a table of pointers in, masters, moments and parts out.

A row of the table (table.py) is a shard; a program takes a tile of one of them. `step` reads gradient, master and
moments once, and writes masters, moments and what the weight stores of the master: its parts, where scales belong to
blocks that a program holds; the dense weight; nothing, where the weight is its own master; or only the amax that a
tensor-wide scale needs. `encode_under` writes the parts of the last ones once all ranks know that amax.

Arithmetic. Every operation is the one that torch's foreach kernels do on CUDA, in fp32 and in their order. Their
machine code (torch 2.11, sm_90) fuses `a + alpha * b` into one fma, everywhere; divides and takes roots rounded to
nearest; and rounds after each operation of a step, since each is a kernel that writes what it made. So `fma` stands
where theirs is, and nothing else is contracted. (torch's own fused kernel orders a step otherwise, and takes powers of
the betas in fp32.)

    Adam    g = g * sign;  g = fma(l2, p, g);  p = p * decay
            m = fma(w1, g - m, m)           w1 = 1 - beta1; from 0.5 on  fma(m - g, 1 - w1, g)
            v = fma(w2, g * g, v * beta2)   w2 = 1 - beta2
            p = fma(step_size, m / (sqrt(v) / root + eps), p)       step_size = -lr / (1 - beta1^t), in double before
    SGD     g = g * sign;  g = fma(l2, p, g);  b = fma(take, g, b * momentum);  g = b or fma(momentum, b, g)
            p = fma(step_size, g, p)        step_size = -lr

How a format makes bytes of fp32 numbers is what its kernel in qtensor/numerics/triton_kernels does.
"""

import triton
import triton.language as tl

from qtensor.numerics.triton_kernels import e2m1, e8m0, float8, fp8, int4, mxfp4, mxfp8, nvfp4
from qtensor.numerics.triton_kernels.pairs import (
    FLT_MAX,
    INF,
    amax_of,
    bits_of,
    byte_of,
    finite,
    largest,
    number_of,
)
from qtensor.optim.fused import table as _table
from qtensor.optim.fused.decision import Option as _Option

# where a row holds what: in words of 8 bytes, and numbers behind them in words of 4
GRAD, MASTER, FIRST, SECOND = (tl.constexpr(_table.WORDS.index(name)) for name in ("grad", "master", "first", "second"))
OUT, SCALE, WIDE = (tl.constexpr(_table.WORDS.index(name)) for name in ("out", "scale", "wide"))
BLOCKS, COLUMNS, LENGTH = (tl.constexpr(_table.WORDS.index(name)) for name in ("blocks", "columns", "length"))
BEGIN, SLOT = (tl.constexpr(_table.WORDS.index(name)) for name in ("begin", "slot"))
ROW = tl.constexpr(_table.ROW)
NUMBERS = tl.constexpr(2 * len(_table.WORDS))
ALIGNED = tl.constexpr(_table.ALIGNED)
E5M2, POWERS_OF_TWO, ROUNDED_UP = (
    tl.constexpr(int(option)) for option in (_Option.E5M2, _Option.POWERS_OF_TWO, _Option.ROUNDED_UP)
)


@triton.jit
def step(
    table: tl.tensor,
    numbers: tl.tensor,
    owner: tl.tensor,
    amax: tl.tensor,
    RULE: tl.constexpr,
    FORMAT: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Step a tile. `numbers` is the table again, as fp32; `owner` [programs]: the row of each; `amax`: int32 bits."""
    row = tl.load(owner + tl.program_id(0))
    words, own = table + row * ROW, numbers + (row * (2 * ROW) + NUMBERS)
    first, at, there = tile_of(words, SQUARE, TILE)
    where, lanes, known = lanes_of(words, first, at, there, LANES, MULTIPLE, TILE)
    p = stepped(words, own, where, lanes, known, RULE, GRADS, ALIGNED_GRADS)
    if SQUARE > 1:
        # what no element is there for may be 0 / 0 by now, and would mark its block as not finite
        p = tl.where(known, p, 0.0)
    if FORMAT == "dense":
        out = aligned(words + OUT, ELEMENT)
        tl.store(out + (where + lanes), p.to(ELEMENT), mask=known)
    elif FORMAT == "amax":
        slot = tl.load(words + SLOT)
        # numbers without a sign are in the order of their bits, and a maximum does not depend on who comes first
        tl.atomic_max(amax + slot, bits_of(tl.max(tl.max(tl.abs(finite(p)), 1), 0)), sem="relaxed")
    elif FORMAT != "own":
        write_parts(p, words, first, at, there, where, lanes, known, FORMAT, LANES, SQUARE, TILE, OPTIONS)


@triton.jit
def step_long(
    table: tl.tensor,
    numbers: tl.tensor,
    owner: tl.tensor,
    RULE: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
    MULTIPLE: tl.constexpr,
    SQUARE: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Step a block of Float8 of which registers hold a piece, DEEP rows of WIDE numbers: a row, or a large square.

    Its codes wait for its largest number. So it goes through the block twice, and finds the masters in the cache.
    """
    row = tl.load(owner + tl.program_id(0))
    words, own = table + row * ROW, numbers + (row * (2 * ROW) + NUMBERS)
    block = tl.program_id(0) - tl.load(words + BEGIN).to(tl.int32)
    length, columns = tl.multiple_of(tl.load(words + LENGTH).to(tl.int32), MULTIPLE), tl.load(words + COLUMNS)
    across = tl.multiple_of((length * columns).to(tl.int32), MULTIPLE)  # numbers of a row
    columns = columns.to(tl.int32)
    top = block // columns * SQUARE
    where = top.to(tl.int64) * across + block % columns * length
    left = tl.load(words + BLOCKS).to(tl.int32) // columns - top  # rows
    deep, wide = tl.arange(0, DEEP)[:, None], tl.arange(0, WIDE)[None, :]
    largest_yet = tl.zeros([DEEP, WIDE], dtype=tl.float32)
    for down in range(0, SQUARE, DEEP):
        for aside in range(0, length, WIDE):
            lanes = (down + deep) * across + (aside + wide)
            known = (down + deep < left) & (aside + wide < length)
            p = stepped(words, own, where, lanes, known, RULE, GRADS, ALIGNED_GRADS)
            largest_yet = tl.maximum(largest_yet, tl.abs(finite(tl.where(known, p, 0.0))))
    enc, dec = float8.scales(tl.max(tl.max(largest_yet, 1), 0), (E5M2 & OPTIONS) == 0, (POWERS_OF_TWO & OPTIONS) != 0)
    under = tl.arange(0, SQUARE)
    scales = aligned(words + SCALE, tl.float32) + (top + under) * columns + block % columns
    tl.store(scales, tl.zeros([SQUARE], dtype=tl.float32) + dec, mask=under < left)
    masters, out = aligned(words + MASTER, tl.float32), aligned(words + OUT, tl.uint8)
    for down in range(0, SQUARE, DEEP):
        for aside in range(0, length, WIDE):
            lanes = (down + deep) * across + (aside + wide)
            known = (down + deep < left) & (aside + wide < length)
            # each thread reads what it wrote itself
            p = tl.load(masters + (where + lanes), mask=known, other=0.0)
            tl.store(out + (where + lanes), fp8.code(p, enc, (E5M2 & OPTIONS) == 0), mask=known)


@triton.jit
def stepped(
    words: tl.tensor,
    own: tl.tensor,
    where: tl.tensor,
    lanes: tl.tensor,
    known: tl.tensor,
    RULE: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
) -> tl.tensor:
    """Return masters after a step, which it writes, and the state as well."""
    grads = tl.load(words + GRAD).to(tl.pointer_type(GRADS))
    if ALIGNED_GRADS:
        grads = tl.multiple_of(grads, ALIGNED)
    masters = aligned(words + MASTER, tl.float32)
    g = tl.load(grads + (where + lanes), mask=known, other=0.0).to(tl.float32)
    p = tl.load(masters + (where + lanes), mask=known, other=0.0)
    g = g * tl.load(own + 0)
    l2 = tl.load(own + 1)
    g = tl.where(l2 != 0.0, tl.fma(l2, p, g), g)
    if RULE == "adam":
        firsts, seconds = aligned(words + FIRST, tl.float32), aligned(words + SECOND, tl.float32)
        m = tl.load(firsts + (where + lanes), mask=known, other=0.0)
        v = tl.load(seconds + (where + lanes), mask=known, other=0.0)
        p, m, v = adam(p, g, m, v, own)
        tl.store(firsts + (where + lanes), m, mask=known)
        tl.store(seconds + (where + lanes), v, mask=known)
    elif RULE == "momentum":
        firsts = aligned(words + FIRST, tl.float32)
        b = tl.load(firsts + (where + lanes), mask=known, other=0.0)
        p, b = momentum(p, g, b, own)
        tl.store(firsts + (where + lanes), b, mask=known)
    else:
        p = tl.fma(tl.load(own + 5), g, p)
    tl.store(masters + (where + lanes), p, mask=known)
    return p


@triton.jit
def encode_under(
    table: tl.tensor,
    owner: tl.tensor,
    amax: tl.tensor,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Write the parts of a tile of masters under `amax`, fp32, one for each row's slot."""
    row = tl.load(owner + tl.program_id(0))
    words = table + row * ROW
    first, at, there = tile_of(words, SQUARE, TILE)
    where, lanes, known = lanes_of(words, first, at, there, LANES, MULTIPLE, TILE)
    p = tl.load(aligned(words + MASTER, tl.float32) + (where + lanes), mask=known, other=0.0)
    wide = tl.load(amax + tl.load(words + SLOT))
    begins = tl.program_id(0) == tl.load(words + BEGIN)
    out = tl.load(words + WIDE).to(tl.pointer_type(tl.float32))
    if FORMAT == "float8":
        enc, dec = float8.scales(wide, (E5M2 & OPTIONS) == 0, (POWERS_OF_TWO & OPTIONS) != 0)
        tl.store(out, dec, mask=begins)
        code = fp8.code(p, enc, (E5M2 & OPTIONS) == 0)
        tl.store(aligned(words + OUT, tl.uint8) + (where + lanes), code, mask=known)
    else:
        enc, dec = nvfp4.global_scales(wide)
        tl.store(out, dec, mask=begins)
        low, high = halves(p, TILE, LANES)
        whole_low, whole_high = finite(low), finite(high)
        code, rounded = fp8.e4m3(tl.minimum(amax_of(whole_low, whole_high, SQUARE) * (enc * nvfp4.SIXTH), 448.0))
        code = tl.where(amax_of(low, high, SQUARE) < INF, code, fp8.NAN_CODE)
        tl.store(aligned(words + SCALE, tl.uint8) + (first + at), code.to(tl.uint8), mask=there)
        enc = tl.minimum(tl.math.div_rn(1.0, rounded * dec), FLT_MAX)[:, None]
        byte = byte_of(e2m1.code(whole_low, enc), e2m1.code(whole_high, enc))
        store_bytes(byte, words, first, at, there, LANES)


@triton.jit
def write_parts(
    p: tl.tensor,
    words: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    where: tl.tensor,
    lanes: tl.tensor,
    known: tl.tensor,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Write payload and scales of blocks, whose numbers are p [TILE, LANES]."""
    if FORMAT == "float8":
        enc, dec = float8.scales(
            largest(tl.abs(finite(p)), SQUARE), (E5M2 & OPTIONS) == 0, (POWERS_OF_TWO & OPTIONS) != 0
        )
        tl.store(aligned(words + SCALE, tl.float32) + (first + at), dec, mask=there)
        code = fp8.code(p, enc[:, None], (E5M2 & OPTIONS) == 0)
        tl.store(aligned(words + OUT, tl.uint8) + (where + lanes), code, mask=known)
    elif FORMAT == "mxfp8":
        amax = largest(tl.abs(finite(p)), SQUARE)
        if (ROUNDED_UP & OPTIONS) != 0:
            code = e8m0.code_up(amax * (mxfp8.E4M3_RECIPROCAL if (E5M2 & OPTIONS) == 0 else mxfp8.E5M2_RECIPROCAL))
        else:
            code = e8m0.code_floor(amax, 8 if (E5M2 & OPTIONS) == 0 else 15)
        marked = tl.where(largest(tl.abs(p), SQUARE) < INF, code, e8m0.NAN_CODE)
        tl.store(aligned(words + SCALE, tl.uint8) + (first + at), marked.to(tl.uint8), mask=there)
        byte = fp8.code(p, e8m0.power_of_two(254 - code)[:, None], (E5M2 & OPTIONS) == 0)
        tl.store(aligned(words + OUT, tl.uint8) + (where + lanes), byte, mask=known)
    else:
        low, high = halves(p, TILE, LANES)
        whole_low, whole_high = finite(low), finite(high)
        amax, marks = amax_of(whole_low, whole_high, 1), amax_of(low, high, 1)
        if FORMAT == "mxfp4":
            code = e8m0.code_up(amax * mxfp4.SIXTH) if (ROUNDED_UP & OPTIONS) != 0 else e8m0.code_floor(amax, 2)
            marked = tl.where(marks < INF, code, e8m0.NAN_CODE).to(tl.uint8)
            tl.store(aligned(words + SCALE, tl.uint8) + (first + at), marked, mask=there)
            enc = e8m0.power_of_two(254 - code)[:, None]
            byte = byte_of(e2m1.code(whole_low, enc), e2m1.code(whole_high, enc))
        else:
            bits = bits_of(tl.math.div_rn(amax, 7.5))
            code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            code = tl.where(code == 0, int4.ONE_BITS, code)
            marked = tl.where(marks < INF, code, int4.NAN_CODE).to(tl.int16)
            tl.store(aligned(words + SCALE, tl.int16) + (first + at), marked, mask=there)
            dec = number_of(code << 16)
            factor = tl.where(dec < int4.TINY, int4.LARGER, 1.0)
            dec = dec * factor
            enc, dec, factor = tl.math.div_rn(1.0, dec)[:, None], dec[:, None], factor[:, None]
            byte = byte_of(int4.number(whole_low * factor, enc, dec), int4.number(whole_high * factor, enc, dec))
        store_bytes(byte, words, first, at, there, LANES)


@triton.jit
def store_bytes(
    byte: tl.tensor, words: tl.tensor, first: tl.tensor, at: tl.tensor, there: tl.tensor, LANES: tl.constexpr
) -> None:
    """Write bytes of two codes each, [TILE, LANES // 2]."""
    PAIRS: tl.constexpr = LANES // 2
    pairs = at[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    tl.store(aligned(words + OUT, tl.uint8) + (first * PAIRS + pairs), byte, mask=there[:, None])


@triton.jit
def halves(p: tl.tensor, TILE: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """Return the numbers of even and of odd columns, [TILE, LANES // 2] each."""
    return tl.split(tl.reshape(p, [TILE, LANES // 2, 2]))


@triton.jit
def aligned(word: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the pointer in a word of the table; so many bytes divide it that threads move several numbers at once."""
    return tl.multiple_of(tl.load(word).to(tl.pointer_type(ELEMENT)), ALIGNED)


@triton.jit
def tile_of(words: tl.tensor, SQUARE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return (first block of this program, int64; its blocks, counted from there; which of them there are).

    See `blocks_at` (pairs.py): here the number of a program counts from the first one of its shard.
    """
    tile = (tl.program_id(0) - tl.load(words + BEGIN)).to(tl.int32)
    blocks = tl.load(words + BLOCKS)
    if SQUARE == 1:
        first = tile.to(tl.int64) * TILE
        at = tl.arange(0, TILE)
        there = at < tl.minimum(blocks - first, TILE).to(tl.int32)
    else:
        WIDTH: tl.constexpr = TILE // SQUARE
        columns = tl.load(words + COLUMNS).to(tl.int32)
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
def lanes_of(
    words: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    LANES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return where the first block begins, int64; its numbers and those of the others from there, and which there are.

    A block has LANES numbers (MULTIPLE: 0), or fewer, which MULTIPLE divides.
    """
    lane = tl.arange(0, LANES)[None, :]
    if MULTIPLE == 0:
        where = first * LANES
        lanes, known = at[:, None] * LANES + lane, tl.broadcast_to(there[:, None], [TILE, LANES])
    else:
        length = tl.multiple_of(tl.load(words + LENGTH).to(tl.int32), MULTIPLE)
        where = first * length
        lanes, known = at[:, None] * length + lane, there[:, None] & (lane < length)
    return where, lanes, known


@triton.jit
def adam(p: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor, own: tl.tensor) -> tl.tensor:
    """Return (p, m, v) after a step."""
    p = p * tl.load(own + 2)
    weight, rest = tl.load(own + 3), tl.load(own + 4)
    apart = g - m
    small = tl.abs(weight) < 0.5
    m = tl.fma(tl.where(small, apart, 0.0 - apart), tl.where(small, weight, rest), tl.where(small, m, g))
    v = tl.fma(tl.load(own + 6), g * g, v * tl.load(own + 5))
    below = tl.math.div_rn(tl.math.sqrt_rn(v), tl.load(own + 7)) + tl.load(own + 8)
    return tl.fma(tl.load(own + 9), tl.math.div_rn(m, below), p), m, v


@triton.jit
def momentum(p: tl.tensor, g: tl.tensor, b: tl.tensor, own: tl.tensor) -> tl.tensor:
    """Return (p, b) after a step of SGD."""
    keep = tl.load(own + 2)
    b = tl.fma(tl.load(own + 3), g, b * keep)
    g = tl.where(tl.load(own + 4) != 0.0, tl.fma(keep, b, g), b)
    return tl.fma(tl.load(own + 5), g, p), b
