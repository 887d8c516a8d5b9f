"""What a run of questions leaves to read: Markdown with machine, versions and command, each answer, and all targets.

A target is one entry of a question's `results["targets"]`: {name: {"value", "target", "met", "why"}}. Numbers alone do
not say which way is better, so `at_least` and `at_most` put it into words.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Target = dict[str, Any]


def at_least(value: float, least: float, why: str = "") -> Target:
    """A target from below; `why` it is missed, if it is."""
    return _target(value, f"at least {least:g}", why, met=value >= least)


def at_most(value: float, most: float, why: str = "") -> Target:
    """A target from above; `why` it is missed, if it is."""
    return _target(value, f"at most {most:g}", why, met=value <= most)


def _target(value: float, target: str, why: str, *, met: bool) -> Target:
    return {"value": value, "target": target, "met": met, "why": "" if met else why}


def with_spread(cell: Mapping[str, float] | None) -> str:
    """A ratio of `timing.ratio` for a cell of a table."""
    return "-" if cell is None else f"{cell['ratio']:.2f} ({cell['min']:.2f} - {cell['max']:.2f})"


def of_run(results: Mapping[str, Any], answers: Mapping[str, str], pictures: Mapping[str, str]) -> str:
    """The whole document; `answers` are the questions' own Markdown, `pictures` file names beside it."""
    machine, versions = (
        ", ".join(f"{key} {value}" for key, value in results[k].items()) for k in ("machine", "versions")
    )
    lines = [
        "# Benchmarks",
        "",
        f"    {results['command']}",
        "",
        f"Machine: {machine}.",
        "",
        f"Versions: {versions}.",
        "",
    ]
    lines += ["| question | seconds | budget |", "|---|---:|---:|"]
    lines += [f"| {name} | {time['seconds']:.0f} | {time['budget']} |" for name, time in results["time"].items()]
    for name in results["time"]:
        lines += ["", f"## {name}", ""]
        if "error" in results[name]:
            lines += ["It failed:", "", *(f"    {line}" for line in results[name]["error"].splitlines()), ""]
        if name in answers:
            lines += [answers[name]]
        if name in pictures:
            lines += ["", f"![{name}]({pictures[name]})"]
    return "\n".join([*lines, "", "## Targets", "", *table_of_targets(results, results["time"]), ""])


def table_of_targets(results: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """One row a target; a question that failed has one that is not met."""
    lines = ["| question | target | value | wanted | met | why |", "|---|---|---:|---:|---|---|"]
    for name in names:
        for target, row in results[name].get("targets", {}).items():
            met = "yes" if row["met"] else "**no**"
            cells = (name, target, _shown(row["value"]), _shown(row["target"]), met, row["why"])
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        if "error" in results[name]:
            first = results[name]["error"].splitlines()[0]
            lines.append(f"| {name} | an answer | - | - | **no** | {_cell(first)} |")
    return lines


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
