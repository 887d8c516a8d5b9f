"""How many bytes a parameter does training hold on the GPU: at rest, with gradients, at the peak of an optimizer step?

The steps and contenders of `python -m benchmarks memory`, with blocks of Llama-3-8B, as torch's allocator for CUDA has
them (torch.cuda.memory_allocated and max_memory_allocated). A second run is the one that counts: the first compiles.
"""

from collections.abc import Iterator
from functools import partial

from benchmarks.allocations import meter_for
from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from benchmarks.memory_contenders import BF16_MASTERS, CONTENDERS, RECIPES, Contender
from benchmarks.memory_step import SHARES, Size, figures, measure

SECONDS = 40
LAYERS = 2  # at most
WHEN = ("rest", "with gradients", "peak")  # of a step
AIMS = tuple(
    Aim(row=f"{name}, fp32 masters", figure=f"linears, {moment}", most=1.0, over=BF16_MASTERS)
    for name in RECIPES
    for moment in ("rest", "peak")
)


def rows(scale: Scale) -> Iterator[Row]:
    """Those last that compile for every shape."""
    size = Size(
        hidden=scale.hidden,
        inner=scale.inner,
        groups=scale.heads // scale.groups,
        vocabulary=scale.vocabulary,
        layers=min(scale.layers, LAYERS),
        tokens=scale.tokens,
    )
    for name, contender in sorted(CONTENDERS.items(), key=lambda entry: bool(entry[1].library)):
        if why := contender.missing():
            yield Row(name, skipped=why)
        else:
            yield tried(name, partial(_measured, contender, size, scale.device))


def _measured(contender: Contender, size: Size, device: str) -> Figures:
    found: Figures = {}
    measure(contender, size, "linears", meter_for(device), device)
    for share in SHARES:
        meter = meter_for(device)
        told = figures(measure(contender, size, share, meter, device), meter)
        found |= {f"{share}, {moment}": told[moment] for moment in WHEN}
        found[f"{share}, temporaries"] = told["at the peak"]["temporaries"]
    return found
