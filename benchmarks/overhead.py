"""What does Python cost? Dispatch of a quantized tensor, and its share of a training step whose layers are tiny.

ops      one call of an op on a 64x64 weight: quantized against plain, and against torchao's tensor of that format
calls    how often one layer of a training step goes through the op table
step     32 layers of 64x64, where a step is nearly all Python: quantized against the same arithmetic on plain
         tensors by hand (the rest is ours: wrappers, hooks, the linear, the optimizer's bookkeeping), and dense
on a GPU decode, quantize, a linear, FSDP2's hooks and a step of it: calls and instructions of the host, without a GPU
instructions of each op, where valgrind is there: the same on a quiet and on a noisy machine
"""

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from benchmarks import overhead_on_gpu
from benchmarks.overhead_instructions import counted
from benchmarks.overhead_models import (
    OPS,
    RECIPES,
    by_hand,
    calls_per_layer,
    defined,
    one_rank,
    operands,
    peers,
    trained,
)
from benchmarks.timing import Contender, interleaved, ratio

LAYERS = 32
CALLS, ROUNDS = 100, 11  # of an op
STEPS = 11
COMPARED = ("detach", "view", "slice", "split", "F.linear")  # with the peer
PLACES = {"one process": False, "FSDP2, 1 rank": True}


def run() -> dict[str, Any]:
    """All figures; `targets` says which were met."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # nothing here is large enough for a second thread; waking one would be timed
    try:
        results: dict[str, Any] = {"ops": {op: _op(op) for op in OPS}}
        print("  ops done", flush=True)
        with one_rank():
            results["calls"] = {
                name: {place: calls_per_layer(recipe, sharded=sharded) for place, sharded in PLACES.items()}
                for name, recipe in RECIPES.items()
            }
            results["step"] = _step()
        print("  steps done", flush=True)
        results["instructions"] = counted()
        results["on a GPU"] = overhead_on_gpu.measured()
        if results["instructions"]:
            results["share_of_instructions"] = _by_instructions(results["instructions"])
    finally:
        torch.set_num_threads(threads)
    results["targets"] = _targets(results)
    return results


def _op(op: str) -> dict[str, Any]:
    """Ratios by format: to the plain tensor, and to the peer (None where it does not define the op)."""
    call, ours, theirs = OPS[op], operands(), peers()

    def repeated(value: Tensor) -> Contender:
        return Contender(call=lambda: [call(value) for _ in range(CALLS)])

    values = ours | {f"peer {name}": value for name, value in theirs.items() if defined(call, value)}
    seconds = interleaved({name: repeated(value) for name, value in values.items()}, ROUNDS, warm_up=True)
    return {
        name: {
            "microseconds": round(statistics.median(seconds[name]) / CALLS * 1e6, 2),
            "over_plain": ratio(seconds[name], seconds["plain"]),
            "over_peer": ratio(seconds[name], seconds[f"peer {name}"]) if f"peer {name}" in seconds else None,
        }
        for name in theirs
    }


def _step() -> dict[str, Any]:
    """Of a step, by format and place: the ratio to dense, and the share that is neither dense nor arithmetic."""
    steps = {"dense one process": trained(LAYERS, None, sharded=False)}
    steps["dense FSDP2, 1 rank"] = trained(LAYERS, None, sharded=True)
    for name, recipe in RECIPES.items():
        steps[f"{name} by hand"] = by_hand(LAYERS, recipe)
        for place, sharded in PLACES.items():
            steps[f"{name} {place}"] = trained(LAYERS, recipe, sharded=sharded)
    contenders = {name: Contender(call=step) for name, step in steps.items()}
    for step in steps.values():
        step()
    seconds = interleaved(contenders, STEPS, warm_up=True)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    results: dict[str, Any] = {}
    for name in RECIPES:
        arithmetic = middle[f"{name} by hand"] - middle["dense one process"]
        results[name] = {
            place: {
                "over_dense": ratio(seconds[f"{name} {place}"], seconds[f"dense {place}"]),
                "milliseconds": round(middle[f"{name} {place}"] * 1e3, 2),
                "share_dense": round(middle[f"dense {place}"] / middle[f"{name} {place}"], 3),
                "share_arithmetic": round(arithmetic / middle[f"{name} {place}"], 3),
                "share_ours": round(1 - (middle[f"dense {place}"] + arithmetic) / middle[f"{name} {place}"], 3),
            }
            for place in PLACES
        }
    return results


def _by_instructions(counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """`_step` in instructions, which repeat from run to run where times do not."""
    steps = counts["step"]
    shares: dict[str, Any] = {}
    for name in RECIPES:
        arithmetic = steps[f"{name} by hand"] - steps["dense one process"]
        shares[name] = {
            place: round(1 - (steps[f"dense {place}"] + arithmetic) / steps[f"{name} {place}"], 3) for place in PLACES
        }
    return shares


def _over_peer(results: dict[str, Any], op: str, name: str) -> float | None:
    """A call over torchao's: in instructions where they were counted, else in time; None where it has no such op."""
    if results["instructions"]:
        counts = results["instructions"][op]
        return round(counts[name] / counts[f"peer {name}"], 2) if f"peer {name}" in counts else None
    timed = results["ops"][op][name]["over_peer"]
    return timed["ratio"] if timed else None


def _targets(results: dict[str, Any]) -> dict[str, Any]:
    timed = {name: {place: each["share_ours"] for place, each in of.items()} for name, of in results["step"].items()}
    shares = results.get("share_of_instructions", timed)
    compared = [_over_peer(results, op, name) for op in COMPARED for name in RECIPES]
    targets = {
        "op-table calls per layer and step, most": (
            max(sum(ops.values()) for places in results["calls"].values() for ops in places.values()),
            2,
            "plain torch optimizers multiply (weight decay) and add, which requantizes twice",
        ),
        f"{', '.join(COMPARED)} over torchao's tensors, largest": (
            max(value for value in compared if value is not None),
            1.0,
            "a cut (split makes two) keeps account of shards and blocks, which torchao's tensors do not",
        ),
        # The matmuls of a 64x64 layer take a hundredth of a step that is dispatch throughout, the dense one too: 5 %
        # would be less than one wrapper and one pass through __torch_dispatch__ each time a weight is used. A quarter
        # was measured with three aliases a parameter and step, and one tiny op a part for each thing hooks do with it.
        "share of a step that is neither dense nor arithmetic, largest": (
            max(share for places in shares.values() for share in places.values()),
            0.30,
            "the optimizer's bookkeeping (digests, agreement, write-back) is a dozen tiny torch ops a parameter",
        ),
        **overhead_on_gpu.targets(results["on a GPU"]),
    }
    return {
        name: {"value": value, "target": target, "met": value <= target, "why": "" if value <= target else why}
        for name, (value, target, why) in targets.items()
    }


def markdown(results: dict[str, Any]) -> str:
    """The tables of the report."""
    counts, formats = results["instructions"] or {}, list(RECIPES)
    story = (
        "One call on a 64x64 weight: time over that of a plain bf16 tensor; then instructions (thousands, float8), "
        "and those over torchao's tensor of the format (a dash: it has no such op)."
    )
    over_plain, over_peer = (" | ".join(f"{name} / {other}" for name in formats) for other in ("plain", "torchao"))
    lines = [story, "", f"| op | {over_plain} | instructions | {over_peer} |", "|---|" + "---|" * 7]
    for op, measured in results["ops"].items():
        plain = " | ".join(f"{measured[name]['over_plain']['ratio']:.1f}" for name in formats)
        peer = " | ".join("-" if (over := _over_peer(results, op, name)) is None else f"{over:.2f}" for name in formats)
        now = f"{counts[op]['float8'] / 1e3:.0f}" if op in counts else "-"
        lines.append(f"| {op} | {plain} | {now} | {peer} |")
    story = (
        f"One training step of {LAYERS} layers of 64x64, 16 tokens: time over the dense model's, what it goes to "
        "(ours: also in instructions), and calls of the op table."
    )
    lines += [
        "",
        story,
        "",
        "| format | where | over dense (spread) | dense | arithmetic | ours (instructions) | op-table calls a layer |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, places in results["step"].items():
        for place, figures in places.items():
            over = figures["over_dense"]
            shares = " | ".join(f"{figures[f'share_{part}']:.0%}" for part in ("dense", "arithmetic", "ours"))
            counted_share = f" ({results['share_of_instructions'][name][place]:.0%})" if counts else ""
            calls = ", ".join(f"{number:g} {op}" for op, number in results["calls"][name][place].items()) or "none"
            spread = f"{over['ratio']:.2f} ({over['min']:.2f} - {over['max']:.2f})"
            lines.append(f"| {name} | {place} | {spread} | {shares}{counted_share} | {calls} |")
    lines += overhead_on_gpu.markdown(results["on a GPU"])
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Left: what a step's time goes to. Right: each op against the peer's."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(1, 1.3))
    rows = [(name, place, figures) for name, places in results["step"].items() for place, figures in places.items()]
    labels = [f"{name}\n{place}" for name, place, _ in rows]
    base = [0.0] * len(rows)
    for part, label, colour in (
        ("dense", "the dense model", "#9aa5b1"),
        ("arithmetic", "quantization arithmetic", "#5b8db8"),
        ("ours", "ours: wrappers, hooks, optimizer", "#d1603d"),
    ):
        widths = [100 * figures[f"share_{part}"] for _, _, figures in rows]
        left.barh(labels, widths, left=base, label=label, color=colour)
        base = [start + width for start, width in zip(base, widths, strict=True)]
    left.invert_yaxis()
    left.set_xlabel("share of a training step (%)")
    left.set_title(f"{LAYERS} layers of 64x64: where a step goes")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=1, frameon=False)
    width = 0.26
    for number, name in enumerate(RECIPES):
        pairs = [(at, _over_peer(results, op, name)) for at, op in enumerate(results["ops"])]
        known = [(at, over) for at, over in pairs if over is not None]
        right.bar([at + (number - 1) * width for at, _ in known], [value for _, value in known], width, label=name)
    right.axhline(1, color="black", linewidth=0.8)
    right.set_xticks(range(len(results["ops"])), results["ops"], rotation=30)
    unit = "instructions" if results["instructions"] else "time"
    right.set_ylabel(f"{unit} of a call over torchao's (1 = equal)")
    right.set_title("one call on a quantized 64x64 weight, ours over torchao's")
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
