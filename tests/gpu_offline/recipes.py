"""The recipes whose code for GPUs is looked at: one form of each format a granularity."""

from __future__ import annotations

from typing import Any

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

# Named as the golden files are.
RECIPES: dict[str, Any] = {
    "float8_row": Float8CurrentScaling(),
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "mxfp8_row": MXFP8BlockScaling(),
    "mxfp8_square": MXFP8BlockScaling(blocks="square"),
    "nvfp4_row": NVFP4BlockScaling(),
    "nvfp4_square": NVFP4BlockScaling(blocks="square"),
}
