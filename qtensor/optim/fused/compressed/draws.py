"""Random bits in Triton: what qtensor/states/draws.py draws for an element, of its row's key and its column.

    bits = mix(row key ^ salt ^ column * GOLDEN),   mix(x) = last(tail(x ^ x >> 16))

A shift of a sum without carries is the sum of shifts, so x ^ x >> 16 is made of rows and of columns apart: `spread`
columns are the same for all draws of an element. `last` changes the lower 16 bits alone: who takes the upper ones needs
only `upper`.
"""

import triton
import triton.language as tl

from qtensor.optim.compressed.entries import salt_of
from qtensor.states import draws as _draws
from qtensor.states import remainders as _remainders

GOLDEN = tl.constexpr(_draws.GOLDEN)
FIRST, SECOND = tl.constexpr(_draws.FACTORS[0]), tl.constexpr(_draws.FACTORS[1])
HALF = tl.constexpr(_draws.HALF)
OF_WEIGHT = tl.constexpr(0)  # the salt of a master's first rounding
APART = tl.constexpr(_remainders.APART)  # of its second one


OF_FIRST, OF_SECOND = tl.constexpr(salt_of("exp_avg")), tl.constexpr(salt_of("exp_avg_sq"))


@triton.jit
def shifted(x: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    """Return int32 x >> BY, with zeros from the left."""
    return (x.to(tl.uint32, bitcast=True) >> BY).to(tl.int32, bitcast=True)


@triton.jit
def spread(x: tl.tensor) -> tl.tensor:
    """Return x ^ x >> 16."""
    return x ^ shifted(x, 16)


@triton.jit
def tail(x: tl.tensor) -> tl.tensor:
    """Return the hash of what is `spread`, but for its `last` step."""
    x = x * FIRST
    return (x ^ shifted(x, 15)) * SECOND


@triton.jit
def row_keys(first: tl.tensor, second: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """Return the keys of rows, int32, of the two words that a weight has in a step; rows < 2^31."""
    inner = spread(tail(spread(rows ^ first)))
    return spread(tail(spread(inner + second)))


@triton.jit
def upper(keys: tl.tensor, columns: tl.tensor, SALT: tl.constexpr, DRAWN: tl.constexpr) -> tl.tensor:
    """Return bits of elements, the lower 16 of which are none: of keys [rows, 1] and `spread` columns, int32."""
    if DRAWN:
        x = tail(spread(keys ^ SALT) ^ columns)
    else:
        x = tl.full([1, 1], HALF, dtype=tl.int32)
    return x


@triton.jit
def drawn(keys: tl.tensor, columns: tl.tensor, SALT: tl.constexpr, DRAWN: tl.constexpr) -> tl.tensor:
    """Return bits of elements, int32: `states.remainders.draws_of`."""
    x = upper(keys, columns, SALT, DRAWN)
    if DRAWN:
        x = spread(x)
    return x
