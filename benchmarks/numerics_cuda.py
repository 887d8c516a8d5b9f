"""Quantize and dequantize on a GPU: what share of a copy's bandwidth do they reach?

    share = (bytes read and written / time)  over the same of out.copy_(x)

Only bytes that have to move count: the dense values once, the payload and the scales once. A tensor-wide scale needs a
pass over the values before them, which counts as time and not as bytes. Times are the device's alone, from memory and
not from the L2 cache (device_time.py); what a call takes of the host stands beside them.
"""

import statistics
from typing import Any

import torch

from benchmarks.device_time import Times, times_on
from benchmarks.report import at_least
from benchmarks.timing import ratio
from qtensor import QuantizedTensor, quantize
from qtensor.spec.recipes import Recipe

SIZES = (8192, 16384)
ROUNDS = 21
AT_LEAST = 0.8  # what is aimed at
# What kernels can not reach, by the count of their code in docs/speed.md: 0.7 of that is the floor.
COUNTED = {
    "quantize float8 tensor": 0.60,
    "quantize nvfp4 row": 0.56,
    "quantize nvfp4 square": 0.56,
}
NO_CUDA = "no CUDA device"


def shares(recipes: dict[str, Recipe]) -> dict[str, dict[str, dict[str, float]]] | str:
    """Size -> operation and recipe -> share of a copy's bandwidth; or why there are none."""
    if not torch.cuda.is_available():
        return NO_CUDA
    return {str(size): shares_at(size, recipes, "cuda") for size in SIZES}


def shares_at(size: int, recipes: dict[str, Recipe], device: str) -> dict[str, dict[str, float]]:
    """The shares of a matrix of this many rows and columns."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size, size, generator=generator, device=device).to(torch.bfloat16)
    out = torch.empty_like(x)
    quantized = {name: quantize(x, recipe) for name, recipe in recipes.items()}
    calls: dict[str, Any] = {"copy": lambda: out.copy_(x)}
    for name, recipe in recipes.items():
        calls[f"quantize {name}"] = lambda recipe=recipe: quantize(x, recipe)
        calls[f"dequantize {name}"] = quantized[name].dequantize
    times = times_on(device, calls, ROUNDS)
    found = {}
    for name in calls:
        if name != "copy":
            bytes_moved = x.nbytes + _bytes(quantized[name.partition(" ")[2]])
            over = ratio(times["copy"].device, times[name].device)
            share = {key: round(value * bytes_moved / (2 * x.nbytes), 3) for key, value in over.items()}
            found[name] = share | in_microseconds(times[name])
    return found


def in_microseconds(times: Times) -> dict[str, float]:
    """Medians of both times of a call."""
    return {
        f"{side}_us": round(statistics.median(seconds) * 1e6, 1)
        for side, seconds in (("device", times.device), ("host", times.host))
    }


def _bytes(q: QuantizedTensor) -> int:
    return sum(part.nbytes for part in q.parts().values())


def targets(found: dict[str, dict[str, dict[str, float]]] | str) -> dict[str, Any]:
    """At least 80 %, or 0.7 of what the code allows; none without a device."""
    if isinstance(found, str):
        return {}
    return {
        f"{name}, {size} x {size} on a GPU: share of a copy's bandwidth": at_least(of["ratio"], floor_of(name))
        for size, names in found.items()
        for name, of in names.items()
    }


def floor_of(name: str) -> float:
    """The share that an operation of a recipe must reach."""
    return round(0.7 * COUNTED[name], 2) if name in COUNTED else AT_LEAST


def markdown(found: dict[str, dict[str, dict[str, float]]] | str) -> str:
    """A row an operation, or one line."""
    if isinstance(found, str):
        return f"\nOn a GPU: {found}."
    sizes = list(found)
    title = "Share of a copy's bandwidth on a GPU, by the device's time (device / host, microseconds):"
    lines = ["", title, "", f"| operation | {' | '.join(sizes)} |", "|---|" + "---:|" * len(sizes)]
    lines += [f"| {name} | {' | '.join(_cell(found[size][name]) for size in sizes)} |" for name in found[sizes[0]]]
    return "\n".join(lines)


def _cell(of: dict[str, float]) -> str:
    return f"{of['ratio']} ({of['device_us']:.0f} / {of['host_us']:.0f})"
