"""One tile's step on compressed states, whatever its numbers are: the definition, operation by operation.

read      gradient, weight (payload and scale, or bf16), remainder, MXFP8 of the moments
master    value(count(weight) + remainder); moments in fp32: kept for no longer than a tile is in registers
step      torch's operations in their order, see ../kernel.py
written   weight and remainder of the rounded master, MXFP8 of the moments: qtensor/states
"""

import triton
import triton.language as tl

from qtensor.numerics.triton_kernels import e8m0, fp8, mxfp8
from qtensor.numerics.triton_kernels.pairs import INF, bits_of, finite, largest, number_of
from qtensor.optim.fused.compressed import lattice, places
from qtensor.optim.fused.compressed.draws import APART, OF_FIRST, OF_SECOND, OF_WEIGHT, drawn
from qtensor.optim.fused.kernel import adam, aligned

COLUMNS, LENGTH, FIRST, SECOND = places.COLUMNS, places.LENGTH, places.FIRST, places.SECOND
GRAD, WEIGHT_AT, SCALE, REMAINDER = places.GRAD, places.WEIGHT_AT, places.SCALE, places.REMAINDER
LANES, ALIGNED = places.LANES, places.ALIGNED
BITS, LEAST = tl.constexpr(18), tl.constexpr(-6)  # of E4M3's remainders
MOMENT_BITS = tl.constexpr(3)
LARGEST, HALF_WAY = tl.constexpr(32767), tl.constexpr(32768)


@triton.jit
def careful(
    words: tl.tensor,
    own: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    of_rows: tl.tensor,
    columns: tl.tensor,
    WEIGHT: tl.constexpr,
    MOMENTS: tl.constexpr,
    DRAWN: tl.constexpr,
    GRADS: tl.constexpr,
    ALIGNED_GRADS: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Step a tile, whatever its numbers are."""
    length = tl.multiple_of(tl.load(words + LENGTH).to(tl.int32), MULTIPLE)
    blocks = tl.load(words + COLUMNS).to(tl.int32)
    where = length.to(tl.int64) * top + left * LANES
    lane = tl.arange(0, LANES)[None, :]
    lanes = (at // WIDTH * length + at % WIDTH * LANES)[:, None] + lane
    known = there[:, None] & ((left + at % WIDTH)[:, None] * LANES + lane < length)
    block, each = blocks.to(tl.int64) * top + left, at // WIDTH * blocks + at % WIDTH
    grads = tl.load(words + GRAD).to(tl.pointer_type(GRADS))
    if ALIGNED_GRADS:
        grads = tl.multiple_of(grads, ALIGNED)
    g = tl.load(grads + (where + lanes), mask=known, other=0.0).to(tl.float32)
    p = master(words, where, lanes, known, block, each, there, WEIGHT)
    m = moment(words, FIRST, where, lanes, known, block, each, there, MOMENTS)
    v = moment(words, SECOND, where, lanes, known, block, each, there, MOMENTS)
    if MOMENTS == "float8":
        v = v * v
    g = g * tl.load(own + 0)
    l2 = tl.load(own + 1)
    g = tl.where(l2 != 0.0, tl.fma(l2, p, g), g)
    p, m, v = adam(p, g, m, v, own)
    # what no element is there for may be 0 / 0 by now, and would mark its block as not finite
    p = tl.where(known, p, 0.0)
    write_moment(words, FIRST, m, where, lanes, known, block, each, there, of_rows, columns, MOMENTS, DRAWN, False)
    write_moment(words, SECOND, v, where, lanes, known, block, each, there, of_rows, columns, MOMENTS, DRAWN, True)
    if WEIGHT == "own":
        tl.store(aligned(words + WEIGHT_AT, tl.float32) + (where + lanes), p, mask=known)
    elif WEIGHT == "dense":
        weight, remainder = cut(p)
        # half-way above a bf16 number whose last bit is 0: one fp32 step down, or up
        up = drawn(of_rows, columns, OF_WEIGHT, DRAWN) < 0
        moved = number_of(bits_of(p) + tl.where(up, 1, -1))
        weight, remainder = cut(tl.where(remainder == HALF_WAY, moved, p))
        remainder = tl.where(p == p, remainder, 0)  # noqa: PLR0124 - isnan
        tl.store(aligned(words + WEIGHT_AT, tl.bfloat16) + (where + lanes), weight, mask=known)
        tl.store(aligned(words + REMAINDER, tl.int16) + (where + lanes), remainder.to(tl.int16), mask=known)
    else:
        code, byte, remainder = split(p, of_rows, columns, DRAWN)
        tl.store(aligned(words + SCALE, tl.uint8) + (block + each), code, mask=there)
        tl.store(aligned(words + WEIGHT_AT, tl.uint8) + (where + lanes), byte, mask=known)
        tl.store(aligned(words + REMAINDER, tl.int16) + (where + lanes), remainder, mask=known)


@triton.jit
def master(
    words: tl.tensor,
    where: tl.tensor,
    lanes: tl.tensor,
    known: tl.tensor,
    block: tl.tensor,
    each: tl.tensor,
    there: tl.tensor,
    WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Return masters, fp32."""
    if WEIGHT == "own":
        p = tl.load(aligned(words + WEIGHT_AT, tl.float32) + (where + lanes), mask=known, other=0.0)
    else:
        left = tl.load(aligned(words + REMAINDER, tl.int16) + (where + lanes), mask=known, other=0).to(tl.int32)
        if WEIGHT == "dense":
            wide = tl.load(aligned(words + WEIGHT_AT, tl.bfloat16) + (where + lanes), mask=known, other=0.0)
            wide = wide.to(tl.float32)
            p = tl.where(wide == wide, number_of(bits_of(wide) + left), wide)  # noqa: PLR0124 - isnan
        else:
            byte = tl.load(aligned(words + WEIGHT_AT, tl.uint8) + (where + lanes), mask=known, other=0)
            code = tl.load(aligned(words + SCALE, tl.uint8) + (block + each), mask=there, other=0).to(tl.int32)
            base = fp8.value(byte, True) * e8m0.value(code)[:, None]
            floor = floor_of(code)[:, None]
            number = lattice.count(base, BITS, floor) + left
            p = tl.where(base == base, lattice.value(number, BITS, floor), base)  # noqa: PLR0124 - isnan
    return p


@triton.jit
def moment(
    words: tl.tensor,
    WORD: tl.constexpr,
    where: tl.tensor,
    lanes: tl.tensor,
    known: tl.tensor,
    block: tl.tensor,
    each: tl.tensor,
    there: tl.tensor,
    MOMENTS: tl.constexpr,
) -> tl.tensor:
    """Return a moment as it is kept, fp32: of a mean of squares in 8 bits its root."""
    if MOMENTS == "fp32":
        x = tl.load(aligned(words + WORD, tl.float32) + (where + lanes), mask=known, other=0.0)
    else:
        byte = tl.load(aligned(words + WORD, tl.uint8) + (where + lanes), mask=known, other=0)
        code = tl.load(aligned(words + (WORD + 1), tl.uint8) + (block + each), mask=there, other=0).to(tl.int32)
        x = fp8.value(byte, True) * e8m0.value(code)[:, None]
    return x


@triton.jit
def write_moment(
    words: tl.tensor,
    WORD: tl.constexpr,
    x: tl.tensor,
    where: tl.tensor,
    lanes: tl.tensor,
    known: tl.tensor,
    block: tl.tensor,
    each: tl.tensor,
    there: tl.tensor,
    of_rows: tl.tensor,
    columns: tl.tensor,
    MOMENTS: tl.constexpr,
    DRAWN: tl.constexpr,
    ROOT: tl.constexpr,
) -> None:
    """Write a moment: `states.moments.encode_moment`."""
    if MOMENTS == "fp32":
        tl.store(aligned(words + WORD, tl.float32) + (where + lanes), x, mask=known)
    else:
        x = tl.where(known, tl.math.sqrt_rn(x) if ROOT else x, 0.0)
        code, marked = scale_of(x)
        floor = floor_of(code)[:, None]
        draws = drawn(of_rows, columns, OF_SECOND if ROOT else OF_FIRST, DRAWN)
        magnitude = tl.abs(x)
        low = lattice.below(magnitude, MOMENT_BITS, floor, draws)
        above = lattice.by_mantissa(magnitude, MOMENT_BITS, draws)
        taken = tl.where(lattice.is_below(magnitude, floor), low, above)
        if ROOT:
            least = lattice.scaled(tl.full([1, 1], 1.0, dtype=tl.float32), floor - MOMENT_BITS)
            taken = tl.where(magnitude > 0.0, tl.maximum(taken, least), taken)
        taken = tl.where(magnitude < INF, lattice.signed(taken, x), x)
        byte = fp8.code(taken, e8m0.power_of_two(254 - code)[:, None], True)
        tl.store(aligned(words + (WORD + 1), tl.uint8) + (block + each), marked, mask=there)
        tl.store(aligned(words + WORD, tl.uint8) + (where + lanes), byte, mask=known)


@triton.jit
def split(x: tl.tensor, of_rows: tl.tensor, columns: tl.tensor, DRAWN: tl.constexpr) -> tl.tensor:
    """Return the scales, payload and remainders of masters: `states.remainders.rounded`, then `split`."""
    x = lattice.by_mantissa(x, BITS, drawn(of_rows, columns, OF_WEIGHT, DRAWN))
    code, marked = scale_of(x)
    floor = floor_of(code)[:, None]
    magnitude = tl.abs(x)
    low = lattice.below(magnitude, BITS, floor, drawn(of_rows, columns, APART, DRAWN))
    low = tl.where(lattice.is_below(magnitude, floor), low, magnitude)
    settled = tl.where(magnitude < INF, lattice.signed(low, x), x)
    byte = fp8.code(settled, e8m0.power_of_two(254 - code)[:, None], True)
    base = fp8.value(byte, True) * e8m0.power_of_two(code)[:, None]
    remainder = lattice.count(settled, BITS, floor) - lattice.count(base, BITS, floor)
    remainder = tl.where(magnitude < INF, tl.minimum(tl.maximum(remainder, -LARGEST), LARGEST), 0)
    return marked, byte, remainder.to(tl.int16)


@triton.jit
def scale_of(x: tl.tensor) -> tl.tensor:
    """Return the codes of blocks' scales, int32, and as they are stored, uint8: marked where not all is finite."""
    code = e8m0.code_up(largest(tl.abs(finite(x)), 1) * mxfp8.E4M3_RECIPROCAL)
    return code, tl.where(largest(tl.abs(x), 1) < INF, code, e8m0.NAN_CODE).to(tl.uint8)


@triton.jit
def floor_of(code: tl.tensor) -> tl.tensor:
    """Return the exponent from which on elements under these scales have all of their mantissa."""
    return tl.maximum(code - (127 - LEAST), lattice.LEAST)


@triton.jit
def cut(x: tl.tensor) -> tl.tensor:
    """Return bf16 and int32, how many fp32 numbers x is further from 0 than that."""
    raw = bits_of(x)
    wide = (raw + 0x7FFF + ((raw >> 16) & 1)) & -0x10000
    weight = tl.where(x == x, number_of(wide), x).to(tl.bfloat16)  # noqa: PLR0124 - isnan
    return weight, (raw & 0x7FFFFFFF) - (wide & 0x7FFFFFFF)
