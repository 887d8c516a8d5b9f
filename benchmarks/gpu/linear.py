"""What does one linear layer take of the host and of the device, forward and backward, beside torch's own in bf16?

Few tokens, so that what is seen of the host is Python; with many, the device shows what its products cost. Then a stack
of experts of that layer's inner size, whose tokens are shared out unevenly.
"""

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu.device_time import times_on
from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize, quantized_model_init
from qtensor.spec.recipes import Recipe

SECONDS = 60
DENSE = "bf16"
WEIGHT_ONLY: dict[str, Recipe] = {
    "float8 row": Float8CurrentScaling(),
    "mxfp8 row": MXFP8BlockScaling(),
    "nvfp4 row": NVFP4BlockScaling(),
}
PRODUCTS: dict[str, Recipe] = {
    f"float8 {granularity}, low-precision products": Float8CurrentScaling(
        granularity=granularity, activations="dynamic", gradients="e5m2"
    )
    for granularity in ("tensor", "row")
}
RECIPES: dict[str, Recipe | None] = {DENSE: None, **WEIGHT_ONLY, **PRODUCTS}
GROUPED: dict[str, Recipe | None] = {
    DENSE: None,
    "mxfp8 row": MXFP8BlockScaling(),
    "float8 row, low-precision products": Float8CurrentScaling(activations="dynamic", gradients="e4m3"),
    "mxfp8 row, low-precision products": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
}
EXPERTS = 8
MORE, DEVICE = "host us above bf16's", "device us"
AIMS = (
    *(Aim(row=name, figure=MORE, most=250) for name in WEIGHT_ONLY),
    *(
        Aim(row=f"{name}, many tokens", figure=DEVICE, most=most, over=f"{DENSE}, many tokens")
        for recipes, most in ((WEIGHT_ONLY, 1.15), (PRODUCTS, 0.8))
        for name in recipes
    ),
)


def rows(scale: Scale) -> Iterator[Row]:
    """A layer of hidden x hidden, first with few tokens."""
    for tokens, said in ((min(64, scale.tokens), ""), (scale.sequences * scale.tokens, ", many tokens")):
        dense = 0.0
        for name, recipe in RECIPES.items():
            row = tried(f"{name}{said}", lambda recipe=recipe, tokens=tokens: _passes(scale, recipe, tokens))
            dense = row.figures.get("host us", dense) if name == DENSE else dense
            if "host us" in row.figures:
                row.figures[MORE] = round(row.figures["host us"] - dense, 1)
            yield row
    for name, recipe in GROUPED.items():
        yield tried(f"{name}, experts", lambda recipe=recipe: _grouped_passes(scale, recipe))


def _passes(scale: Scale, recipe: Recipe | None, tokens: int) -> Figures:
    with quantized_model_init(recipe or MXFP8BlockScaling(), enabled=recipe is not None), torch.device(scale.device):
        layer = nn.Linear(scale.hidden, scale.hidden, bias=False, dtype=torch.bfloat16)
    x = torch.randn(tokens, scale.hidden, dtype=torch.bfloat16, device=scale.device, requires_grad=True)
    above = torch.randn_like(x)

    def both() -> None:
        layer.weight.grad = x.grad = None
        layer(x).backward(above)

    times = times_on(scale.device, {"call": both}, scale.rounds)["call"]
    return {DEVICE: statistics.median(times.device) * 1e6, "host us": statistics.median(times.host) * 1e6}


def _grouped_passes(scale: Scale, recipe: Recipe | None) -> Figures:
    tokens, width = scale.sequences * scale.tokens, scale.inner // 4
    values = torch.randn(EXPERTS, width, scale.hidden, dtype=torch.bfloat16, device=scale.device)
    weight = nn.Parameter(values if recipe is None else quantize(values, recipe))
    x = torch.randn(tokens, scale.hidden, dtype=torch.bfloat16, device=scale.device, requires_grad=True)
    # the first expert has an eighth of what the last has, and one has none
    share = torch.arange(1, EXPERTS + 1, dtype=torch.float64)
    share[EXPERTS // 2] = 0
    ends = (share.cumsum(0) / share.sum() * tokens).to(device=scale.device, dtype=torch.int32)
    above = torch.randn(tokens, width, dtype=torch.bfloat16, device=scale.device)

    def both() -> None:
        weight.grad = x.grad = None
        F.grouped_mm(x, weight.transpose(-2, -1), offs=ends).backward(above)

    times = times_on(scale.device, {"call": both}, scale.rounds)["call"]
    return {DEVICE: statistics.median(times.device) * 1e6, "host us": statistics.median(times.host) * 1e6}
