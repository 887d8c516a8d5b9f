"""What do kernels, products, optimizer steps and snapshots cost on a GPU? `make gpu`, or `python -m benchmarks --gpu`.

    kernels      quantize and dequantize: what share of a copy's bandwidth do they reach (numerics_cuda.py)
    linear       forward and backward of a linear layer over those of the same layer in bf16
    step         MasterWeightOptimizer(AdamW) over torch.optim.AdamW(foreach=True) on dense fp32
    snapshot     QuantizedStager over one copy of the same bytes into pinned memory

Device and host are two times (device_time.py). Targets of kernels, layers and steps judge what the device works: of
steps, which wait for values themselves, the sum of their kernels. What a call takes of the host is told beside it, as a
ratio, too, and judged nowhere. A snapshot is judged by what its caller waits for. Contenders take turns, and what is
kept is the ratio of medians with the spread over the rounds. Every floor and ceiling here fails the run where it is
missed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import numerics, numerics_cuda
from benchmarks.device_time import Times, times_on
from benchmarks.report import at_most, with_spread
from benchmarks.timing import Contender, interleaved, nothing, ratio
from dcp_adapters import QuantizedStager
from qtensor import MasterWeightOptimizer, quantize, quantized_model_init
from qtensor.spec.recipes import Recipe

RECIPES: dict[str, Recipe] = {
    name: numerics.RECIPES[name]
    for name in ("float8 row", "float8 tensor", "mxfp8 row", "mxfp8 square", "nvfp4 row", "nvfp4 square")
}
ROUNDS = 21
WIDTH, TOKENS = 4096, 8192
WEIGHTS = {"few large": (8, 4096), "many small": (256, 256)}  # weights, rows and columns
LINEAR_AT_MOST, SNAPSHOT_AT_MOST = 1.15, 1.5
STEP_AT_MOST = {"few large": 1.3, "many small": 2.0}
SAID = {
    "linear": "forward and backward over bf16",
    "few large": "step over AdamW, few large weights",
    "many small": "step over AdamW, many small weights",
    "snapshot": "snapshot over a copy into pinned memory",
}


def run() -> dict[str, Any]:
    """All figures; `targets` says which are as they should be."""
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "kernels": numerics_cuda.shares(RECIPES)}
    print("  kernels done", flush=True)
    results["over"] = figures("cuda", width=WIDTH, tokens=TOKENS, weights=WEIGHTS, rounds=ROUNDS)
    results["targets"] = numerics_cuda.targets(results["kernels"]) | targets(results["over"])
    return results


def figures(
    device: str, *, width: int, tokens: int, weights: dict[str, tuple[int, int]], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Question -> recipe -> the ratio to what it is compared with."""
    found = {"linear": linear(device, width, tokens, rounds)}
    for name, (count, size) in weights.items():
        found[name] = steps(device, count, size, rounds)
        print(f"  {SAID[name]} done", flush=True)
    return found | {"snapshot": snapshots(device, width, rounds)}


def linear(device: str, width: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Forward and backward of one linear layer."""
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    layers: dict[str, nn.Module] = {"bf16": nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device)}
    for name, recipe in RECIPES.items():
        with quantized_model_init(recipe), torch.device(device):
            layers[name] = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    def passes(layer: nn.Module) -> None:
        layer(x).sum().backward()
        layer.zero_grad()
        x.grad = None

    calls = {name: partial(passes, layer) for name, layer in layers.items()}
    return _over("bf16", times_on(device, calls, rounds))


def steps(device: str, count: int, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """A step of the optimizer on this many square weights."""
    calls: dict[str, Any] = {}
    for name, recipe in {"dense": None, **RECIPES}.items():
        dtype = torch.float32 if recipe is None else torch.bfloat16
        values = [torch.randn(size, size, dtype=dtype, device=device) for _ in range(count)]
        params = [nn.Parameter(value if recipe is None else quantize(value, recipe)) for value in values]
        for param, value in zip(params, values, strict=True):
            param.grad = value * 0.1
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(params, lr=1e-3, foreach=True)
            if recipe is None
            else MasterWeightOptimizer(torch.optim.AdamW, params, lr=1e-3, foreach=True)
        )
        optimizer.step()  # the first makes the moments
        calls[name] = optimizer.step
    return _over("dense", times_on(device, calls, rounds, waits=True))


def snapshots(device: str, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Staging 8 weights; each recipe over one copy of as many bytes."""
    found = {}
    for name, recipe in RECIPES.items():
        q = {f"w{n}": quantize(torch.randn(width, width, device=device), recipe) for n in range(8)}
        nbytes = sum(part.nbytes for each in q.values() for part in each.parts().values())
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device == "cuda")
        stager = QuantizedStager(max_snapshots=1)
        calls = {
            "copy": waited_for(lambda target=target, source=source: target.copy_(source), device),
            name: waited_for(lambda stager=stager, q=q: bool(stager.stage(q)), device),
        }
        waited = interleaved(calls, rounds, warm_up=True)
        found[name] = ratio(waited[name], waited["copy"])
        stager.close()
    return found


def waited_for(call: Any, device: str) -> Contender:
    """A contender that ends when the device has done its work."""
    wait = torch.cuda.synchronize if device == "cuda" else nothing

    def whole() -> object:
        result = call()
        wait()
        return result

    return Contender(before=wait, call=whole)


def _over(name: str, times: dict[str, Times]) -> dict[str, dict[str, float]]:
    """The ratio of each contender's time on the device to that of this name, and what it and the host take."""
    return {
        other: ratio(taken.device, times[name].device)
        | {"host_ratio": ratio(taken.host, times[name].host)["ratio"]}
        | numerics_cuda.in_microseconds(taken)
        for other, taken in times.items()
        if other != name
    }


def targets(over: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Ceilings of the ratios."""
    most = {"linear": LINEAR_AT_MOST, "snapshot": SNAPSHOT_AT_MOST, **STEP_AT_MOST}
    return {
        f"{SAID[question]}, {name}": at_most(one["ratio"], most[question])
        for question, names in over.items()
        for name, one in names.items()
    }


def markdown(results: dict[str, Any]) -> str:
    """A table of the kernels, and one of the ratios."""
    over = results["over"]
    lines = [f"Device: {results['device']}.", numerics_cuda.markdown(results["kernels"]), ""]
    lines += [f"| times | {' | '.join(RECIPES)} |", "|---|" + "---:|" * len(RECIPES)]
    lines += [f"| {SAID[q]} | {' | '.join(with_spread(over[q].get(name)) for name in RECIPES)} |" for q in over]
    hosts = {q: [over[q][name].get("host_ratio") for name in RECIPES] for q in over}
    lines += [f"| host: {SAID[q]} | {' | '.join(map(str, of))} |" for q, of in hosts.items() if None not in of]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of the kernels' shares at the largest size, with the floor."""
    from matplotlib.figure import Figure

    shares = results["kernels"][max(results["kernels"], key=int)]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(shares), [one["ratio"] for one in shares.values()])
    floors = [numerics_cuda.floor_of(name) for name in shares]
    axes.plot(floors, list(shares), "k|", markersize=14)
    axes.invert_yaxis()
    axes.set_xlabel(f"share of a copy's bandwidth (lines: floors), {results['device']}")
    figure.savefig(path, dpi=110)
