"""How does cost grow with the model and with the ranks? Exponents of every phase, beside stock FSDP2, DCP and AdamW.

    layers      more weights of 64x64: Python objects grow, bytes do not matter
    bytes       wider weights, always as many: bytes grow
    ranks       the same model on 1, 2 and 4 ranks: CPU time of one rank (4 ranks share the cores of a small machine)
    planning    what a checkpoint costs one rank of up to 1024, and the coordinator, simulated; and against weights
    memory      the most bytes that a phase holds at once: of tensors against bytes, of Python objects against layers

The peer is the same model in bf16: it shows where torch itself is super-linear. benchmarks/growth_rank.py and
growth_planning.py run the models; a comment below says what an exponent is. An exponent above 1.1, and above the peer's
by more than 0.1, is a defect. Tensors are counted under a dispatch mode, where kernels run eagerly; compiled ones hold
less.
"""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth_planning import PLANNING, against_ranks, against_weights
from benchmarks.growth_rank import PHASES, Job

FORM = "nvfp4"  # it exercises everything: tensor-wide scales that ranks agree on, and three parts a weight
SIDES = (FORM, "bf16")
SMALL = 64  # width of the many layers
LAYERS = (6, 18, 54, 120)
FEW = 4  # layers of the wide ones
WIDTHS = (512, 768, 1152, 1728)  # from 2 ** 18 elements on kernels are compiled: all of these are
COUNTED_LAYERS, COUNTED_WIDTHS = LAYERS[:3], WIDTHS[:3]
RANKS, LAYERS_ON_RANKS = (1, 2, 4), 24
ROUNDS = 3
SIMULATED, SIMULATED_WEIGHTS = (16, 64, 256, 1024), (100, 200, 400, 800)
MOST, MARGIN = 1.1, 0.1


def run() -> dict[str, Any]:
    """All figures; `targets` says which exponents are as they should be."""
    print("  one rank: layers, bytes, memory ...", flush=True)
    layers = {count: [Job(side, count, SMALL) for side in SIDES] for count in LAYERS}
    widths = {FEW * width**2 * 2: [Job(side, FEW, width) for side in SIDES] for width in WIDTHS}
    counted = {count: jobs for count, jobs in layers.items() if count in COUNTED_LAYERS}
    counted_widths = {size: jobs for size, jobs in widths.items() if jobs[0].width in COUNTED_WIDTHS}
    alone = _on_ranks(
        1,
        times=[job for jobs in (*layers.values(), *widths.values()) for job in jobs],
        tensors=[job for jobs in counted_widths.values() for job in jobs],
        objects=[job for jobs in counted.values() for job in jobs],
    )
    results: dict[str, Any] = {
        "form": FORM,
        "rounds": ROUNDS,
        "layers": _grown(_times(alone, layers)),
        "bytes": _grown(_times(alone, widths)),
        "memory": {
            "tensors against bytes": _grown(_counts(alone, counted_widths, "tensors")),
            "objects against layers": _grown(_counts(alone, counted, "objects")),
        },
    }
    print("  ranks ...", flush=True)
    results["ranks"] = _against_real_ranks()
    print("  planning ...", flush=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        simulated = against_ranks(FORM, SIMULATED, weights=8, repeats=3)
        weights = against_weights(FORM, SIMULATED_WEIGHTS, world=2, repeats=3)
    results["planning"] = {"ranks": _grown(simulated), "weights": _grown(weights)}
    results["targets"] = _targets(results)
    return results


def _on_ranks(world: int, **jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What each rank measured: `times`, bytes of `tensors` and bytes of `objects`, as far as jobs ask for them."""
    with tempfile.TemporaryDirectory() as folder:
        order, out = Path(folder, "order.json"), Path(folder, "out.json")
        rows = {what: [dataclasses.astuple(job) for job in wanted] for what, wanted in jobs.items()}
        order.write_text(json.dumps({"rounds": ROUNDS, **rows}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += ["-m", "benchmarks.growth_rank", str(order), str(out)]
        root = Path(__file__).parents[1]
        done = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"growth on {world} ranks failed:\n{done.stderr[-3000:]}")
        ranks: list[dict[str, Any]] = json.loads(out.read_text())
        return ranks


def _times(ranks: list[dict[str, Any]], jobs: dict[int, list[Job]]) -> dict[str, Any]:
    """Side -> phase -> size -> CPU seconds of rank 0 in each round."""
    return {
        side: {
            phase: {
                str(size): [one["cpu"][phase] for one in ranks[0]["times"][by_side[number].name]]
                for size, by_side in jobs.items()
            }
            for phase in PHASES
        }
        for number, side in enumerate(SIDES)
    }


def _counts(ranks: list[dict[str, Any]], jobs: dict[int, list[Job]], what: str) -> dict[str, Any]:
    """Side -> phase -> size -> bytes, counted once."""
    return {
        side: {
            phase: {str(size): [ranks[0][what][by_side[number].name][phase]] for size, by_side in jobs.items()}
            for phase in PHASES
        }
        for number, side in enumerate(SIDES)
    }


def _against_real_ranks() -> dict[str, Any]:
    """CPU seconds of the mean rank and of the coordinator, which does more in a save; and wall seconds."""
    jobs = [Job(side, LAYERS_ON_RANKS, SMALL) for side in SIDES]
    measured = {world: _on_ranks(world, times=jobs) for world in RANKS}
    out: dict[str, Any] = {}
    for name, clock, ranks in (
        ("mean", "cpu", slice(None)),
        ("coordinator", "cpu", slice(1)),
        ("wall", "wall", slice(1)),
    ):
        out[name] = _grown(
            {
                job.side: {
                    phase: {
                        str(world): [
                            sum(figures[clock][phase] for figures in one) / len(one)
                            for one in zip(*(rank["times"][job.name] for rank in answers[ranks]), strict=True)
                        ]
                        for world, answers in measured.items()
                    }
                    for phase in PHASES
                }
                for job in jobs
            }
        )
    return out


def _grown(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Side -> phase -> costs and exponents of its series."""
    return {side: {phase: summary(series) for phase, series in phases.items()} for side, phases in figures.items()}


def _targets(results: dict[str, Any]) -> dict[str, Any]:
    """Targets for every exponent, except those of wall time.

    What one rank does must not grow with ranks at all, unless the peer's does; what reads or writes .metadata may grow
    with its size.
    """
    tables = [("time against layers", results["layers"], MOST), ("time against bytes", results["bytes"], MOST)]
    tables += [(name, table, MOST) for name, table in results["memory"].items()]
    tables += [("planning against weights", results["planning"]["weights"], MOST)]
    tables += [("CPU of a rank against ranks", results["ranks"]["mean"], MARGIN)]
    targets = {
        f"{phase}: {name}": within(mine["exponents"], table["bf16"][phase]["exponents"], most, MARGIN)
        for name, table, most in tables
        for phase, mine in table[FORM].items()
        if mine["exponents"] is not None
    }
    table = results["planning"]["ranks"]
    for figure in PLANNING:
        most = MARGIN if figure == "local_plan" else MOST
        ours, peer = (table[side][figure]["exponents"] for side in SIDES)
        targets[f"{figure}: simulated ranks"] = within(ours, peer, most, MARGIN)
    return targets


# -- exponents ---------------------------------------------------------------------------------------------------------
#
# A cost is a + b * size ** p. The constant a only lowers the slope, most where sizes are small. So "top", the slope
# between the two largest sizes, tells whether growth is super-linear; "fit" is the slope of least squares over all
# sizes. Both are taken from the least cost over all rounds, since other load on the machine only adds to a cost; min
# and max are taken from single rounds.

Series = Mapping[str, Sequence[float]]  # size -> one cost a round


def summary(series: Series) -> dict[str, Any]:
    """Least and median cost of every size, and the exponents."""
    return {
        "least": {size: min(costs) for size, costs in series.items()},
        "median": {size: statistics.median(costs) for size, costs in series.items()},
        "exponents": exponents(series),
    }


def exponents(series: Series) -> dict[str, dict[str, float]] | None:
    """`top` and `fit`; None where the cost is 0 at some size."""
    sizes = sorted(map(int, series))
    rounds = [list(costs) for costs in zip(*(series[str(size)] for size in sizes), strict=True)]
    least = [min(series[str(size)]) for size in sizes]
    if min(least) <= 0:
        return None
    out = {}
    for name, first in (("fit", 0), ("top", -2)):
        single = [_slope(sizes[first:], costs[first:]) for costs in rounds]
        slope = _slope(sizes[first:], least[first:])
        out[name] = {"exponent": round(slope, 3), "min": round(min(single), 3), "max": round(max(single), 3)}
    return out


def _slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    return statistics.linear_regression(x, y).slope


def within(mine: Any, peer: Any, most: float, margin: float) -> dict[str, Any]:
    """Whether the top exponent is at most `most`, or not above the peer's by more than the margin."""
    value = mine["top"]["exponent"]
    limit = max(most, (peer["top"]["exponent"] if peer else 0.0) + margin)
    why = f"{value} against {limit:.2f}; single rounds {mine['top']['min']} - {mine['top']['max']}"
    return {"value": value, "target": round(limit, 3), "met": value <= limit, "why": "" if value <= limit else why}


# -- figures -----------------------------------------------------------------------------------------------------------

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
