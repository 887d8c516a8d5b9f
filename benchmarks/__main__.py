"""Runs every benchmark and writes one JSON with machine, versions and command beside the figures.

    python -m benchmarks               # all questions, cheap ones first, into results/<date>-<machine>-cpu.json
    python -m benchmarks checkpoints   # some; their names end the file's name

A question is a module with `run() -> dict`; one with `report(results, picture)` also prints what a reader wants to know
and draws it, in results/<date>-<question>.png.
"""

import datetime as dt
import importlib
import importlib.util
import json
import platform
import sys
from pathlib import Path

from benchmarks.machine import machine_and_versions

QUESTIONS = ("numerics", "plan_scaling", "staging", "checkpoints", "calibration")


def main() -> None:
    """Ask all questions, or those named on the command line."""
    names = sys.argv[1:] or [name for name in QUESTIONS if importlib.util.find_spec(f"benchmarks.{name}")]
    results = {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        **machine_and_versions(),
    }
    for name in names:
        print(f"{name} ...", flush=True)
        results[name] = importlib.import_module(f"benchmarks.{name}").run()
    label = "-".join([dt.date.today().isoformat(), platform.machine(), "cpu", *sys.argv[1:]])
    out = Path(__file__).parent / "results" / f"{label}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "report"):
            module.report(results[name], out.with_name(f"{dt.date.today().isoformat()}-{name}.png"))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
