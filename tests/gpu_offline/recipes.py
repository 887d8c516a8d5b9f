"""The recipes whose code for GPUs is looked at: one form of each format a granularity."""

from __future__ import annotations

from typing import Any

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

# Named as the golden files are.
RECIPES: dict[str, Any] = {
    "float8_row": Float8CurrentScaling(),
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "float8_block_square": Float8BlockScaling(),
    "float8_block_row": Float8BlockScaling(blocks="row"),
    "mxfp8_row": MXFP8BlockScaling(),
    "mxfp8_square": MXFP8BlockScaling(blocks="square"),
    "nvfp4_row": NVFP4BlockScaling(),
    "nvfp4_square": NVFP4BlockScaling(blocks="square"),
    "mxfp4_up": MXFP4BlockScaling(),
    "int4_32": Int4GroupScaling(group=32),
}
