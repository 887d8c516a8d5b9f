"""How many bits a weight are exact deltas of SmolLM2's linear weights, and how long do they take, in copies of bytes?

The weights' fp32 masters take steps of Adam (no decay) under gradients by chance, each element on its own, as in
reinforcement learning at a small learning rate. Before and after the last step they are stored in each format, and the
delta between the two is made, written to memory, read and applied. Sizes are of the whole file, with names and tables;
they depend on the weights, the seed and the version of zstd alone. bf16 is what is sent where nothing is quantized.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import at_most
from benchmarks.timing import Contender, interleaved, ratio
from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.make import delta_between
from dcp_adapters.delta.patch_format import delta_from_bytes, delta_to_bytes
from dcp_adapters.delta.stored_states import InMemory
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize

LR, BETAS, EPSILON = 1e-6, (0.9, 0.999), 1e-8
LAYERS = 1  # without `full`
WARM_UP = 10  # steps before the one that is measured; the first alone would move every weight by the learning rate
REPEATS = 3
FORMATS: dict[str, Any] = {
    "bf16": None,
    "float8_row": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
MOST_BITS = {"float8_row": 0.025, "mxfp8": 0.013, "nvfp4": 0.006}
TIMED = "mxfp8"


def run(*, full: bool = False) -> dict[str, Any]:
    """A row for each format, after the first step and after some; of the first layers, or of all of them."""
    states = {name: ({}, {}) for name in FORMATS}  # type: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]
    first = {name: ({}, {}) for name in FORMATS}  # type: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]
    weights = 0
    for number, (name, start) in enumerate(_linears(None if full else LAYERS)):
        weights += start.numel()
        masters = list(_steps(start, number))
        for form, recipe in FORMATS.items():
            for sides, (old, new) in ((first, (start, masters[0])), (states, masters[-2:])):
                for side, master in zip(sides[form], (old, new), strict=True):
                    side[name] = master.bfloat16() if recipe is None else quantize(master, recipe)
    rows = {}
    for form in FORMATS:
        rows[form] = {"first": _row(*first.pop(form), weights), "later": _row(*states[form], weights)}
        print(form, rows[form], flush=True)
    targets = {
        f"bits a weight, {form}": at_most(round(rows[form]["later"]["bits"], 5), most)
        for form, most in MOST_BITS.items()
    }
    speed = _speed(*states[TIMED])
    return {"weights": weights, "lr": LR, "warm_up": WARM_UP, "rows": rows, "speed": speed, "targets": targets}


def _linears(layers: int | None) -> Iterator[tuple[str, Tensor]]:
    """The linear weights of the first layers, or of all."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))  # scripts, which import one another by bare name
    import smollm2  # type: ignore[import-not-found, unused-ignore]

    for name, weight in smollm2.iter_weights():
        if name.endswith("_proj.weight") and (layers is None or int(name.split(".")[2]) < layers):
            yield name, _dithered(weight)


def _dithered(weight: Tensor) -> Tensor:
    """fp32 masters that round to these bf16 weights: their lower bits by chance, where the file has zeros."""
    low = torch.randint(-(2**15) + 1, 2**15, weight.shape, generator=torch.Generator().manual_seed(weight.shape[0]))
    return (weight.float().view(torch.int32) + low.to(torch.int32)).view(torch.float32)


def _steps(master: Tensor, seed: int) -> Iterator[Tensor]:
    """The master after each of WARM_UP + 1 steps of Adam; the last two are copies."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, WARM_UP + 2):
        gradient = torch.randn(master.shape, generator=generator)
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square_(), 1 - BETAS[1])
        update = (first / (1 - BETAS[0] ** step)) / ((second / (1 - BETAS[1] ** step)).sqrt_() + EPSILON)
        master = master - LR * update
        yield master


def _row(old: dict[str, Tensor], new: dict[str, Tensor], weights: int) -> dict[str, Any]:
    delta = delta_between(InMemory(old), InMemory(new))
    nbytes = len(delta_to_bytes(delta))
    full = 8 * delta.layout.nbytes / weights
    return {"bits": 8 * nbytes / weights, "bytes": nbytes, "changed": delta.changed / weights, "full_bits": full}


def _speed(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Any]:
    """Times of a copy of the same bytes."""
    deltas = [delta_from_bytes(delta_to_bytes(delta_between(InMemory(old), InMemory(new))))]
    parts = InMemory(new)
    source = [part for name in parts.entries for part in parts.parts(name).values()]
    target = [torch.empty_like(part) for part in source]
    live: dict[str, Tensor] = {}

    def copy() -> None:
        for to, part in zip(target, source, strict=True):
            to.copy_(part)

    def fresh() -> None:
        live.update({name: tensor.clone() for name, tensor in old.items()})

    seconds = interleaved(
        {
            "copy": Contender(call=copy),
            "make": Contender(call=lambda: delta_to_bytes(delta_between(InMemory(old), InMemory(new)))),
            "apply": Contender(call=lambda: apply_deltas(live, deltas), before=fresh),
        },
        REPEATS,
        warm_up=True,
    )
    return {name: ratio(taken, seconds["copy"]) for name, taken in seconds.items() if name != "copy"}


def markdown(results: dict[str, Any]) -> str:
    """A row a format."""
    what = f"SmolLM2-135M's {results['weights'] / 1e6:.0f} million linear weights"
    lines = [
        f"{what}, one step of Adam at {results['lr']:g}, after {results['warm_up']} others and as the first:",
        "",
        "| bits a weight | in full | delta | of the first step | units that change |",
        "|---|---:|---:|---:|---:|",
    ]
    for form, row in results["rows"].items():
        later = row["later"]
        cells = f"{later['full_bits']:.2f} | {later['bits']:.4f} | {row['first']['bits']:.4f} | {later['changed']:.2e}"
        lines.append(f"| {form} | {cells} |")
    speed = results["speed"]
    told = ", ".join(
        f"{name} {cell['ratio']:.1f} ({cell['min']:.1f} - {cell['max']:.1f})" for name, cell in speed.items()
    )
    return "\n".join([*lines, "", f"Times of a copy of the {TIMED} bytes: {told}."])


def draw(results: dict[str, Any], path: Path) -> None:
    """A bar a format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.subplots()
    rows = results["rows"]
    for shift, which in ((-0.2, "later"), (0.2, "first")):
        at = [number + shift for number in range(len(rows))]
        axes.barh(at, [row[which]["bits"] for row in rows.values()], 0.4, label=f"{which} step")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.legend()
    axes.set(xlabel="bits a weight", title="Deltas of one step of Adam")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
