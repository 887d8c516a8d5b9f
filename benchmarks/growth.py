"""How does cost grow with the model and with the ranks? Exponents of every phase, beside stock FSDP2, DCP and AdamW.

    layers      more weights of 64x64: Python objects grow, bytes do not matter
    bytes       wider weights, always as many: bytes grow
    ranks       the same model on 1, 2 and 4 ranks: CPU time of one rank (4 ranks share the cores of a small machine)
    planning    what a checkpoint costs one rank of up to 1024, and the coordinator, simulated; and against weights
    memory      the most bytes that a phase holds at once: of tensors against bytes, of Python objects against layers

The peer is the same model in bf16: where torch itself is super-linear, that shows there. What is run is in
benchmarks/growth_rank.py and growth_planning.py; what an exponent is, in growth_fits.py. Anything whose exponent is
above 1.1, and above the peer's by more than 0.1, is a defect. Tensors are counted under a dispatch mode, where kernels
run eagerly; compiled ones hold less.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth_fits import summary, within
from benchmarks.growth_planning import PLANNING, against_ranks, against_weights
from benchmarks.growth_rank import PHASES, Job

FORM = "nvfp4"  # its tensor-wide scales make it do everything there is: agreement, three parts a weight
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
    """What each rank measured: `times`, bytes of `tensors` and bytes of `objects`, whichever there are jobs for."""
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
    """CPU seconds of the ranks, on average and of the coordinator, which saves more; and wall seconds."""
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
    """Every exponent but those of the clock.

    What one rank does may not grow with ranks at all, unless the peer's does; what reads or writes .metadata, as it.
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
