"""What does a quantized linear layer cost against bf16 nn.Linear, forward and backward?

On the CPU the weight is dequantized twice, for y = x @ w.T and for dx = dy @ w, and dw is never quantized, so a layer
costs bf16's three products and two dequantizations. "dequantized twice" is timed beside the layers: it is the overhead
if nothing else costs anything. At 2048 tokens the products should hide it; at 64 they cannot, so that is only for
information, and so is "once": the layer under `decode_once`.

What it costs on a GPU, and products of quantized activations there: benchmarks/gpu/linear.py.
"""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import at_most, with_spread
from benchmarks.timing import THREADS, Contender, interleaved, ratio, two_threads
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, decode_once, quantized_model_init
from qtensor.spec.recipes import Recipe

WIDTH = 4096
RECIPES: dict[str, Recipe] = {
    "float8 row": Float8CurrentScaling(),
    "mxfp8 row": MXFP8BlockScaling(),
    "nvfp4 row": NVFP4BlockScaling(),
}
DENSE = "bf16"
ROUNDS = {2048: 4, 64: 7}  # tokens -> rounds
AIMED_AT = 2048
AT_MOST = 1.15


def run() -> dict[str, Any]:
    """Ratios to bf16; `targets` says which are as they should be."""
    results: dict[str, Any] = {"width": WIDTH, "rounds": ROUNDS, "tokens": {}}
    with two_threads():
        layers = {name: _layer(recipe, WIDTH, "cpu") for name, recipe in {DENSE: None, **RECIPES}.items()}
        for tokens, rounds in ROUNDS.items():
            results["tokens"][str(tokens)] = _against_dense(layers, tokens, rounds)
            print(f"  {tokens} tokens done", flush=True)
    results["targets"] = _targets(results)
    return results


def _layer(recipe: Recipe | None, width: int, device: str) -> nn.Linear:
    torch.manual_seed(0)
    with quantized_model_init(recipe or MXFP8BlockScaling(), enabled=recipe is not None):
        return nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device)


def _input(tokens: int, width: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, width, generator=generator).to(device, torch.bfloat16)


def _pass(layer: nn.Linear, x: Tensor, grad: Tensor) -> Contender:
    """Forward and backward with gradients of input and weight, which are fresh each time."""

    def before() -> None:
        layer.weight.grad = x.grad = None

    return Contender(before=before, call=lambda: layer(x).backward(grad))


def _against_dense(layers: dict[str, nn.Linear], tokens: int, rounds: int) -> dict[str, Any]:
    """For each quantized layer: its time, and that of dequantizing it twice, over the time of the dense layer."""
    x, grad = _input(tokens, WIDTH, "cpu").requires_grad_(), _input(tokens, WIDTH, "cpu")
    contenders = {name: _pass(layer, x, grad) for name, layer in layers.items()}
    for name in RECIPES:
        contenders[f"once {name}"] = _under_decode_once(contenders[name])
        contenders[f"twice {name}"] = Contender(call=_twice(layers[name].weight.dequantize))
    seconds = interleaved(contenders, rounds, warm_up=True)
    return {
        name: {
            "over_dense": ratio(seconds[name], seconds[DENSE]),
            "once_over_dense": ratio(seconds[f"once {name}"], seconds[DENSE]),
            "dequantized_twice": round(
                statistics.median(seconds[f"twice {name}"]) / statistics.median(seconds[DENSE]), 4
            ),
        }
        for name in RECIPES
    }


def _under_decode_once(layer: Contender) -> Contender:
    def once() -> None:
        with decode_once():
            layer.call()

    return dataclasses.replace(layer, call=once)


def _twice(call: Callable[[], object]) -> Callable[[], None]:
    def twice() -> None:
        call()
        call()

    return twice


def _targets(results: dict[str, Any]) -> dict[str, Any]:
    targets = {}
    for name, figures in results["tokens"][str(AIMED_AT)].items():
        over = figures["over_dense"]
        why = (
            f"rounds from {over['min']:.2f} to {over['max']:.2f}; dequantizing twice is "
            f"{figures['dequantized_twice']:.0%} of the dense layer"
        )
        targets[f"{name}, {AIMED_AT} tokens: time / bf16"] = at_most(over["ratio"], AT_MOST, why)
    return targets


def markdown(results: dict[str, Any]) -> str:
    """A table of ratios by tokens."""
    width, counts = results["width"], list(results["tokens"])
    title = (
        f"Forward + backward of a {width}x{width} linear layer on {THREADS} CPU threads over bf16 nn.Linear, median "
        "(least - greatest), and what two dequantizations of its weight are of bf16's time:"
    )
    lines = [
        title,
        "",
        f"| weight | {' | '.join(f'{count} tokens | dequantized twice | decoded once' for count in counts)} |",
        "|---|" + "---:|---:|---:|" * len(counts),
    ]
    for name in RECIPES:
        rows = [results["tokens"][count][name] for count in counts]
        cells = [
            f"{with_spread(row['over_dense'])} | {row['dequantized_twice']:.1%} | {with_spread(row['once_over_dense'])}"
            for row in rows
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars by recipe and tokens, beside what dequantizing twice explains of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    counts = list(results["tokens"])
    for axes, count in zip(figure.subplots(1, len(counts)), counts, strict=True):
        rows = results["tokens"][count]
        for at, row in enumerate(rows.values()):
            over = row["over_dense"]
            spread = [[max(over["ratio"] - over["min"], 0)], [max(over["max"] - over["ratio"], 0)]]
            label = "measured" if at == 0 else None
            axes.bar(at, over["ratio"], 0.6, yerr=spread, color="C0", label=label, error_kw={"elinewidth": 0.8})
            explained = 1 + row["dequantized_twice"]
            label = "1 + two dequantizations" if at == 0 else None
            axes.plot([at - 0.38, at + 0.38], [explained, explained], color="C1", linewidth=2.5, label=label)
            axes.annotate(
                f"{over['ratio']:.2f}", (at, over["ratio"] / 2), ha="center", color="white", fontweight="bold"
            )
        axes.axhline(1, color="black", linewidth=0.8)
        if int(count) == AIMED_AT:
            axes.axhline(AT_MOST, color="black", linewidth=1, linestyle="--", label=f"target: {AT_MOST}")
        axes.set_xticks(range(len(rows)), list(rows))
        axes.set(title=f"{count} tokens", ylabel="time / bf16 nn.Linear")
        axes.margins(y=0.15)
    handles, labels = figure.axes[counts.index(str(AIMED_AT))].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"Forward + backward of a {results['width']}x{results['width']} linear layer, {THREADS} CPU threads"
    )
    figure.savefig(path, dpi=110)
