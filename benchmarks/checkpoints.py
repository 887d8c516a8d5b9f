"""What do checkpoints of quantized models cost, in bytes and in seconds of save, async save and load?

    python -m benchmarks checkpoints

A real model (SmolLM2-135M; its embedding stays bf16) and a synthetic one of 0.9 GB, in bf16 with stock DCP and in MXFP8
and NVFP4 with ours. More contenders: AtomicFileSystemWriter instead of stock's writer ("atomic save"), dequantizing and
then saving dense weights, and the disk itself (the same bytes written and synced, or read, with no format at all). One
process. Contenders take turns; figures are ratios of medians, with the least and the greatest ratio within one round.
Unless a name says otherwise, saves use stock's writer with the settings we recommend: two writing threads, no CRC32.
"Default settings" are torch's.

What the figures are made of (on two cores):

    With small tensors the number of entries matters, and an NVFP4 weight has three. torch.save and the stream that DCP
    wraps around the file take 0.15 to 0.2 ms for each, most of it Python, which threads cannot share; the rest of an
    entry takes 0.04 ms, half of it its checksum. AtomicFileSystemWriter runs torch.save for the first tensors of each
    dtype and shape; it also syncs the directory, and its name in the one above.
    torch.load takes 0.3 to 0.4 ms an entry, into new memory, while no other reading goes on. SafeFileSystemReader
    ("safe load") reads from the file into the target instead, and asks for all bytes before it reads the first. What is
    left of it is Python, 0.11 ms an entry: 0.05 for `.metadata`, 0.025 for planning, 0.035 for looking and reading.
    From a cold disk the system works longer, too (three times a raw read's CPU time): a load looks at the ends of all
    chunks first, which breaks up what one long read would ask for at once.
    set_crc32_options applies to the calling thread alone; the planner passes it on to the threads that write.
    Dequantizing first needs fresh memory, whose pages cost more than the save.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks import checkpoint_figures, disk
from benchmarks.checkpoint_models import FORMATS, RECIPES, Bench, llama_like, smollm2_135m
from benchmarks.timing import Contender, interleaved
from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    SafeFileSystemReader,
    expand,
)
from qtensor import QuantizedTensor

ROOT = Path(__file__).parents[1]
SCRATCH = ROOT / "runs"  # on the filesystem that is measured
REPEATS = 3
# The synthetic model, of the widths of a Llama with 1.1 billion parameters: 88 MB a layer in bf16.
SYNTHETIC = {"layers": 10, "hidden": 2048, "keys": 256, "inner": 5632}
# Only some layers where a contender quantizes or dequantizes, which takes longer than all the rest.
CONVERTED_LAYERS = 10  # of SmolLM2
DEQUANTIZED_LAYERS = {"smollm2_135m": 10, "synthetic": 2}

Contenders = dict[str, Contender]
markdown, draw = checkpoint_figures.markdown, checkpoint_figures.draw


def run() -> dict[str, Any]:
    """Figures of both models, and which targets they meet."""
    results: dict[str, Any] = {
        "parameters": {
            "repeats": REPEATS,
            "synthetic": SYNTHETIC,
            "converted_layers": CONVERTED_LAYERS,
            "dequantized_layers": DEQUANTIZED_LAYERS,
        }
    }
    SCRATCH.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # a single process is intended
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        for name, states in (("smollm2_135m", smollm2_135m), ("synthetic", partial(llama_like, **SYNTHETIC))):
            with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
                results[name] = _measured(Bench(name, states(), Path(folder)))
    return results | {"targets": checkpoint_figures.targets(results)}


def _measured(bench: Bench) -> dict[str, Any]:
    total = {form: bench.nbytes(form) for form in FORMATS}
    disk.require_free(bench.folder, 2 * sum(total.values()) + 2 * total["bf16"])
    weights = [f"model.{key}" for key, value in bench.states["mxfp8"].items() if isinstance(value, QuantizedTensor)]
    for form in FORMATS:
        save(bench.states[form], bench.kept(form), _planner(form))
        disk.write_raw(bench.raw(form), bench.parts(form))
    figures: dict[str, Any] = {"weights": len(weights), "gb": {form: round(total[form] / 1e9, 3) for form in FORMATS}}
    figures["bytes_over_bf16"] = {
        form: {
            "quantized_entries": round(_entries(bench, form, weights) / _entries(bench, "bf16", weights), 4),
            "directory": round(disk.directory_bytes(bench.kept(form)) / disk.directory_bytes(bench.kept("bf16")), 4),
        }
        for form in RECIPES
    }
    phases: list[Callable[[Bench], Contenders]] = [_plans, _saves, _dequantizing_saves, _async_saves, _loads]
    if bench.name == "smollm2_135m":
        phases.append(_conversions)
    seconds: dict[str, list[float]] = {}
    for phase in phases:
        print(f"  {bench.name}: {phase.__name__.strip('_').replace('_', ' ')}", flush=True)
        # the first model warms up the code for the second one, whose rounds are long
        seconds |= interleaved(phase(bench), REPEATS, warm_up=bench.name == "smollm2_135m")
    entries = {form: len(bench.parts(form)) for form in FORMATS}
    return figures | checkpoint_figures.of_seconds(seconds, entries)


def _entries(bench: Bench, form: str, weights: list[str]) -> int:
    return disk.entry_bytes(bench.kept(form), weights)


# ---- saves


@contextmanager
def crc32(*, on: bool) -> Iterator[None]:
    """CRC32 beside every tensor in the files, as torch does by default, or none."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(on)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def save(
    state: dict[str, Tensor],
    path: Path,
    planner: Callable[[], DefaultSavePlanner],
    *,
    threads: int = 2,
    writer: type[FileSystemWriter] = FileSystemWriter,
) -> None:
    """With the settings we recommend, if it is two threads."""
    with crc32(on=False):
        dcp.save({"model": state}, storage_writer=writer(path, thread_count=threads), planner=planner())


def save_with_defaults(state: dict[str, Tensor], path: Path, planner: Callable[[], DefaultSavePlanner]) -> None:
    """With torch's settings."""
    dcp.save({"model": state}, storage_writer=FileSystemWriter(path), planner=planner())


def dequantize_and_save(state: dict[str, Tensor], path: Path) -> None:
    """Dense weights, through stock DCP."""
    dense = {name: value.dequantize() if isinstance(value, QuantizedTensor) else value for name, value in state.items()}
    save(dense, path, DefaultSavePlanner)


def plan_save(state: dict[str, Tensor], planner: Callable[[], DefaultSavePlanner]) -> None:
    """All that a save does before it writes."""
    one = planner()
    one.set_up_planner({"model": state}, is_coordinator=True)
    plans, _ = one.create_global_plan([one.create_local_plan()])
    one.finish_plan(plans[0])


def _planner(form: str) -> Callable[[], DefaultSavePlanner]:
    return QuantizedSavePlanner if form in RECIPES else DefaultSavePlanner


def _plans(bench: Bench) -> Contenders:
    out: Contenders = {}
    for form, state in bench.states.items():
        out[f"plan save {form}"] = Contender(call=partial(plan_save, state, _planner(form)))
        planner = QuantizedLoadPlanner if form in RECIPES else DefaultLoadPlanner
        out[f"plan load {form}"] = Contender(call=partial(plan_load, state, bench.kept(form), planner))
    return out


def _saves(bench: Bench) -> Contenders:
    path, calls = bench.scratch, dict[str, Callable[[], object]]()
    for form, state in bench.states.items():
        planner = _planner(form)
        calls |= {
            f"raw write {form}": partial(disk.write_raw, path, bench.parts(form)),
            f"save {form}": partial(save, state, path, planner),
            f"atomic save {form}": partial(save, state, path, planner, writer=AtomicFileSystemWriter),
            f"default save {form}": partial(save_with_defaults, state, path, planner),
        }
        if form in RECIPES:
            unchecked = partial(QuantizedSavePlanner, checksums=False)
            if form == "mxfp8":
                calls[f"one thread save {form}"] = partial(save, state, path, planner, threads=1)
            calls[f"unchecked save {form}"] = partial(save, state, path, unchecked)
    return _each_removed(bench, calls, {form: bench.nbytes(form) for form in FORMATS})


def _dequantizing_saves(bench: Bench) -> Contenders:
    path, calls = bench.scratch, dict[str, Callable[[], object]]()
    some = bench.first(DEQUANTIZED_LAYERS[bench.name])
    for form in RECIPES:
        calls[f"save layers {form}"] = partial(save, some[form], path, QuantizedSavePlanner)
        calls[f"dequantize, save layers {form}"] = partial(dequantize_and_save, some[form], path)
    dense = sum(weight.nbytes for weight in some["bf16"].values())
    return _each_removed(bench, calls, dict.fromkeys(RECIPES, 2 * dense))


def _each_removed(bench: Bench, calls: dict[str, Callable[[], object]], nbytes: dict[str, int]) -> Contenders:
    """Contenders before each of which old files are removed, and `nbytes` of its format are made ready in memory."""

    def before(form: str) -> None:
        disk.remove(bench.scratch)
        disk.touch(nbytes[form])

    return {
        name: Contender(before=partial(before, name.split()[-1]), call=call, after=partial(disk.remove, bench.scratch))
        for name, call in calls.items()
    }


def _async_saves(bench: Bench) -> Contenders:
    out: Contenders = {}
    for form in FORMATS:
        out[f"copy loop {form}"] = _copy_loop(bench, form)
        out[f"async {form}"] = _async_save(bench, form)
    return out


def _copy_loop(bench: Bench, form: str) -> Contender:
    """A snapshot in memory of its own, as the first async save makes one."""
    parts, copies = bench.parts(form), list[Tensor]()
    return Contender(
        before=partial(disk.touch, bench.nbytes(form)),
        call=lambda: copies.extend(part.clone() for part in parts),
        after=copies.clear,
    )


def _async_save(bench: Bench, form: str) -> Contender:
    """Seconds until async_save returns; the upload is waited for outside of them."""
    pending: list[Any] = []

    def call() -> None:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        upload = dcp.async_save(
            {"model": bench.states[form]},
            storage_writer=FileSystemWriter(bench.scratch, thread_count=2),
            planner=_planner(form)(),
            async_stager=stager,
        )
        pending.extend([upload, stager])

    def after() -> None:
        upload, stager = pending
        upload.result()
        stager.close()
        pending.clear()
        disk.remove(bench.scratch)

    return Contender(before=partial(disk.touch, bench.nbytes(form)), call=call, after=after)


# ---- loads


def load(
    state: dict[str, Tensor],
    path: Path,
    planner: Callable[[], DefaultLoadPlanner],
    reader: type[FileSystemReader] = FileSystemReader,
) -> None:
    """In place."""
    dcp.load({"model": state}, storage_reader=reader(path), planner=planner())


def plan_load(state: dict[str, Tensor], path: Path, planner: Callable[[], DefaultLoadPlanner]) -> None:
    """All that a load does before it reads tensors."""
    one = planner()
    one.set_up_planner({"model": state}, FileSystemReader(path).read_metadata(), is_coordinator=True)
    one.finish_plan(one.create_global_plan([one.create_local_plan()])[0])


def _loads(bench: Bench) -> Contenders:
    out: Contenders = {}
    for form, state in bench.states.items():
        path, raw, parts = bench.kept(form), bench.raw(form), bench.parts(form)
        ways: dict[str, Callable[[], object]] = {"load": partial(load, state, path, DefaultLoadPlanner)}
        if form in RECIPES:
            verified = partial(QuantizedLoadPlanner, verify_checksums=True)
            ways["load"] = partial(load, state, path, QuantizedLoadPlanner)
            ways["safe load"] = partial(load, state, path, QuantizedLoadPlanner, SafeFileSystemReader)
            ways["verified safe load"] = partial(load, state, path, verified, SafeFileSystemReader)
        for kind, prepare in (("cold", disk.forget), ("warm", disk.warm)):
            out[f"{kind} raw read {form}"] = _reading(parts, raw, partial(disk.read_raw, raw, parts), prepare)
            for name, call in ways.items():
                out[f"{kind} {name} {form}"] = _reading(parts, path, call, prepare)
    return out


def _reading(
    parts: list[Tensor], path: Path, call: Callable[[], object], prepare: Callable[[Path], object]
) -> Contender:
    """A load of a state whose largest part is wiped first, and must be back afterwards."""
    probe = max(parts, key=lambda part: part.nbytes).reshape(-1).view(torch.uint8)

    def before() -> None:
        probe.zero_()
        prepare(path)

    def after() -> None:
        if not probe.any():
            raise AssertionError(f"{path} was not loaded")

    return Contender(before=before, call=call, after=after)


def _conversions(bench: Bench) -> Contenders:
    """Some layers of the bf16 checkpoint into quantized targets."""
    some = bench.first(CONVERTED_LAYERS)
    path, dense, out = bench.folder / "some-bf16", some["bf16"], dict[str, Contender]()
    save(dense, path, DefaultSavePlanner)

    def load_and_quantize(target: dict[str, Tensor]) -> None:
        load(dense, path, DefaultLoadPlanner)
        for name, value in target.items():
            value.copy_(dense[name])

    def convert(target: dict[str, Tensor]) -> None:
        load(target, path, partial(QuantizedLoadPlanner, on_mismatch="convert"))

    for form in RECIPES:
        parts = list(expand(some[form]).values())
        out[f"convert to {form}"] = _reading(parts, path, partial(convert, some[form]), disk.warm)
        out[f"load and quantize {form}"] = _reading(parts, path, partial(load_and_quantize, some[form]), disk.warm)
    return out
