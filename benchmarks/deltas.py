"""How many bits a weight are exact deltas of SmolLM2's linear weights, and how long do they take, in copies of bytes?

The weights' fp32 masters take steps of Adam (no decay) under gradients by chance, each element on its own, as in
reinforcement learning at a small learning rate. Before and after the last step they are stored in each format, and the
delta between the two is made, written to memory, read and applied. Sizes are of the whole file, with names and tables;
they depend on the weights, the seed and the version of zstd alone. bf16 is what is sent where nothing is quantized.

And how large is a checkpoint that is saved as a delta to an older one? Weights, masters and moments of the first layer,
a save after the warm-up and deltas to it some steps later; bytes of the chunks of each kind, of those in the full save.
"""

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.report import at_most
from benchmarks.timing import Contender, interleaved, ratio
from dcp_adapters import QuantizedSavePlanner, SafeFileSystemReader
from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.make import delta_between
from dcp_adapters.delta.patches.patch_format import delta_from_bytes, delta_to_bytes
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
SAVED_AFTER = (1, 10)  # steps between a full save and a delta to it
SAVED_LRS = (1e-6, 1e-4)


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
    speed, saves = _speed(*states[TIMED]), {f"{lr:g}": _saves(lr) for lr in SAVED_LRS}
    print("saves", saves, flush=True)
    return {
        "weights": weights,
        "lr": LR,
        "warm_up": WARM_UP,
        "rows": rows,
        "speed": speed,
        "saves": saves,
        "targets": targets,
    }


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
    """The master after each of WARM_UP + 1 steps of Adam."""
    for held in _adam(master, seed, WARM_UP + 1, LR):
        yield held["master"]


def _adam(master: Tensor, seed: int, steps: int, lr: float) -> Iterator[dict[str, Tensor]]:
    """The master and its moments after each step; the moments are written by the next one."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, steps + 1):
        gradient = torch.randn(master.shape, generator=generator)
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square_(), 1 - BETAS[1])
        update = (first / (1 - BETAS[0] ** step)) / ((second / (1 - BETAS[1] ** step)).sqrt_() + EPSILON)
        master = master - lr * update
        yield {"master": master, "exp_avg": first, "exp_avg_sq": second}


def _saves(lr: float) -> dict[str, dict[str, float]]:
    """Kind of tensors -> steps after the full save -> bytes in the delta, of those in the full save."""
    states: dict[int, dict[str, dict[str, Tensor]]] = {after: {} for after in (0, *SAVED_AFTER)}
    for number, (name, start) in enumerate(_linears(LAYERS)):
        for step, held in enumerate(_adam(start, number, WARM_UP + max(SAVED_AFTER), lr), 1 - WARM_UP):
            for kind, value in _kinds(held).items() if step in states else ():
                states[step].setdefault(kind, {})[name] = value
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as base, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        full = Path(base, "full")
        dcp.save(states[0], checkpoint_id=full, planner=QuantizedSavePlanner())
        for after in SAVED_AFTER:
            delta = Path(base, f"after-{after}")
            dcp.save(states[after], checkpoint_id=delta, planner=QuantizedSavePlanner(delta_to=full))
            sizes, of = _bytes_of_kinds(delta), _bytes_of_kinds(full)
            for kind in states[0]:
                found.setdefault(kind, {})[str(after)] = sizes[kind] / of[kind]
    return found


def _kinds(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weight in each format, and what the optimizer keeps; copies."""
    master = held["master"]
    weights = {
        form: master.bfloat16() if recipe is None else quantize(master, recipe) for form, recipe in FORMATS.items()
    }
    return weights | {kind: value.clone() for kind, value in held.items()}


def _bytes_of_kinds(path: Path) -> dict[str, int]:
    """Bytes of the chunks of a checkpoint, by the first part of their names."""
    sizes: dict[str, int] = {}
    for index, info in SafeFileSystemReader(path).read_metadata().storage_data.items():
        kind = index.fqn.partition(".")[0]
        sizes[kind] = sizes.get(kind, 0) + info.length
    return sizes


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
    lines += ["", f"Times of a copy of the {TIMED} bytes: {told}.", "", *_saves_in_markdown(results["saves"])]
    return "\n".join(lines)


def _saves_in_markdown(saves: dict[str, Any]) -> list[str]:
    """A row for each kind of tensors."""
    columns = [(lr, str(after)) for lr in saves for after in SAVED_AFTER]
    heads = [f"{lr}, {after} step{'s' if after != '1' else ''}" for lr, after in columns]
    lines = [
        "A checkpoint saved as a delta to one some steps before, in percent of the same tensors in a full save:",
        "",
        f"| | {' | '.join(heads)} |",
        "|---|" + "---:|" * len(columns),
    ]
    for kind in next(iter(saves.values())):
        cells = " | ".join(f"{100 * saves[lr][kind][after]:.2f}" for lr, after in columns)
        lines.append(f"| {kind} | {cells} |")
    return lines


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
