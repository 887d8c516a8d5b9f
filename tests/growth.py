"""Whether cost is linear in size, without a clock: bytecodes that the product executes, counted.

A cost of a + b * n doubles its increment from (n, 2 n) to (2 n, 4 n), exactly, for nothing here depends on chance; one
with a quadratic term more than doubles it. What torch executes is not counted, and no loop inside of C functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCT = tuple(f"{ROOT / package}/" for package in ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise"))


def bytecodes(call: Callable[[], Any]) -> int:
    """How many bytecodes of the product's own functions `call` executes in this thread."""
    count = 0

    def within(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return within

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def assert_linear(what: str, costs: list[int]) -> None:
    """Of the costs at n, 2 n and 4 n."""
    once, twice, four = costs
    assert 0 < once < twice < four
    assert four - twice <= 2.002 * (twice - once), f"{what} is more than linear: {costs} at n, 2 n, 4 n"
