"""The tables and the picture of benchmarks/growth.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.growth_planning import PLANNING
from benchmarks.growth_rank import PHASES

# what of the results, how its x axis is called, the unit of y and by what seconds or bytes are multiplied
PANELS = (
    (("layers",), "layers of 64x64, one rank", "CPU ms", 1e3),
    (("bytes",), "MB of 4 weights in bf16, one rank", "CPU ms", 1e3),
    (("ranks", "mean"), "ranks (gloo, 24 layers): a rank's", "CPU ms", 1e3),
    (("memory", "tensors against bytes"), "MB of 4 weights in bf16: tensors", "MB", 1e-6),
    (("memory", "objects against layers"), "layers of 64x64: Python objects", "kB", 1e-3),
    (("planning", "ranks"), "simulated ranks (8 weights)", "CPU ms", 1e3),
    (("planning", "weights"), "weights (2 simulated ranks)", "CPU ms", 1e3),
)


def markdown(results: dict[str, Any]) -> str:
    """The exponents between the two largest sizes, of both sides."""
    form = results["form"]
    head = f"Exponent of cost over size between the two largest sizes, {form} / bf16 peer (single rounds of {form})."
    columns = ("time / layers", "time / bytes", "CPU of a rank / ranks", "tensors / bytes", "objects / layers")
    tables = [_table(results, keys) for keys, *_ in PANELS]
    lines = [head, "", f"| phase | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {phase} | {' | '.join(_cell(table, form, phase) for table in tables[:5])} |" for phase in PHASES]
    lines += ["", "| planning a checkpoint | simulated ranks | weights |", "|---|---|---|"]
    lines += [f"| {one} | {' | '.join(_cell(table, form, one) for table in tables[5:])} |" for one in PLANNING]
    missed = [f"* {name}: {row['why']}" for name, row in results["targets"].items() if not row["met"]]
    met = f"{len(results['targets']) - len(missed)} of {len(results['targets'])} are within their limits."
    return "\n".join([*lines, "", met, *missed])


def _table(results: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    for key in keys:
        results = results[key]
    return results


def _cell(table: dict[str, Any], form: str, phase: str) -> str:
    mine, peer = (table[side][phase]["exponents"] for side in (form, "bf16"))
    if mine is None or peer is None:
        return "-"
    top, other = mine["top"], peer["top"]["exponent"]
    return f"{top['exponent']:.2f} / {other:.2f} ({top['min']:.2f} - {top['max']:.2f})"


def draw(results: dict[str, Any], path: Path) -> None:
    """A row for each thing that grows, a panel for each phase; both axes are logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows, columns = len(PANELS), len(PHASES)
    figure, axes = plt.subplots(rows, columns, figsize=(2.6 * columns, 2.3 * rows), layout="constrained")
    form = results["form"]
    for row, (keys, label, unit, scale) in enumerate(PANELS):
        table = _table(results, keys)
        panels = list(axes[row])
        for figure_name, panel in zip(table[form], panels, strict=False):
            shown = "MB" if figure_name == "metadata_bytes" else unit
            factor = 1e-6 if figure_name == "metadata_bytes" else scale
            for color, line in _lines(table, form, figure_name, factor, megabytes="MB of" in label):
                panel.plot(line[0], line[1], "o-", color=color, label=line[2], markersize=3, linewidth=1.2)
            panel.set(xscale="log", yscale="log")
            panel.minorticks_off()
            panel.set_title(f"{figure_name.replace('_', ' ')}, {shown}", fontsize=9)
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.set_xticks(panel.lines[0].get_xdata(), [f"{x:g}" for x in panel.lines[0].get_xdata()])
                panel.legend(fontsize=7, frameon=False, handlelength=1)
            else:
                panel.text(0.5, 0.5, "nothing", ha="center", transform=panel.transAxes, fontsize=8)
        for panel in panels[len(table[form]) :]:
            panel.set_axis_off()
        panels[0].set_ylabel(label, fontsize=8)
    figure.suptitle(
        f"Growth: {form} and stock FSDP2 + DCP + AdamW in bf16; a row says what grows, a legend the exponent between "
        "the two largest sizes"
    )
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _lines(
    table: dict[str, Any], form: str, name: str, factor: float, *, megabytes: bool
) -> Iterator[tuple[str, tuple[list[float], list[float], str]]]:
    """(color, (sizes, costs, label)) of each side that costs something."""
    for color, side in (("C0", form), ("C7", "bf16")):
        figures = table[side][name]
        if figures["exponents"] is None:
            continue
        sizes = [round(int(size) / 1e6, 1) if megabytes else int(size) for size in figures["least"]]
        costs = [cost * factor for cost in figures["least"].values()]
        yield color, (sizes, costs, f"{side} {figures['exponents']['top']['exponent']:.2f}")
