"""Measures one contender of `memory` in a process of its own, and prints figures as JSON in the last line.

    python -m benchmarks.memory_process "MXFP8, fp32 masters" --full

A process for each, so that no other's kernels, caches and pieces of memory are in the count. It takes the same steps
again and again: once unmeasured, which compiles; once by the process's pages; then by the allocator, each share alone.
"""

import argparse
import json
import warnings
from dataclasses import replace
from typing import Any

from benchmarks.allocations import Meter, OfAllocator, OfProcess
from benchmarks.memory_contenders import CONTENDERS, Contender
from benchmarks.memory_step import SHARES, Size, figures, measure
from benchmarks.timing import two_threads

# A block of Llama-3.2-1B, of whose 16 blocks and 128256 tokens this is a sixteenth; and one of half its width.
FULL = Size(hidden=2048, inner=8192, groups=4, vocabulary=8064)
QUICK = Size(hidden=1024, inner=4096, groups=4, vocabulary=4032)


class Unmeasured(Meter):
    """Takes no note."""

    def __enter__(self) -> "Unmeasured":
        return self

    def mark(self, name: str) -> None:
        """Nothing."""


def of_contender(contender: Contender, size: Size, *, deeper: bool) -> dict[str, Any]:
    """Figures of each share; deeper: of the linears of twice as many blocks, too."""
    measure(contender, size, "model", Unmeasured(), "cpu")
    found: dict[str, Any] = {}
    if OfProcess.can():
        by_process = OfProcess()
        parts = measure(contender, size, "model", by_process, "cpu")
        found["process"] = {
            name: round(figures(parts, by_process)[name], 3) for name in ("rest", "with gradients", "peak")
        }
    for share in SHARES:
        found[share] = _by_allocator(contender, size, share)
    if deeper:
        twice = replace(size, layers=2 * size.layers)
        found["linears of twice the blocks"] = _by_allocator(contender, twice, "linears")
    return found


def _by_allocator(contender: Contender, size: Size, share: Any) -> dict[str, Any]:
    meter = OfAllocator()
    return figures(measure(contender, size, share, meter, "cpu"), meter)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_process", description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--full", action="store_true", help="a block of Llama-3.2-1B, and two of them")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # other libraries'
    with two_threads():
        found = of_contender(CONTENDERS[options.contender], FULL if options.full else QUICK, deeper=options.full)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
