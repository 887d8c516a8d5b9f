"""What calls take of the host on a GPU, counted without one where `make gpu-offline` has built its environment.

Another Python runs the programs (tests/gpu_offline/host_time.py) on a GPU that does nothing. Where valgrind is there,
callgrind counts instructions besides, which are the same on quiet and on noisy machines.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
PYTHON = REPO / ".venv-gpu-offline" / "bin" / "python"
PROGRAMS = ["-m", "tests.gpu_offline.host_time"]
MOST = {"linear": 2.0, "FSDP2": 1.3}  # instructions over torch's


def measured() -> dict[str, dict[str, Any]] | None:
    """Format -> program -> figures for a weight ("instructions": where valgrind is); None where no such Python is."""
    if not PYTHON.exists():
        return None
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, dumps = Path(folder, "out"), Path(folder, "dump")
        subprocess.run([PYTHON, *PROGRAMS, out], check=True, env=environment, cwd=REPO)
        found: dict[str, dict[str, Any]] = json.loads(out.read_text())
        if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
            return found
        tool = ["--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={dumps}"]
        command = ["valgrind", *tool, PYTHON, *PROGRAMS, out, "--count"]
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=REPO)
        for number, line in enumerate(out.read_text().splitlines(), start=1):
            name, program, times = line.split("\t")
            total = re.search(r"^(?:summary|totals): (\d+)", Path(f"{dumps}.{number}").read_text(), re.MULTILINE)
            assert total is not None
            found[name][program]["instructions"] = int(total.group(1)) // int(times)
    return found


def over_torch(found: dict[str, dict[str, Any]], program: str) -> float | None:
    """The most that a format takes of a program over what torch's own takes, in instructions (None: not counted)."""
    dense = found["torch"][program].get("instructions")
    if dense is None:
        return None
    taken = [of[program]["instructions"] for name, of in found.items() if name != "torch"]
    return float(round(max(taken) / dense, 2))


def targets(found: dict[str, dict[str, Any]] | None) -> dict[str, tuple[float, float, str]]:
    """What `overhead` aims at: by name the value, the target, and why it may be missed."""
    counted = {} if found is None else {program: over_torch(found, program) for program in MOST}
    return {
        f"{program} on a GPU, instructions of the host over those of bf16, largest": (
            value,
            MOST[program],
            "an eager layer decodes its weight twice, through an autograd function in Python",
        )
        for program, value in counted.items()
        if value is not None
    }


def markdown(found: dict[str, dict[str, Any]] | None) -> list[str]:
    """The table of the report."""
    if found is None:
        return []
    programs = list(dict.fromkeys(program for of in found.values() for program in of))
    rows = [
        f"| {program} | " + " | ".join(_cell(of.get(program)) for of in found.values()) + " |" for program in programs
    ]
    story = (
        "The host on a GPU (one that does nothing): calls of functions for a weight and, where they were counted, "
        "instructions (thousands)."
    )
    return ["", story, "", f"| | {' | '.join(found)} |", "|---|" + "---|" * len(found), *rows]


def _cell(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "-"
    counted = f" ({figures['instructions'] / 1e3:.0f})" if "instructions" in figures else ""
    return f"{figures['calls']:.0f}{counted}"
