"""Budgets of kernels for GPUs: what each recipe and direction may cost, in budgets.json.

    .venv-gpu-offline/bin/python -m tests.gpu_offline.budgets           # the table of docs/speed.md, from budgets.json
    .venv-gpu-offline/bin/python -m tests.gpu_offline.budgets --write   # measures first, and makes what it finds budget
    .venv-gpu-offline/bin/python -m tests.gpu_offline.budgets --write nvfp4_row int4_32   # of these alone

The table's last column is modelled, for an H200 (sm_90): a direction takes the time of its bytes or that of its
instructions, whichever is longer, and a copy that of the bytes that are needed. Neither the start of a launch nor
latency is in the model, nor which unit an instruction occupies, so it is no prediction, but says what stands in the
way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu_offline.recipes import RECIPES

FILE = Path(__file__).with_name("budgets.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "speed.md"
CAPABILITIES = (80, 90, 100, 120)
MODELLED = "90"
BANDWIDTH = 4.3e12  # bytes a second that a copy reads and writes on an H200, of 4.8e12 that its memory has
ISSUED = 132 * 4 * 32 * 1.98e9  # instructions of threads a second: SMs, schedulers, threads of a warp, clock
HEADER = "| recipe | direction | launches | bytes moved | needed | instructions | of a copy's speed |"

Costs = dict[str, Any]  # of one direction: a number for each field of measured.Cost


def budgets() -> dict[str, dict[str, dict[str, Costs]]]:
    """capability -> recipe -> direction -> costs; no recipe where Triton has not its types."""
    return json.loads(FILE.read_text())


def exceeded(cost: Costs, budget: Costs) -> list[str]:
    """What costs more than it may, as text; less is no fault."""
    return [f"{name}: {cost[name]}, budget {most}" for name, most in budget.items() if cost[name] > most]


def share(cost: Costs) -> float:
    """Of a copy's speed, by the model."""
    return (cost["needed"] / BANDWIDTH) / max(cost["moved"] / BANDWIDTH, cost["instructions"] / ISSUED)


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield HEADER
    yield "|---|---|---|---|---|---|---|"
    for recipe, directions in budgets()[MODELLED].items():
        for direction, cost in directions.items():
            numbers = [f"{cost['moved']:.2f}", f"{cost['needed']:.2f}", f"{cost['instructions']:.0f}"]
            yield f"| {recipe} | {direction} | {cost['launches']} | {' | '.join(numbers)} | {share(cost):.2f} |"


def measured(names: Collection[str]) -> dict[str, dict[str, dict[str, Costs]]]:
    """`budgets`, of the code as it is now; of other recipes as they were."""
    from triton.compiler.errors import CompilationError

    from tests.gpu_offline.measured import Meter

    meter, before = Meter(), budgets()
    found: dict[str, dict[str, dict[str, Costs]]] = {str(capability): {} for capability in CAPABILITIES}
    for name, recipe in RECIPES.items():
        if name not in names:
            for capability, recipes in before.items():
                found[capability].update({name: recipes[name]} if name in recipes else {})
            continue
        calls = meter.calls(recipe)
        for capability in CAPABILITIES:
            costs = {}
            for direction, call in calls.items():
                try:
                    costs[direction] = asdict(call.cost(capability))
                except CompilationError as error:
                    if "not supported in this architecture" not in str(error):  # the types that it has
                        raise
            if costs:
                found[str(capability)][name] = costs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Budgets of kernels for GPUs, measured without one.")
    parser.add_argument("--write", nargs="*", metavar="RECIPE", help="measure (all recipes), and write budgets.json")
    write = parser.parse_args().write
    if write is not None:
        from tests.gpu_offline.pretended import pretend_gpu

        pretend_gpu()
        FILE.write_text(json.dumps(measured(write or RECIPES), indent=1) + "\n")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
