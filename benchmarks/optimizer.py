"""What does an optimizer step with masters cost, against torch.optim.AdamW(foreach=True) on dense fp32 parameters?

    contenders   MasterWeightOptimizer(AdamW, foreach=True) over bf16 parameters and over quantized ones of each recipe
    settings     few large weights, where memory decides, and many small ones, where the number of operations does
    time         of `step()`, two threads, contenders in turn; ratios of medians with the spread over the rounds
    phases       where the time of a step goes: each phase is a function of the optimizer, timed in the same steps
    memory       the most bytes a step allocates and frees again, over the bytes of the parameters in fp32
    all-reduces  of one step, by a process that is rank 0 of 2
    compressed   steps with masters="remainder", moments="float8", over those with both in fp32; one thread

Foreseen for large weights, in bytes that cross the memory bus a parameter (page faults and caches aside):

    AdamW foreach    read the gradient twice, decay (8), two moments (12 + 8 + 8), sqrt and its division and sum (24),
                     the update (16)                                                                  about 84
    with masters     + gradient bf16 -> fp32 (6) + quantize: amax (4), encode (4 + 2), store (1 .. 2)
                     + digests (1 before, 1 after; 2 each for bf16)                                   about 20
    so               1.15 to 1.25 times the time of the dense one, if every phase runs at the speed of memory

Where that estimate fails: AdamW on masters takes less than the dense step, since it goes chunk by chunk and reuses its
temporaries, while those of all parameters at once are pages never touched before. Quantizing in eager operations takes
a dozen passes, not the two that were counted. Small weights cost the calls of their operations, not their bytes.
"""

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from benchmarks.allocations import OfAllocator
from benchmarks.live_storages import LiveStorages
from benchmarks.report import at_most, with_spread
from benchmarks.simulated_ranks import as_rank
from benchmarks.timing import Contender, interleaved, ratio
from qtensor import Float8CurrentScaling, MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from qtensor.optim import inner_step
from qtensor.optim import master_step as optim
from qtensor.optim.masters import LastWrites
from qtensor.spec.recipes import Recipe

THREADS = 2
TARGET = 1.3  # times the dense step; of compressed states, times the step with states in fp32
SETTINGS = {"few large": (8, 1024, 4096, 7), "many small": (256, 64, 64, 15)}  # weights, rows, columns, rounds
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "float8 row": Float8CurrentScaling(),
    "float8 tensor": Float8CurrentScaling(granularity="tensor"),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
DENSE = "AdamW, dense fp32"
COMPRESSED = ("bf16", "mxfp8", "nvfp4")  # that are also asked with compressed states
# phase -> where it is looked up, and its name there; what is left of a step is "python"
PHASES: dict[str, tuple[Any, str]] = {
    "digests before": (LastWrites, "look"),
    "gradients to fp32": (inner_step, "lend_gradients"),
    "AdamW on masters": (torch.optim.AdamW, "step"),
    "agree on scales": (optim, "agree"),
    "write": (optim, "copy_many"),
    "requantize": (MasterWeightOptimizer, "_requantize"),
    "digests after": (LastWrites, "note"),
}


def run() -> dict[str, Any]:
    """All figures; see the module's docstring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        out: dict[str, Any] = {"threads": THREADS}
        for name, (count, rows, columns, rounds) in SETTINGS.items():
            print(f"  {name}: {count} weights of {rows} x {columns} ...", flush=True)
            out[name] = {"weights": count, "shape": [rows, columns], **_setting(count, (rows, columns), rounds)}
            out[name]["compressed_over_fp32"] = _compressed(count, (rows, columns), rounds)
        print("  all-reduces ...", flush=True)
        out["all_reduces"] = {name: _all_reduces(recipe) for name, recipe in RECIPES.items()}
    finally:
        torch.set_num_threads(threads)
    out["targets"] = _targets(out)
    return out


def _setting(count: int, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dense = [nn.Parameter(torch.randn(shape)) for _ in range(count)]
    grads = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(count)]  # all contenders share them
    for param, grad in zip(dense, grads, strict=True):
        param.grad = grad.float()
    optimizers: dict[str, torch.optim.Optimizer] = {DENSE: torch.optim.AdamW(dense, foreach=True)}
    for name, recipe in RECIPES.items():
        params = [_low(param, recipe) for param in dense]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizers[name] = MasterWeightOptimizer(torch.optim.AdamW, params, foreach=True)
    for optimizer in optimizers.values():
        optimizer.step()  # makes states; nothing is fresh afterwards
    clocks = {name: _Clocks() for name in RECIPES}
    contenders = {DENSE: Contender(call=optimizers[DENSE].step)}
    contenders |= {
        name: Contender(before=clock.start, call=optimizers[name].step, after=clock.stop)
        for name, clock in clocks.items()
    }
    seconds = interleaved(contenders, rounds, warm_up=True)
    dense_step = statistics.median(seconds[DENSE])
    fp32 = 4 * count * shape[0] * shape[1]
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "over_dense": {name: ratio(seconds[name], seconds[DENSE]) for name in RECIPES},
        "phases_over_dense": {name: clock.medians(seconds[name], dense_step) for name, clock in clocks.items()},
        "extra_memory": {name: round(_peak(optimizer.step) / fp32, 3) for name, optimizer in optimizers.items()},
    }


def _compressed(count: int, shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Steps on compressed states over those on states in fp32, on one core: their conversions do not run in threads."""
    torch.manual_seed(0)
    values = [torch.randn(shape) for _ in range(count)]
    grads = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(count)]
    steps: dict[str, Contender] = {}
    for name in COMPRESSED:
        for states in ({}, {"masters": "remainder", "moments": "float8"}):
            params = [_low(value, RECIPES[name]) for value in values]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, foreach=True, **states)
            optimizer.step()
            steps[f"{name}, compressed" if states else name] = Contender(call=optimizer.step)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = interleaved(steps, rounds, warm_up=True)
    finally:
        torch.set_num_threads(threads)
    return {name: ratio(seconds[f"{name}, compressed"], seconds[name]) for name in COMPRESSED}


def _low(param: Tensor, recipe: Recipe | None) -> nn.Parameter:
    low = param.detach().to(torch.bfloat16)
    return nn.Parameter(low if recipe is None else quantize(low, recipe))


class _Clocks:
    """Times the phases of the steps between `start` and `stop`."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._originals: dict[str, Callable[..., Any]] = {}

    def start(self) -> None:
        """Put a clock around each phase."""
        now = dict.fromkeys(PHASES, 0.0)
        self.steps.append(now)
        for phase, (owner, name) in PHASES.items():
            self._originals[phase] = getattr(owner, name)
            setattr(owner, name, _timed(self._originals[phase], phase, now))

    def stop(self) -> None:
        """Take the clocks away."""
        for phase, (owner, name) in PHASES.items():
            setattr(owner, name, self._originals[phase])

    def medians(self, seconds: list[float], unit: float) -> dict[str, float]:
        """The median of each phase in units; "python" is what they leave of the seconds of the same steps."""
        steps = self.steps[-len(seconds) :]  # without the one that warms up
        rest = [took - sum(step.values()) for step, took in zip(steps, seconds, strict=True)]
        found = {phase: statistics.median(step[phase] for step in steps) for phase in PHASES}
        return {phase: round(took / unit, 4) for phase, took in {**found, "python": statistics.median(rest)}.items()}


def _timed(original: Callable[..., Any], phase: str, clocks: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        began, inner = time.perf_counter(), sum(clocks.values())
        try:
            return original(*args, **kwargs)
        finally:  # less what phases inside of it took
            clocks[phase] += time.perf_counter() - began - (sum(clocks.values()) - inner)

    return call


def _peak(step: Callable[[], object]) -> int:
    """The most bytes alive at one moment of a step, beyond those alive when it begins."""
    with OfAllocator() as meter:
        step()
        meter.mark("step")
    return meter.peak["step"]


def _all_reduces(recipe: Recipe | None, weights: int = 3) -> int:
    """All-reduces of a step over a few weights, each cut along its rows over 2 ranks; any other collective fails."""
    with as_rank(0, 2) as mesh:
        params = []
        for _ in range(weights):
            shard = _low(torch.randn(32, 64), recipe).detach()
            param = nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
            param.grad = DTensor.from_local(torch.ones(32, 64, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)
            params.append(param)
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, foreach=True)
        optimizer.step()
        assert dist.get_world_size() == 2
        with LiveStorages() as seen:
            optimizer.step()
    counts = dict(seen.collectives)
    reduced = counts.pop("allreduce_", 0)
    assert not counts, counts
    return reduced


def _targets(results: dict[str, Any]) -> dict[str, Any]:
    targets = {}
    for setting in SETTINGS:
        for name, figures in results[setting]["over_dense"].items():
            met = figures["ratio"] <= TARGET
            phases = results[setting]["phases_over_dense"][name]
            extra = sorted(((v, k) for k, v in phases.items() if k != "AdamW on masters"), reverse=True)
            why = f"most is spent in: {extra[0][1]} ({extra[0][0]:.2f}), then {extra[1][1]} ({extra[1][0]:.2f})"
            targets[f"step of {setting} weights, {name}"] = {
                "value": figures["ratio"],
                "target": TARGET,
                "met": met,
                "why": "" if met else why,
            }
        for name, figures in results[setting]["compressed_over_fp32"].items():
            why = "rounding and encoding are some hundred instructions for each vector, more than memory takes"
            targets[f"compressed states, step of {setting} weights, {name}"] = at_most(figures["ratio"], TARGET, why)
    for name, count in results["all_reduces"].items():
        bound = 0 if RECIPES[name] is None else 1
        targets[f"all-reduces a step, {name}"] = {"value": count, "target": bound, "met": count == bound, "why": ""}
    return targets


def markdown(results: dict[str, Any]) -> str:
    """Ratios, phases and memory."""
    lines = [
        "`MasterWeightOptimizer(AdamW)` against `torch.optim.AdamW(foreach=True)` on dense fp32 parameters of the same",
        f"shapes, {results['threads']} threads: a step's time as a ratio of medians (least and greatest ratio within a",
        "round) and the parts of it; extra memory is the most a step allocates for itself, over the fp32 parameters.",
        "",
    ]
    columns = ["time / dense", "AdamW on masters", "quantize and write", "digests", "gradients", "extra memory"]
    for setting in SETTINGS:
        one, extra = results[setting], results[setting]["extra_memory"]
        title = f"{one['weights']} weights of {one['shape'][0]} x {one['shape'][1]}"
        lines += [
            f"| {' | '.join([title, *columns, 'all-reduces'])} |",
            "|---|---|---|---|---|---|---|---|",
            f"| {DENSE} | 1 | | | | | {extra[DENSE]:.2f} | 0 |",
        ]
        for name, figures in one["over_dense"].items():
            phases = one["phases_over_dense"][name]
            cells = [
                f"{figures['ratio']:.2f} ({figures['min']:.2f} - {figures['max']:.2f})",
                f"{phases['AdamW on masters']:.2f}",
                f"{phases['write'] + phases['requantize'] + phases['agree on scales']:.2f}",
                f"{phases['digests before'] + phases['digests after']:.2f}",
                f"{phases['gradients to fp32']:.2f}",
                f"{extra[name]:.2f}",
                str(results["all_reduces"][name]),
            ]
            lines.append(f"| {' | '.join([name, *cells])} |")
        told = ", ".join(f"{name} {with_spread(cell)}" for name, cell in one["compressed_over_fp32"].items())
        lines += ["", f"Compressed states, over those in fp32, on one core: {told}.", ""]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Where the time of a step goes: a bar of phases for each contender, the dense step as the unit."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(SETTINGS), figsize=(13, 5), layout="constrained")
    colours = plt.get_cmap("tab10")
    inner = "AdamW on masters"
    phases = [inner, *(phase for phase in (*PHASES, "python") if phase != inner)]
    for axis, setting in zip(axes, SETTINGS, strict=True):
        one = results[setting]
        left = dict.fromkeys(RECIPES, 0.0)
        for number, phase in enumerate(phases):
            widths = [one["phases_over_dense"][name][phase] for name in RECIPES]
            axis.barh(list(RECIPES), widths, left=list(left.values()), color=colours(number), label=phase)
            left = {name: left[name] + width for name, width in zip(RECIPES, widths, strict=True)}
        for name, end in left.items():
            axis.text(end, name, f" {one['over_dense'][name]['ratio']:.2f}", va="center")
        axis.axvline(1.0, color="black", linewidth=1)
        axis.axvline(TARGET, color="black", linewidth=1, linestyle="--")
        axis.set_xlim(0, max(1.5, *left.values()) * 1.1)
        axis.set_xlabel("time of a step / time of AdamW on dense fp32 (line: 1; dashes: target)")
        axis.set_title(f"{one['weights']} weights of {one['shape'][0]} x {one['shape'][1]}")
        axis.invert_yaxis()
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.suptitle("Where the time of an optimizer step with master weights goes")
    figure.savefig(path, dpi=120)
    plt.close(figure)
