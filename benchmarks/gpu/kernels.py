"""What share of a copy's bandwidth do kernels reach, and what do their calls take of the host?

    of a copy = (bytes that have to move / time)  over the same of out.copy_(x), in the same rounds

Only bytes that have to move count: the dense values once, the payload and the scales once. A tensor-wide scale needs a
pass over the values before them, which counts as time and not as bytes: "encode" is quantize under an amax that is
known. "requantize" is `q.copy_(x)`, in place. Times are the device's alone, from memory and not from the L2 cache
(device_time.py); what a call takes of the host stands beside them.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.device_time import launches_of, times_on
from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from benchmarks.numerics import RECIPES as ALL
from benchmarks.timing import ratio
from fsdp_hooks.kernels.digest import digests
from qtensor import QuantizedTensor, quantize
from qtensor.numerics import kernels, transposing
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import tensor_wide

SECONDS = 60
RECIPES: dict[str, Recipe] = {
    name: ALL[name]
    for name in (
        *("float8 row", "float8 tensor", "float8 block", "mxfp8 row", "mxfp8 square"),
        *("mxfp4", "nvfp4 row", "nvfp4 square"),
    )
}
OF_A_COPY, DEVICE, HOST, LAUNCHES = "of a copy", "device us", "host us", "launches"
# Share of a copy's bandwidth. A tensor-wide scale takes two reads, so less is to be had.
LEAST = {
    "quantize": {"mxfp8 row": 0.95, "mxfp8 square": 0.9, "float8 row": 0.9, "float8 tensor": 0.62}
    | {"nvfp4 row": 0.6, "nvfp4 square": 0.6, "mxfp4": 0.95},
    "encode": {"float8 tensor": 0.95, "nvfp4 row": 0.95, "nvfp4 square": 0.95},
    "dequantize": dict.fromkeys(RECIPES, 0.93),
}
TRANSPOSE, BOTH = "transpose of fp8 bytes", "float8 of rows and of columns"
AIMS = (
    *(
        Aim(row=f"{what} {name}", figure=OF_A_COPY, least=least)
        for what, of in LEAST.items()
        for name, least in of.items()
    ),
    *(
        Aim(row=f"requantize {name}", figure=DEVICE, most=1.05, over=f"quantize {name}")
        for name in ("mxfp8 row", "nvfp4 row", "float8 row")
    ),
    *(Aim(row=f"quantize {name}", figure=LAUNCHES, most=3) for name in ("float8 tensor", "nvfp4 row")),
    *(Aim(row=f"quantize {name}", figure=HOST, most=80) for name in ("float8 row", "mxfp8 row", "nvfp4 row")),
    *(Aim(row=f"dequantize {name}", figure=HOST, most=60) for name in ("float8 row", "mxfp8 row", "nvfp4 row")),
    Aim(row=TRANSPOSE, figure=OF_A_COPY, least=0.85),
    Aim(row=BOTH, figure=OF_A_COPY, least=0.6),  # read twice: for the amaxes, and for the codes
)


def rows(scale: Scale) -> Iterator[Row]:
    """Recipe after recipe."""
    generator = torch.Generator(scale.device).manual_seed(0)
    x = torch.randn(scale.side, scale.side, generator=generator, device=scale.device).to(torch.bfloat16)
    moved = 2 * x.nbytes
    yield tried("copy of bf16", lambda: _measured(scale, x, torch.empty_like(x).copy_, moved, x))
    for name, recipe in RECIPES.items():
        for what in ("quantize", "encode", "dequantize", "requantize"):
            if what == "encode" and not tensor_wide(recipe):
                continue
            yield tried(f"{what} {name}", partial(_of_recipe, scale, x, recipe, what))
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    yield tried(TRANSPOSE, lambda: _measured(scale, x, lambda _: transposing.turned(codes), 2 * codes.nbytes, x))
    of_rows = RECIPES["float8 row"].of_rows
    both = x.nbytes + 2 * codes.nbytes
    yield tried(BOTH, lambda: _measured(scale, x, lambda x: transposing.encode_both(x, None, of_rows), both, x))
    yield tried("digests of the payloads of 4 layers", partial(_digests, scale, x))


def _of_recipe(scale: Scale, x: Tensor, recipe: Recipe, what: str) -> Figures:
    q = quantize(x, recipe)
    assert isinstance(q, QuantizedTensor)
    amax = kernels.shared_amax(x, recipe) if what == "encode" else None
    calls: dict[str, Callable[[Tensor], object]] = {
        "quantize": lambda x: quantize(x, recipe),
        "encode": lambda x: kernels.encode(x, recipe, amax),
        "dequantize": lambda _: q.dequantize(),
        "requantize": q.copy_,
    }
    return _measured(scale, x, calls[what], x.nbytes + sum(part.nbytes for part in q.parts().values()), x)


def _measured(scale: Scale, x: Tensor, call: Callable[[Tensor], object], moved: int, given: Tensor) -> Figures:
    """A call that has to move so many bytes, in turns with a copy of `x`."""
    out = torch.empty_like(x)
    calls = {"copy": lambda: out.copy_(x), "call": lambda: call(given)}
    times = times_on(scale.device, calls, scale.rounds)
    seconds = statistics.median(times["call"].device)
    return {
        OF_A_COPY: ratio(times["copy"].device, times["call"].device)["ratio"] * moved / (2 * x.nbytes),
        DEVICE: seconds * 1e6,
        HOST: statistics.median(times["call"].host) * 1e6,
        LAUNCHES: launches_of(calls["call"], scale.device).number,
        "GB/s": moved / seconds / 1e9,
    }


def _digests(scale: Scale, x: Tensor) -> Figures:
    """Of each weight alone, as an optimizer takes them before and after a step; bytes are read once."""
    groups = [[torch.zeros(shape, dtype=torch.uint8, device=scale.device)] for shape in scale.shapes * 4]
    moved = sum(tensor.nbytes for (tensor,) in groups)
    return _measured(scale, x, lambda _: digests(groups), moved, x)
