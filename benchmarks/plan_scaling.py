"""What does planning cost at scale: large models, quantized, against the same models in bf16 through stock DCP?

    local plan     one rank of LOCAL_WORLD: set_up_planner + create_local_plan
    coordinator    all ranks' plans: size of the gather, unpickling, create_global_plan; stock's validation by itself
    metadata       what the storage writer puts into .metadata, and what unpickling it costs every rank that loads
    load plan      one rank: set_up_planner + create_local_plan + finish_plan

    python -m benchmarks plan_scaling [--full]

Times are CPU times of this one thread, which other processes disturb little; "gc off" is with the garbage collector
off, as a coordinator should run. Figures at 4,096 ranks are extrapolated as a power of the number of ranks.
"""

import contextlib
import dataclasses
import gc
import math
import pickle
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata, SavePlan, default_planner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import plan_scaling_figures
from benchmarks.model_shapes import MODELS
from benchmarks.simulated_ranks import as_rank, moved, state_dict_of
from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.manifest import MANIFEST
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

FORMATS = {"float8_row": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
LOCAL_WORLD = 1024
REPEATS = 5  # of what one rank does, for models below LARGE entries; larger ones do it once
LARGE = 10_000


@dataclasses.dataclass(frozen=True)
class Case:
    """How much of a model is measured.

    Attributes:
        formats: beside dense.
        worlds: of the coordinator.
        metadata_world: the one of them at which .metadata is written and read, too.
        with_gc: worlds that are measured with the collector on, too.
    """

    formats: tuple[str, ...]
    worlds: tuple[int, ...]
    metadata_world: int
    with_gc: tuple[int, ...] = ()


QUICK = {  # a minute and a half
    "llama_405b": Case(("mxfp8", "nvfp4"), (8, 64), 8, (8,)),
    "deepseek_671b": Case(("nvfp4",), (8, 64), 8),
}
FULL = {
    "llama_405b": Case(("float8_row", "mxfp8", "nvfp4"), (8, 64, 256), 64, (8, 64)),
    "deepseek_671b": Case(("nvfp4",), (8, 64, 256), 64),
    "deepseek_671b_per_expert": Case(("nvfp4",), (4,), 4),
}
SWEEP_WORLDS = (64, 256, 1024)
AT = 4096
VALIDATION = "_validate_global_plan"  # the name of stock's check within create_global_plan
markdown, draw = plan_scaling_figures.markdown, plan_scaling_figures.draw


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model in one format; format None is bf16 by stock DCP."""

    model: str
    format: str | None

    @property
    def name(self) -> str:
        return self.format or "dense"

    @property
    def repeats(self) -> int:
        return REPEATS if len(MODELS[self.model]) < LARGE else 1

    def state_dict(self, mesh: Any) -> dict[str, Any]:
        return state_dict_of(MODELS[self.model], mesh, FORMATS[self.format] if self.format else None)

    def save_planner(self) -> DefaultSavePlanner:
        return QuantizedSavePlanner() if self.format else DefaultSavePlanner()

    def load_planner(self) -> DefaultLoadPlanner:
        return QuantizedLoadPlanner() if self.format else DefaultLoadPlanner()


def run(*, full: bool = False) -> dict[str, Any]:
    """All figures by model; `targets` says which ratios to dense were met."""
    results: dict[str, Any] = {}
    with collector(on=False):
        for model, case in (FULL if full else QUICK).items():
            print(f"  {model} ...", flush=True)
            contenders = [Contender(model, name) for name in (None, *case.formats)]
            results[model] = {
                "entries": len(MODELS[model]),
                "quantized": sum(quantized for _, quantized in MODELS[model].values()),
                "local": _local(contenders),
                **_scaling(contenders, case),
            }
        results["validation_of_one_tensor"] = _sweep()
    results["targets"] = plan_scaling_figures.targets(results)
    return results


# -- one rank ----------------------------------------------------------------------------------------------------------


def _local(contenders: list[Contender]) -> dict[str, Any]:
    """Milliseconds and pickled bytes of one rank's plan; ratios to the first contender."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    sizes, items = {}, {}
    with as_rank(1, LOCAL_WORLD) as mesh:
        state_dicts = {contender.name: contender.state_dict(mesh) for contender in contenders}
        for _ in range(1 + contenders[0].repeats):  # in turn; the first is a warm-up
            for contender in contenders:
                plan, seconds = timed(lambda c=contender: plan_save(c.save_planner(), state_dicts[c.name]))
                times[contender.name].append(seconds)
                sizes[contender.name], items[contender.name] = len(pickle.dumps(plan)), len(plan.items)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "items": items,
        "ms": {name: round(value * 1e3, 1) for name, value in medians.items()},
        "plan_bytes": sizes,
        "ratio": _ratios(medians),
    }


def plan_save(planner: DefaultSavePlanner, state_dict: dict[str, Any], *, coordinator: bool = False) -> SavePlan:
    planner.set_up_planner(state_dict, is_coordinator=coordinator)
    return planner.create_local_plan()


# -- the coordinator, and what it leaves -------------------------------------------------------------------------------


def _scaling(contenders: list[Contender], case: Case) -> dict[str, Any]:
    """By world and contender, with exponents and figures at AT ranks where there are several worlds."""
    measured: dict[int, dict[str, dict[str, float]]] = {}
    described: dict[str, Any] = {}
    for world in case.worlds:
        measured[world] = {}
        for contender in contenders:
            row, planned = coordinate(contender, world, with_gc=world in case.with_gc)
            measured[world][contender.name] = row
            if world == case.metadata_world:
                described[contender.name] = describe(contender, world, *planned)
            del planned
            gc.collect()
    coordinator: dict[str, Any] = {}
    for world, rows in measured.items():
        dense = rows["dense"]
        coordinator[str(world)] = {
            name: row | {"ratio": _over(row, dense, "gc_off_s"), "gather_ratio": _over(row, dense, "gather")}
            for name, row in rows.items()
        }
    if len(case.worlds) > 1:
        coordinator["fitted"] = {contender.name: _fitted(measured, contender.name) for contender in contenders}
    return {"coordinator": coordinator, "metadata": {"world": case.metadata_world, **described}}


def coordinate(
    contender: Contender, world: int, *, with_gc: bool
) -> tuple[dict[str, float], tuple[list[SavePlan], Metadata]]:
    gathered, coordinator = _gathered(contender, world)
    row: dict[str, float] = {"gather": sum(map(len, gathered))}
    if with_gc:
        with collector(on=True):
            row["gc_on_s"] = _planned(coordinator, gathered)[1]["gc_off_s"]
        gc.collect()
    planned, seconds = _planned(coordinator, gathered)
    return row | seconds, planned


def _planned(
    planner: DefaultSavePlanner, gathered: list[bytes]
) -> tuple[tuple[list[SavePlan], Metadata], dict[str, float]]:
    """The global plan from pickled local plans, and where the time went."""
    validating = [0.0]

    def validate(*args: Any, stock: Callable[..., Any] = getattr(default_planner, VALIDATION)) -> Any:  # noqa: B008
        errors, seconds = timed(lambda: stock(*args))
        validating[0] += seconds
        return errors

    plans, unpickling = timed(lambda: [pickle.loads(data) for data in gathered])
    with patch.object(default_planner, VALIDATION, validate):  # its share shows no other way
        planned, planning = timed(lambda: planner.create_global_plan(plans))
    return planned, {
        "unpickle_s": unpickling,
        "plan_s": planning - validating[0],
        "validate_s": validating[0],
        "gc_off_s": unpickling + planning,
    }


def _gathered(contender: Contender, world: int) -> tuple[list[bytes], DefaultSavePlanner]:
    """The pickled plans of all ranks: those of ranks 0 and 1 are made, the others moved from rank 1's."""
    plans: dict[int, SavePlan] = {}
    planners: dict[int, DefaultSavePlanner] = {}
    for rank in (0, 1, world - 1):
        with as_rank(rank, world) as mesh:
            planners[rank] = contender.save_planner()
            plans[rank] = plan_save(planners[rank], contender.state_dict(mesh), coordinator=rank == 0)
    last, made = moved(plans[1], world - 1, world), plans[world - 1]
    assert last.items == made.items, "a moved plan is not what that rank plans"
    gathered = [pickle.dumps(plans[0])]
    gathered += [pickle.dumps(moved(plans[1], rank, world)) for rank in range(1, world)]
    assert abs(len(gathered[-1]) - len(pickle.dumps(made))) < 0.01 * len(gathered[-1])
    return gathered, planners[0]


def describe(contender: Contender, world: int, plans: list[SavePlan], metadata: Metadata) -> dict[str, Any]:
    """.metadata as FileSystemWriter leaves it, what reading it costs, and the load plan of a rank."""
    out: dict[str, Any] = {}
    for label, name in (("manifest_bytes", MANIFEST), ("checksums_bytes", CHECKSUMS)):
        entry = metadata.state_dict_metadata.get(name)
        out[label] = math.prod(entry.size) if isinstance(entry, TensorStorageMetadata) else 0
    with tempfile.TemporaryDirectory() as path:
        out["chunks"], out["write_s"] = _finish(path, plans, metadata)
        out["bytes"] = Path(path, ".metadata").stat().st_size
        reader = dcp.FileSystemReader(path)
        found, out["unpickle_gc_off_s"] = timed(reader.read_metadata)
        with collector(on=True):
            out["unpickle_gc_on_s"] = timed(reader.read_metadata)[1]
        with as_rank(1, world) as mesh:
            state_dict = contender.state_dict(mesh)
            out["load_plan_s"] = statistics.median(
                timed(lambda: _load_plan(contender.load_planner(), state_dict, found))[1]
                for _ in range(contender.repeats)
            )
        del found
        tracemalloc.start()
        found = reader.read_metadata()
        out["unpickled_bytes"] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return out


def _load_plan(planner: DefaultLoadPlanner, state_dict: dict[str, Any], metadata: Metadata) -> object:
    planner.set_up_planner(state_dict, metadata, is_coordinator=False)
    return planner.finish_plan(planner.create_local_plan())


def _finish(path: str, plans: list[SavePlan], metadata: Metadata) -> tuple[int, float]:
    """Write .metadata as if every item had been written; how many chunks it describes, and the seconds it took."""
    writer = dcp.FileSystemWriter(path)
    dcp.save({"x": torch.zeros(1)}, storage_writer=writer, no_dist=True)
    (sample,) = dcp.FileSystemReader(path).read_metadata().storage_data.values()
    results = []
    for rank, plan in enumerate(plans):
        file, rows = f"__{rank}_0.distcp", []
        for number, item in enumerate(plan.items):
            info = dataclasses.replace(sample, relative_path=file, offset=number << 24, length=1 << 24)
            rows.append(WriteResult(item.index, info.length, info))
        results.append(pickle.loads(pickle.dumps(rows)))  # they come from that rank
    return sum(map(len, results)), timed(lambda: writer.finish(metadata, results))[1]


# -- stock's validation of one tensor ----------------------------------------------------------------------------------


def _sweep() -> dict[str, Any]:
    """Seconds for a tensor cut along dim 0, by whether dim 0 is its longest: stock sweeps along the longest."""
    out: dict[str, Any] = {}
    for label, shape in {"sharded_dim_longest": (53248, 16384), "other_dim_longest": (16384, 53248)}.items():
        seconds = {}
        for world in SWEEP_WORLDS:
            with as_rank(1, world) as mesh:
                plan = plan_save(DefaultSavePlanner(), state_dict_of({"w": (shape, False)}, mesh, None))
            gathered = [pickle.dumps(moved(plan, rank, world)) for rank in range(world)]
            planner = DefaultSavePlanner()
            planner.set_up_planner({}, is_coordinator=True)
            seconds[world] = _planned(planner, gathered)[1]["validate_s"]
        out[label] = {"seconds": {str(w): round(s, 5) for w, s in seconds.items()}, **_power(seconds)}
    return out


# -- arithmetic --------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


@contextlib.contextmanager
def collector(*, on: bool) -> Iterator[None]:
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was else gc.disable)()


def _ratios(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value / values["dense"], 2) for name, value in values.items()}


def _over(row: dict[str, float], dense: dict[str, float], key: str) -> float:
    return round(row[key] / dense[key], 2)


def _power(values: dict[int, float]) -> dict[str, float]:
    """The exponent between the two largest worlds, and what it gives at AT ranks."""
    (below, low), (above, high) = sorted(values.items())[-2:]
    least = time.clock_getres(time.CLOCK_PROCESS_CPUTIME_ID)  # what took less was not measured
    low, high = max(low, least), max(high, least)
    exponent = math.log(high / low) / math.log(above / below)
    return {"exponent": round(exponent, 2), f"at_{AT}": round(high * (AT / above) ** exponent, 4)}


def _fitted(measured: dict[int, dict[str, dict[str, float]]], name: str) -> dict[str, Any]:
    keys = ("gather", "unpickle_s", "plan_s", "validate_s", "gc_off_s")
    return {key: _power({world: rows[name][key] for world, rows in measured.items()}) for key in keys}
