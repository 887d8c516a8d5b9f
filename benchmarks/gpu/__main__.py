"""Answers one question in this process: `python -m benchmarks.gpu kernels`; `make gpu` asks all (asking.py)."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu.asking import QUESTIONS, module_of, rows_within
from benchmarks.gpu.question import FULL, TINY, Row
from benchmarks.gpu.table import of_question

parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
parser.add_argument("question", choices=QUESTIONS)
parser.add_argument("--into", type=Path, help="a file that gets each row as JSON, in a line")
parser.add_argument("--seconds", type=float, default=600.0, help="after which no further row is begun")
parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny sizes: does it run at all")


def main() -> None:
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny asks the CPU, which shows that it runs and no more")
    began, rows = time.monotonic(), list[Row]()

    def take(row: Row) -> None:
        rows.append(row)
        print(f"{time.monotonic() - began:6.1f} s  {row.told()}", flush=True)
        if options.into is not None:
            with options.into.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    rows_within(module_of(options.question), TINY if options.tiny else FULL, options.seconds, take)
    if options.into is None:
        print("\n".join(["", *of_question(rows)]))


if __name__ == "__main__":
    main()
