"""Instructions of one call of each op, and of a step, counted by callgrind: the same on quiet and on noisy machines.

    valgrind --tool=callgrind --instr-atstart=no --collect-atstart=no python -m benchmarks.overhead_instructions OUT

is what `counted()` runs; OUT receives the names of what was counted, in the order of callgrind's dumps. A step is that
of a model of LAYERS layers; its figure is per layer.
"""

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.overhead_models import OPS, RECIPES, by_hand, defined, one_rank, operands, peers, trained

CALLS, LAYERS, WARM_UP = 4, 3, 2


def counted() -> dict[str, dict[str, int]] | None:
    """Op (or "step") -> what it was called on -> instructions; None where there is no valgrind."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        names, dumps = Path(folder, "names"), Path(folder, "dump")
        tool = ["--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={dumps}"]
        command = ["valgrind", *tool, sys.executable, "-m", "benchmarks.overhead_instructions", str(names)]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
        if done.returncode:
            print(done.stderr.decode()[-2000:])
            return None
        counts: dict[str, dict[str, int]] = {}
        for number, line in enumerate(names.read_text().splitlines(), start=1):
            what, on = line.split("\t")
            found = re.search(r"^(?:summary|totals): (\d+)", Path(f"{dumps}.{number}").read_text(), re.MULTILINE)
            assert found is not None
            counts.setdefault(what, {})[on] = int(found.group(1)) // (LAYERS if what == "step" else CALLS)
    return counts


def _steps() -> dict[str, Callable[[], None]]:
    steps = {
        "dense one process": trained(LAYERS, None, sharded=False),
        "dense FSDP2, 1 rank": trained(LAYERS, None, sharded=True),
    }
    for name, recipe in RECIPES.items():
        steps[f"{name} by hand"] = by_hand(LAYERS, recipe)
        steps[f"{name} one process"] = trained(LAYERS, recipe, sharded=False)
        steps[f"{name} FSDP2, 1 rank"] = trained(LAYERS, recipe, sharded=True)
    return steps


def main() -> None:
    """What runs under valgrind."""
    # no public name starts and stops callgrind from within; torch.utils.benchmark runs one process per statement
    toggle, toggle_and_dump = torch._C._valgrind_toggle, torch._C._valgrind_toggle_and_dump_stats  # noqa: SLF001
    torch.set_num_threads(1)
    names: list[str] = []

    def count(what: str, on: str, call: Callable[[], object], calls: int) -> None:
        toggle()
        for _ in range(calls):
            call()
        toggle_and_dump()
        names.append(f"{what}\t{on}")

    values = operands() | {f"peer {name}": value for name, value in peers().items()}
    with one_rank():
        steps = _steps()
        for step in [*steps.values()] * WARM_UP:
            step()
        known = {(op, on): defined(OPS[op], value) for op in OPS for on, value in values.items()}
        subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
        gc.disable()
        with torch.no_grad():
            for op, on in (case for case, is_defined in known.items() if is_defined):
                for _ in range(WARM_UP):
                    OPS[op](values[on])
                count(op, on, lambda op=op, on=on: OPS[op](values[on]), CALLS)  # type: ignore[misc]
        for name, step in steps.items():
            step()
            count("step", name, step, 1)
    Path(sys.argv[1]).write_text("\n".join(names))


if __name__ == "__main__":
    main()
