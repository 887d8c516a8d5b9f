"""How far are quantize and dequantize from one copy of the input, and how fast is torchao 0.18 beside them?

A matrix of 4096x4096 in bf16 and two threads, as users call it: `quantize(x, recipe)`, `q.dequantize()` and
`q.copy_(x)`, which requantizes in place as an optimizer writes. Kernels run compiled (what "auto" chooses at this size)
and eager. The peer is torchao's MXTensor and NVFP4Tensor, eager and under torch.compile; it rounds scales as ours do,
and takes the tensor-wide scale of NVFP4 from the amax in the same call. It has no such Float8 tensor and no square
blocks. The unit is `out.copy_(x)` into memory that exists already.

First the bytes are compared: if compiled and eager kernels give different ones, an error is raised instead of timing.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import at_least, at_most, with_spread
from benchmarks.timing import THREADS, Contender, interleaved, ratio, two_threads
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    use_kernels,
)
from qtensor.spec.recipes import Recipe

SHAPE = (4096, 4096)
RECIPES: dict[str, Recipe] = {
    "float8 row": Float8CurrentScaling(),
    "float8 tensor": Float8CurrentScaling(granularity="tensor"),
    "float8 block": Float8BlockScaling(),
    "float8 block row": Float8BlockScaling(blocks="row"),
    "mxfp8 row": MXFP8BlockScaling(),
    "mxfp8 square": MXFP8BlockScaling(blocks="square"),
    "mxfp4": MXFP4BlockScaling(),
    "int4 32": Int4GroupScaling(),
    "int4 128": Int4GroupScaling(group=128),
    "nvfp4 row": NVFP4BlockScaling(),
    "nvfp4 square": NVFP4BlockScaling(blocks="square"),
}
OPERATIONS = ("quantize", "dequantize", "requantize")
PEERS = ("float8 block", "mxfp8 row", "mxfp4", "nvfp4 row")
WAYS = ("compiled", "eager", "torchao compiled", "torchao eager")
ROUNDS = {"fast": 11, "eager": 2, "peer": 5}
AT_MOST_COPIES = 8.0
OVER_TORCHAO_EAGER = {
    "quantize float8 block": 4.0,
    "dequantize float8 block": 4.0,
    "quantize mxfp8 row": 4.0,
    "quantize nvfp4 row": 8.0,
    "dequantize mxfp8 row": 4.0,
    "dequantize nvfp4 row": 4.0,
}


def run() -> dict[str, Any]:
    """All ratios; `targets` says which are as they should be."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with two_threads(), use_kernels("compiled"):
        quantized = {name: quantize(x, recipe) for name, recipe in RECIPES.items()}
        for name, one in quantized.items():
            _check_bytes(name, x, one)
        print("  compiled bytes equal eager bytes", flush=True)
        out = torch.zeros_like(x)
        fast = {"copy": Contender(call=lambda: out.copy_(x)), **_ours(x, quantized, "compiled")}
        theirs, compiled_theirs, skipped = _peers(x)
        fast |= compiled_theirs
        eager = _ours(x, quantized, "eager")
        peer = {name: one for name, one in fast.items() if name.endswith(PEERS)} | theirs
        seconds = {
            "fast": interleaved(fast, ROUNDS["fast"], warm_up=True),
            "eager": interleaved(eager, ROUNDS["eager"], warm_up=False),  # comparing bytes was their warm-up
            "peer": interleaved(peer, ROUNDS["peer"], warm_up=True),
        }
    results = {
        "shape": SHAPE,
        "rounds": ROUNDS,
        "skipped": skipped,
        "over_one_copy": _over_one_copy(seconds),
        "torchao_over_ours": _torchao_over_ours(seconds),
    }
    results["targets"] = _targets(results)
    return results


def _check_bytes(name: str, x: Tensor, compiled: QuantizedTensor) -> None:
    """Raises RuntimeError unless eager kernels give the bytes that compiled ones gave."""
    with use_kernels("eager"):
        eager = quantize(x, RECIPES[name])
        values = eager.dequantize()
    pairs = {part: (value, eager.parts()[part]) for part, value in compiled.parts().items()}
    pairs["dequantized"] = (compiled.dequantize(), values)
    for what, (mine, other) in pairs.items():
        if not torch.equal(_bytes(mine), _bytes(other)):
            raise RuntimeError(f"{name}: the {what} of compiled kernels differs from that of eager ones")


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _ours(x: Tensor, quantized: dict[str, QuantizedTensor], mode: str) -> dict[str, Contender]:
    """Way, operation and recipe -> what is timed, with kernels in that mode."""
    calls: dict[str, Callable[[], object]] = {}
    for name, recipe in RECIPES.items():
        calls[f"quantize {name}"] = lambda recipe=recipe: quantize(x, recipe)
        calls[f"dequantize {name}"] = quantized[name].dequantize
        if mode == "compiled":  # eager, it is quantize and a copy
            calls[f"requantize {name}"] = lambda one=quantized[name]: one.copy_(x)
    return {
        f"{mode}: {name}": Contender(before=lambda: use_kernels(mode), call=call, after=lambda: use_kernels("compiled"))
        for name, call in calls.items()
    }


def _peers(x: Tensor) -> tuple[dict[str, Contender], dict[str, Contender], dict[str, str]]:
    """The peer's calls eager, those that compile compiled, and why the others do not."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, PerBlock

    def float8_block(value: Tensor) -> Tensor:
        return Float8Tensor.from_hp(value, granularity=PerBlock([128, 128]))  # type: ignore[no-any-return]

    def mxfp8(value: Tensor) -> Tensor:
        return MXTensor.to_mx(value, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)  # type: ignore[no-any-return]

    def mxfp4(value: Tensor) -> Tensor:
        return MXTensor.to_mx(value, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode.RCEIL)  # type: ignore[no-any-return]

    def nvfp4(value: Tensor) -> Tensor:
        return NVFP4Tensor.to_nvfp4(value, per_tensor_scale=per_tensor_amax_to_scale(value.abs().max()))  # type: ignore[no-any-return]

    def dequantize_float8_block(value: Any) -> Tensor:
        return value.dequantize()  # type: ignore[no-any-return]

    def dequantize_mxfp8(value: Any) -> Tensor:
        return value.dequantize(torch.bfloat16)  # type: ignore[no-any-return]

    def dequantize_mxfp4(value: Any) -> Tensor:
        return value.dequantize(torch.bfloat16)  # type: ignore[no-any-return]

    def dequantize_nvfp4(value: Any) -> Tensor:  # a function of its own, as torch.compile keeps its caches by function
        return value.dequantize(torch.bfloat16)  # type: ignore[no-any-return]

    calls: dict[str, tuple[Callable[[Any], Tensor], Tensor]] = {
        "quantize float8 block": (float8_block, x),
        "quantize mxfp8 row": (mxfp8, x),
        "quantize mxfp4": (mxfp4, x),
        "quantize nvfp4 row": (nvfp4, x),
        "dequantize float8 block": (dequantize_float8_block, float8_block(x)),
        "dequantize mxfp4": (dequantize_mxfp4, mxfp4(x)),
        "dequantize mxfp8 row": (dequantize_mxfp8, mxfp8(x)),
        "dequantize nvfp4 row": (dequantize_nvfp4, nvfp4(x)),
    }
    eager, compiled, skipped = {}, {}, {}
    for name, (call, value) in calls.items():
        eager[f"torchao eager: {name}"] = Contender(call=lambda call=call, value=value: call(value))
        faster = torch.compile(call)
        try:
            faster(value)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises
            last = str(error).strip().splitlines()[0]
            skipped[f"torchao compiled: {name}"] = f"does not compile: {type(error).__name__}: {last}"
            continue
        compiled[f"torchao compiled: {name}"] = Contender(call=lambda call=faster, value=value: call(value))
    return eager, compiled, skipped


# -- figures -----------------------------------------------------------------------------------------------------------


Seconds = dict[str, dict[str, list[float]]]  # kind of rounds -> contender -> seconds


def _over_one_copy(seconds: Seconds) -> dict[str, dict[str, dict[str, float]]]:
    """Way -> operation and recipe -> median, least and greatest seconds in units of the median copy."""
    out: dict[str, dict[str, dict[str, float]]] = {way: {} for way in WAYS}
    unit = statistics.median(seconds["fast"]["copy"])
    for rounds in ("peer", "eager", "fast"):  # a later one replaces an earlier one
        for name, values in seconds[rounds].items():
            way, _, what = name.partition(": ")
            if what:
                of = {"ratio": statistics.median(values), "min": min(values), "max": max(values)}
                out[way][what] = {key: round(value / unit, 3) for key, value in of.items()}
    return out


def _torchao_over_ours(seconds: Seconds) -> dict[str, dict[str, dict[str, float]]]:
    """The peer, eager and compiled, each over our compiled kernels."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for way, rounds in (("torchao eager", "peer"), ("torchao compiled", "fast")):
        out[way] = {
            name.partition(": ")[2]: ratio(values, seconds[rounds][name.replace(way, "compiled")])
            for name, values in seconds[rounds].items()
            if name.startswith(way)
        }
    return out


def _targets(results: dict[str, Any]) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    over = results["torchao_over_ours"]
    for name, least in OVER_TORCHAO_EAGER.items():
        targets[f"{name}: torchao eager / ours"] = at_least(over["torchao eager"][name]["ratio"], least)
    for name, value in over["torchao compiled"].items():
        why = f"rounds from {value['min']:.2f} to {value['max']:.2f}"
        targets[f"{name}: torchao compiled / ours"] = at_least(value["ratio"], 1.0, why)
    for operation in OPERATIONS:
        rows = {name: results["over_one_copy"]["compiled"][f"{operation} {name}"]["ratio"] for name in RECIPES}
        over_limit = [f"{name} {value:.1f}" for name, value in rows.items() if value > AT_MOST_COPIES]
        why = f"above it: {', '.join(over_limit)}"
        targets[f"{operation} / one copy, slowest recipe"] = at_most(max(rows.values()), AT_MOST_COPIES, why)
    return targets


def markdown(results: dict[str, Any]) -> str:
    """Two tables: times of one copy, and torchao over ours."""
    rows, columns = results["shape"]
    lines = [
        f"Times of one copy of the input ({rows}x{columns} bf16, {THREADS} threads), median (least - greatest):",
        "",
        f"| operation | {' | '.join(WAYS)} |",
        "|---|" + "---:|" * len(WAYS),
    ]
    over = results["over_one_copy"]
    for operation in OPERATIONS:
        for recipe in RECIPES:
            cells = [with_spread(over[way].get(f"{operation} {recipe}")) for way in WAYS]
            lines.append(f"| {operation} {recipe} | {' | '.join(cells)} |")
    ways = tuple(results["torchao_over_ours"])
    lines += ["", "torchao's time over that of our compiled kernels:", ""]
    lines += [f"| operation | {' | '.join(ways)} |", "|---|" + "---:|" * len(ways)]
    for name in (*OVER_TORCHAO_EAGER, "quantize mxfp4", "dequantize mxfp4"):
        cells = [with_spread(results["torchao_over_ours"][way].get(name)) for way in ways]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [f"\n{name}: {why}." for name, why in results["skipped"].items()]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel an operation: bars of all ways in times of one copy, on a logarithmic axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    over = results["over_one_copy"]
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    colours = dict(zip(WAYS, ("C0", "C9", "C3", "C1"), strict=True))
    for axes, operation in zip(figure.subplots(1, len(OPERATIONS), sharey=True, sharex=True), OPERATIONS, strict=True):
        for at, recipe in enumerate(RECIPES):
            shown = [way for way in WAYS if f"{operation} {recipe}" in over[way]]
            for number, way in enumerate(shown):
                value = over[way][f"{operation} {recipe}"]["ratio"]
                y = at + (number - (len(shown) - 1) / 2) * 0.2
                axes.barh(y, value, 0.19, color=colours[way])
                axes.annotate(f" {value:.1f}", (value, y), va="center", fontsize=7)
        axes.axvline(AT_MOST_COPIES, color="black", linewidth=1, linestyle="--")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(title=operation if operation != "requantize" else "requantize in place", xscale="log")
        axes.set_xlabel("times of one copy of the input (dashed: target)")
        axes.set_yticks(range(len(RECIPES)), list(RECIPES))
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
        axes.margins(x=0.15)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].invert_yaxis()  # shared
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside lower center", ncols=len(WAYS), frameon=False)
    figure.suptitle(
        f"Quantize and dequantize {results['shape'][0]}x{results['shape'][1]} bf16 on {THREADS} CPU threads"
    )
    figure.savefig(path, dpi=110)
