"""Where a row of the table holds what, for kernels (see table.py)."""

import triton.language as tl

from qtensor.optim.fused import table as _fused
from qtensor.optim.fused.compressed import table as _table

GRAD, WEIGHT_AT, SCALE, REMAINDER = (
    tl.constexpr(_table.WORDS.index(name)) for name in ("grad", "weight", "scale", "remainder")
)
FIRST, SECOND = (tl.constexpr(_table.WORDS.index(name)) for name in ("first", "second"))  # scales stand behind them
ROWS, COLUMNS, LENGTH = (tl.constexpr(_table.WORDS.index(name)) for name in ("rows", "columns", "length"))
TOP, LEFT, BEGIN = (tl.constexpr(_table.WORDS.index(name)) for name in ("top", "left", "begin"))
ROW = tl.constexpr(_table.ROW)
NUMBERS = tl.constexpr(2 * len(_table.WORDS))  # in words of 4 bytes
RECIPROCAL, USUAL, KEYS = (tl.constexpr(place) for place in (_table.RECIPROCAL, _table.USUAL, _table.KEYS))
ALIGNED = tl.constexpr(_fused.ALIGNED)
LANES = tl.constexpr(_table.BLOCK)
