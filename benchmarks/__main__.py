"""Runs every benchmark and writes one JSON with machine, versions and command beside the figures."""

import datetime as dt
import importlib
import json
import platform
import sys
from pathlib import Path

from benchmarks.machine import machine_and_versions

QUESTIONS = ("numerics", "plan_scaling")


def main() -> None:
    """Ask all questions, or those named on the command line."""
    names = sys.argv[1:] or QUESTIONS
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
    print(f"written to {out}")


if __name__ == "__main__":
    main()
