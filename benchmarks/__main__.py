"""Runs every benchmark and writes one JSON with machine, versions and command beside the figures."""

import datetime as dt
import importlib
import json
import os
import platform
import sys
from pathlib import Path

import torch

QUESTIONS = ("numerics", "plans")


def main() -> None:
    """Ask all questions, or those named on the command line."""
    names = sys.argv[1:] or QUESTIONS
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    results = {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for name in names:
        print(f"{name} ...", flush=True)
        results[name] = importlib.import_module(f"benchmarks.{name}").run()
    out = Path(__file__).parent / "results" / f"{dt.date.today().isoformat()}-{platform.machine()}-cpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
