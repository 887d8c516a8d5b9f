"""Budgets of kernels for GPUs: what each recipe and direction may cost, in budgets.json.

    .venv-gpu-offline/bin/python -m tests.gpu_offline.budgets           # writes docs/speed.md's tables, of budgets.json
    .venv-gpu-offline/bin/python -m tests.gpu_offline.budgets --write   # measures first, and makes what it finds budget
    .venv-gpu-offline/bin/python -m tests.gpu_offline.budgets --write nvfp4_row int4_32   # of these alone

A time is modelled, for an H200 (model.py), in picoseconds an element. "Of a copy's speed" is that of a copy of the
bytes that are needed over it. The second table says how far the model was from what one H200 has timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu_offline import model
from tests.gpu_offline.recipes import RECIPES

if TYPE_CHECKING:
    from tests.gpu_offline.measured import Call

FILE = Path(__file__).with_name("budgets.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "speed.md"
ELEMENTS = 4096 * 4096  # of the weight that is measured
CAPABILITIES = (80, 90, 100, 120)
MODELLED = str(model.CAPABILITY)
TIME = "time"  # the key of what is modelled, where it is
BEGIN, END = "<!-- made by `python -m tests.gpu_offline.budgets`: {} -->", "<!-- end -->"
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
    return cost["needed"] / model.BANDWIDTH / (cost[TIME] * 1e-12)


def cost_of(call: Call, capability: int) -> Costs:
    """What a call costs on GPUs of a capability; with its time where that is modelled."""
    cost = asdict(call.cost(capability))
    return cost | ({TIME: round(call.seconds() / ELEMENTS * 1e12, 3)} if capability == model.CAPABILITY else {})


def table() -> Iterator[str]:
    """Lines of Markdown: what every recipe and direction costs."""
    yield HEADER
    yield "|---|---|---|---|---|---|---|"
    for recipe, directions in budgets()[MODELLED].items():
        for direction, cost in directions.items():
            numbers = [f"{cost['moved']:.2f}", f"{cost['needed']:.2f}", f"{cost['instructions']:.0f}"]
            yield f"| {recipe} | {direction} | {cost['launches']} | {' | '.join(numbers)} | {share(cost):.2f} |"


def beside_the_gpu() -> Iterator[str]:
    """Lines of Markdown: what an H200 has shown, what the model says of that code, and what it says of the code now."""
    known = model.known()
    seen = f"{known['gpu']}, {known['date']}, {known['commit']}"
    yield f"| share of a copy's speed | {seen} | predicted before | model of that code | error | model of code now |"
    yield "|---|---:|---:|---:|---:|---:|"
    now = budgets()[MODELLED]
    for call in model.timed():
        recipe, direction = call.name.split()
        shares = (call.measured, call.predicted, call.modelled)
        told = " | ".join(f"{each:.2f}" for each in shares)
        yield f"| {recipe} {direction} | {told} | {call.error:+.0%} | {share(now[recipe][direction]):.2f} |"


def tables() -> dict[str, list[str]]:
    """Of the page, by name."""
    return {"costs": list(table()), "beside an H200": list(beside_the_gpu())}


def with_tables(page: str) -> str:
    """A page with its tables made anew."""
    for name, lines in tables().items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{PAGE} has no place for the table {name!r}: {BEGIN.format(name)} ... {END}")
        page = "".join([before, begin, "\n\n", "\n".join(lines), "\n\n", end, after])
    return page


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
                    costs[direction] = cost_of(call, capability)
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
    PAGE.write_text(with_tables(PAGE.read_text()))
    print("\n\n".join("\n".join(lines) for lines in tables().values()))


if __name__ == "__main__":
    main()
