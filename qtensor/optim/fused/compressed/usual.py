"""The step of MXFP8 weights and moments as it nearly always is: the definition's bytes, by a third of its instructions.

What is usual, for all numbers of a tile (else `usual` writes nothing, and `kernel.careful` does all of it):

    scales     of weight and moments from 2^-63 to 2^32 (the old weight's to 2^7); those of roots from 2^-43. So nothing
               overflows, is denormal where it matters, or is not finite. A first moment may be all zeros
    old weight no remainder is subtracted from an element that is 0
    options    beta1 > 0.5, root and eps of ordinary size (`decision.packed`)

Elements below the least normal one of their scale, where distances of a lattice are equal, need more: the second
rounding of masters, which draws anew, and another one for moments. A tile has such elements in one of 10 or 20 cases,
and a branch for each of the three.

Then an element's number on the lattice of its master is its code with 15 bits behind it, and these are an fp32 number
times 2^-120: masters are joined by one sum of integers. Remainders are sums beside 48 times the power of two below, in
whose low bits they stand. Roots and quotients are the sequences that CUDA has for numbers of ordinary size, without
asking for others; sqrt(v) / root knows 1 / root and its error. What is not a number stays that, through each of these.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from qtensor.numerics.triton_kernels import e8m0, fp8, mxfp8
from qtensor.numerics.triton_kernels.pairs import INF_BITS, NAN_BITS, bits_of, largest, number_of
from qtensor.optim.fused.compressed import lattice, places
from qtensor.optim.fused.compressed.draws import APART, OF_FIRST, OF_SECOND, OF_WEIGHT, drawn, shifted, upper

LANES = places.LANES
LARGEST = tl.constexpr(32767)  # a remainder
BITS, MOMENT_BITS, CODE_OF_FLOOR = tl.constexpr(18), tl.constexpr(3), tl.constexpr(133)  # see careful.py
SMALLEST = tl.constexpr(2.0**-6)  # normal element
# flags of blocks: to be done carefully; having elements below the least normal one
HARD, LOW_WEIGHT, LOW_FIRST, LOW_SECOND = (tl.constexpr(1 << number) for number in range(4))
# codes of scales; of the old weight, whose scale is multiplied by 2^120, at most another
LEAST, LEAST_ROOT, MOST, MOST_BEFORE = tl.constexpr(64), tl.constexpr(84), tl.constexpr(159), tl.constexpr(134)
DOWN_120 = tl.constexpr(2.0**-120)
NOISE = tl.constexpr(27)  # a shift that leaves the 5 bits of fp32 that masters do without
MOMENT_NOISE, MOMENT_LOW = tl.constexpr(12), tl.constexpr(-(2**20))


@triton.jit
def usual(
    grads: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    remainders: tl.tensor,
    firsts: tl.tensor,
    first_scales: tl.tensor,
    seconds: tl.tensor,
    second_scales: tl.tensor,
    block: tl.tensor,
    each: tl.tensor,
    there: tl.tensor,
    of_rows: tl.tensor,
    columns: tl.tensor,
    sign: tl.tensor,
    l2: tl.tensor,
    decay: tl.tensor,
    weight: tl.tensor,
    keep: tl.tensor,
    add: tl.tensor,
    correction: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    may: tl.tensor,
    WEIGHT: tl.constexpr,
    DRAWN: tl.constexpr,
) -> tl.tensor:
    """Step a tile of usual numbers; return whether it is none, and was left as it is.

    From `grads` to `second_scales`: pointers of the shard. `block` is the first one of the tile, `each` are all of
    them, counted from there, and `there` says which of them there are. `of_rows` are keys of the blocks' rows,
    `columns` what draws take of columns. From `sign` to `size`: numbers of the rule, see `table.NUMBERS`; `may` is 0 if
    they are none that are usual.
    """
    lane = tl.arange(0, LANES)[None, :]
    # a block that is not there is read as the first one, which is
    read = tl.where(there, each, 0)
    where, lanes = block * LANES, read[:, None] * LANES + lane
    base = tl.load(weights + (where + lanes))
    remainder = tl.load(remainders + (where + lanes)).to(tl.int32)
    if WEIGHT == "mxfp8":
        scale = tl.load(scales + (block + read)).to(tl.int32)
        p, origin = joined(base, remainder, scale)
        before = (scale < LEAST) | (scale > MOST_BEFORE)
    else:
        p = number_of(bits_of(base.to(tl.float32)) + remainder)
    g = tl.load(grads + (where + lanes)).to(tl.float32)
    # nothing, times what is finite, where weights do not decay by gradients
    g = tl.fma(l2, p, g * sign)
    p = p * decay

    m = kept(firsts, first_scales, where + lanes, block + read)
    m = tl.fma(g - m, weight, m)
    first_code, flags = scale_of(m, LEAST, LOW_FIRST)
    flags = tl.where(largest(tl.abs(m), 1) != 0.0, flags, 0)
    v = kept(seconds, second_scales, where + lanes, block + read)
    root = square_root(tl.fma(add, g * g, v * v * keep))
    second_code, more = scale_of(root, LEAST_ROOT, LOW_SECOND)
    flags |= more
    # root / correction, by 1 / correction in two parts; minus that and eps
    below = tl.fma(root, high, root * low)
    below = tl.fma(tl.fma(correction, below, root), high, below) - eps
    p = tl.fma(size, quotient(m, below), p)

    if WEIGHT == "mxfp8":
        noise = shifted(upper(of_rows, columns, OF_WEIGHT, DRAWN), NOISE)
        # NaN of p or of the old weight makes NaN; any other product is nothing beside the number
        x = tl.fma(origin, p, number_of((bits_of(p) + noise) & -32))
        code, more = scale_of(x, LEAST, LOW_WEIGHT)
        flags |= more | before.to(tl.int32)
    else:
        # the largest number, where a number is not finite or half-way between two of bf16
        raw = bits_of(p)
        wide = (raw + 0x7FFF + ((raw >> 16) & 1)) & -0x10000
        step = (raw & 0x7FFFFFFF) - (wide & 0x7FFFFFFF)
        flags |= (tl.max(tl.where(step > LARGEST, NAN_BITS, raw & 0x7FFFFFFF), 1) >= INF_BITS).to(tl.int32)
        stored = number_of(wide).to(tl.bfloat16)
    flags = tl.reduce(tl.where(there, flags, 0), 0, either)
    hard = (flags & HARD) | (may == 0.0).to(tl.int32)

    if WEIGHT == "mxfp8":
        if flags & LOW_WEIGHT:
            x = settled(x, code, of_rows, columns, DRAWN)
        scaled = x * power(254 - code)[:, None]
        stored, element = coded(scaled)
        # steps behind the element, in the low 16 bits
        binade = tl.maximum(number_of(bits_of(scaled) & INF_BITS), SMALLEST)
        step = bits_of(tl.fma(binade, 48.0, scaled - element))
    # stores that are done or not, and no branch around them: threads would exchange numbers to store them otherwise
    written = there & (hard == 0)
    all_known, lanes = written[:, None], each[:, None] * LANES + lane
    tl.store(weights + (where + lanes), stored, mask=all_known)
    store_words(remainders + where, step.to(tl.int16), each, written)
    if WEIGHT == "mxfp8":
        tl.store(scales + (block + each), code.to(tl.uint8), mask=written)
    byte = rounded(m, first_code, flags & LOW_FIRST, of_rows, columns, DRAWN, False)
    tl.store(firsts + (where + lanes), byte, mask=all_known)
    tl.store(first_scales + (block + each), first_code.to(tl.uint8), mask=written)
    byte = rounded(root, second_code, flags & LOW_SECOND, of_rows, columns, DRAWN, True)
    tl.store(seconds + (where + lanes), byte, mask=all_known)
    tl.store(second_scales + (block + each), second_code.to(tl.uint8), mask=written)
    return hard


@triton.jit
def store_words(at: tl.tensor, words: tl.tensor, each: tl.tensor, written: tl.tensor) -> None:
    """Store int16 [TILE, LANES] of blocks: each thread's 16 in two parts, as wide as a store is."""
    cut = tl.permute(tl.reshape(words, [words.shape[0], 2, 2, 8]), [0, 1, 3, 2])
    early, late = tl.split(cut)
    lanes = tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    there = written[:, None, None]
    tl.store(at + (each[:, None, None] * LANES + lanes), early, mask=there)
    tl.store(at + (each[:, None, None] * LANES + lanes + 8), late, mask=there)


@triton.jit
def kept(payload: tl.tensor, scales: tl.tensor, where: tl.tensor, blocks: tl.tensor) -> tl.tensor:
    """Return a moment as it is kept; what is NaN may be infinite."""
    dec = e8m0.power_of_two(tl.load(scales + blocks).to(tl.int32))
    return value(tl.load(payload + where)) * dec[:, None]


@triton.jit
def rounded(
    x: tl.tensor,
    code: tl.tensor,
    low: tl.tensor,
    of_rows: tl.tensor,
    columns: tl.tensor,
    DRAWN: tl.constexpr,
    ROOT: tl.constexpr,
) -> tl.tensor:
    """Return the payload of a moment under scales of these codes; `low`: whether some numbers need more, see above."""
    draws = drawn(of_rows, columns, OF_SECOND if ROOT else OF_FIRST, DRAWN)
    taken = number_of((bits_of(x) + shifted(draws, MOMENT_NOISE)) & MOMENT_LOW)
    if low:
        floor, magnitude = tl.maximum(code - CODE_OF_FLOOR, lattice.LEAST)[:, None], tl.abs(x)
        below = lattice.below(magnitude, MOMENT_BITS, floor, draws)
        if ROOT:
            below = tl.maximum(below, lattice.power(floor - MOMENT_BITS))
        taken = tl.where(lattice.is_below(magnitude, floor), lattice.signed(below, x), taken)
    # a sum with 0, so that -0.0 becomes 0.0
    byte, _ = coded(tl.fma(taken, power(254 - code)[:, None], 0.0))
    return byte


@triton.jit
def settled(x: tl.tensor, code: tl.tensor, of_rows: tl.tensor, columns: tl.tensor, DRAWN: tl.constexpr) -> tl.tensor:
    """Return masters after their second rounding."""
    floor, magnitude = (code - CODE_OF_FLOOR)[:, None], tl.abs(x)
    below = lattice.below(magnitude, BITS, floor, drawn(of_rows, columns, APART, DRAWN))
    return tl.where(lattice.is_below(magnitude, floor), lattice.signed(below, x), x)


@triton.jit
def either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the flags of both."""
    return a | b


@triton.jit
def joined(byte: tl.tensor, remainder: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return masters of elements, and the elements times 2^-120; NaN where a remainder is taken from 0."""
    origin = value(byte) * DOWN_120
    raw = bits_of(origin)
    # 32, or -32: numbers of one sign are counted from 0
    raw += remainder * ((raw >> 31) & -64 | 32)
    return number_of(raw) * power(scale + 120)[:, None], origin


@triton.jit
def scale_of(x: tl.tensor, LEAST_CODE: tl.constexpr, LOW: tl.constexpr) -> tl.tensor:
    """Return the codes of blocks' scales, and flags: HARD for other scales than usual ones, LOW for low elements."""
    code = e8m0.code_up(largest(tl.abs(x), 1) * mxfp8.E4M3_RECIPROCAL)
    low = tl.where(tl.min(tl.abs(x), 1) < power(code - 6), LOW, 0)
    return code, tl.where((code < LEAST_CODE) | (code > MOST), HARD, low)


@triton.jit
def power(code: tl.tensor) -> tl.tensor:
    """Return 2^(code - 127), for codes from 1 to 254."""
    return number_of(code << 23)


@triton.jit
def coded(scaled: tl.tensor) -> tl.tensor:
    """Return E4M3 of numbers that are not NaN, uint8, and their values."""
    if cuda_capability_geq(9, 0):
        element = scaled.to(tl.float8e4nv)
        byte, found = element.to(tl.uint8, bitcast=True), element.to(tl.float32)
    else:
        byte = fp8.counted(scaled, 1.0, True)
        found = fp8.e4m3_value(byte)
    return byte, found


@triton.jit
def value(byte: tl.tensor) -> tl.tensor:
    """Return the values of E4M3 codes, uint8."""
    if cuda_capability_geq(9, 0):
        found = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        found = fp8.e4m3_value(byte)
    return found


@triton.jit
def square_root(v: tl.tensor) -> tl.tensor:
    """Return the root, rounded to nearest, of numbers from 2^-98 on; NaN or infinite for 0 and what is denormal."""
    y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    root = v * y
    return tl.fma(tl.fma(root * -1.0, root, v), y * 0.5, root)


@triton.jit
def quotient(a: tl.tensor, minus: tl.tensor) -> tl.tensor:
    """Return a / -minus, rounded to nearest, where no step is denormal or overflows."""
    y = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [minus * -1.0], dtype=tl.float32, is_pure=True, pack=1
    )
    y = tl.fma(tl.fma(minus, y, 1.0), y, y)
    found = a * y
    found = tl.fma(tl.fma(minus, found, a), y, found)
    return tl.fma(tl.fma(minus, found, a), y, found)
