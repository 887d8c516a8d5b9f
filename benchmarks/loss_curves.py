"""Does a model with quantized weights learn as it does in bf16? Loss curves of SmolLM2-135M, real weights and text.

    python -m benchmarks.loss_curves --variant mxfp8/quantized   # one curve, into runs/loss_curves/
    python -m benchmarks.loss_curves --all                       # those still missing, one after the other
    python -m benchmarks.loss_curves --report                    # merges and draws them in benchmarks/results/

A variant is a recipe and a storage. Everything else is the same in all of them: initial weights, order of the data,
AdamW on fp32 masters that start from the values in the file, one rank with gloo and FSDP2.

How to read the first steps: the masters start on bf16's own grid, and at this learning rate most of them need some ten
steps in one direction before a bf16 weight (and a dense shard) moves at all, so bf16 starts late. A quantized weight
has no such delay, and MXFP8 even gets a push: its scales are powers of two, so 7 % of the initial values lie exactly
between two of its numbers, and the first step, however small, decides for half of those along the gradient.
"""

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from transformers import LlamaForCausalLM

import qtensor as qt
from benchmarks.machine import machine_and_versions

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import finetune  # noqa: E402
import measure  # noqa: E402
import smollm2  # noqa: E402

RECIPES: dict[str, Callable[[], Any]] = {
    "mxfp8": qt.MXFP8BlockScaling,
    "nvfp4": qt.NVFP4BlockScaling,
    "float8-row": qt.Float8CurrentScaling,
    "float8-tensor": lambda: qt.Float8CurrentScaling(granularity="tensor"),
    "float8-delayed": lambda: qt.Float8DelayedScaling(),  # noqa: PLW0108
    "mxfp8-square": lambda: qt.MXFP8BlockScaling(blocks="square"),
    "nvfp4-square": lambda: qt.NVFP4BlockScaling(blocks="square"),
}
# Keeps freed memory in the process; without it fetching new pages for every temporary takes a third of the time.
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(2**28)}
STORAGES = ("quantized", "high_precision")
VARIANTS = ("bf16", *(f"{recipe}/{storage}" for storage in STORAGES for recipe in RECIPES))
VARIANTS = tuple(name for name in VARIANTS if name != "float8-delayed/high_precision")  # there the library refuses it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all variants share; curves are only merged if they agree on it."""

    steps: int = 200
    batch: int = 1
    seq_len: int = 48
    lr: float = 3e-5
    warmup: int = 10
    seed: int = 0
    eval_every: int = 25
    eval_blocks: int = 16
    eval_seq_len: int = 64


def sharded_model(variant: str) -> LlamaForCausalLM:
    """The model with its pretrained weights, one FSDP group a decoder layer."""
    recipe, _, storage = variant.partition("/")
    context: Any = contextlib.nullcontext()
    if storage == "quantized":
        context = qt.quantized_model_init(RECIPES[recipe](), preserve_high_precision_init_val=True)
    elif storage:
        context = qt.quantized_model_init(RECIPES[recipe](), storage=storage)
    with torch.device("meta"), context:
        model = LlamaForCausalLM(smollm2.config()).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)  # one gather a step; the values are the same
    fully_shard(model, reshard_after_forward=False)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its table was on the meta device, too
    finetune.load_pretrained(model)
    return model


@torch.no_grad()
def block_losses(model: nn.Module, blocks: torch.Tensor) -> list[float]:
    """Next-token loss in nats of each of `blocks` [n, seq_len]."""
    losses: list[float] = []
    for batch in blocks.split(4):
        logits = model(input_ids=batch).logits[:, :-1].float()  # [4, seq_len - 1, vocabulary]
        losses += F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1).tolist()
    return losses


def train(variant: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """One curve, as far as it is, at each evaluation: training loss of each step, held-out losses in between."""
    model = sharded_model(variant)
    optimizer = qt.MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=settings.lr, fused=True)
    for param in model.parameters():
        qt.clear_high_precision_init_val(param)  # the masters have it now
    tokenizer = smollm2.tokenizer()
    rows = smollm2.token_blocks(tokenizer, settings.seq_len)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
    held_out = smollm2.token_blocks(tokenizer, settings.eval_seq_len, split="heldout")[: settings.eval_blocks]

    curve: dict[str, Any] = {"variant": variant, **measure.bytes_at_rest(model), "train": []}
    curve["held_out"] = {0: block_losses(model, held_out)}
    for step in (bar := tqdm(range(settings.steps), desc=variant, unit="step", mininterval=5)):
        batch = rows[order[torch.arange(step * settings.batch, (step + 1) * settings.batch) % len(order)]]
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / settings.warmup)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve["train"].append(loss.item())
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if (step + 1) % settings.eval_every == 0 or step + 1 == settings.steps:
            curve["held_out"][step + 1] = block_losses(model, held_out)
            yield curve


def summary(curve: dict[str, Any], baseline: dict[str, Any] | None, window: int) -> dict[str, Any]:
    """A curve as the report holds it: means over blocks, smoothed training loss, and the distance from bf16.

    The standard error is that of the mean difference over the held-out blocks, pairwise. It says how much the choice of
    blocks matters, and nothing of the choice of data order.
    """
    held_out, train_losses = curve["held_out"], curve["train"]
    out: dict[str, Any] = {key: round(curve[key], 4) for key in ("bytes_per_param_all", "bytes_per_param_linear")}
    out["held_out"] = {step: round(statistics.fmean(losses), 5) for step, losses in held_out.items()}
    out["train_smoothed"] = {  # the mean over the last `window` steps
        step: round(statistics.fmean(train_losses[max(0, int(step) - window) : int(step)]), 5)
        for step in held_out
        if int(step)
    }
    if baseline is not None:
        gaps = {
            step: [mine - other for mine, other in zip(losses, baseline["held_out"][step], strict=True)]
            for step, losses in held_out.items()
        }
        out["minus_bf16"] = {step: round(statistics.fmean(gap), 5) for step, gap in gaps.items()}
        last = gaps[max(gaps, key=int)]
        out["minus_bf16_standard_error"] = round(statistics.stdev(last) / len(last) ** 0.5, 5)
    return out


def draw(curves: dict[str, Any], path: Path) -> None:
    """Held-out loss, and its distance from bf16, against the step; a colour a recipe, a line style a storage."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = dict(zip(RECIPES, ("C0", "C3", "C2", "C1", "C4", "C9", "C6"), strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for variant, curve in curves.items():
        recipe, _, storage = variant.partition("/")
        style = {"color": colours.get(recipe, "black"), "linestyle": "--" if storage == STORAGES[1] else "-"}
        style |= {"linewidth": 1.6, "marker": "." if storage != STORAGES[1] else None, "label": variant}
        for axes, key in ((left, "held_out"), (right, "minus_bf16")):
            if key in curve:
                axes.plot([int(step) for step in curve[key]], list(curve[key].values()), **style)
    left.set(title="SmolLM2-135M, held-out loss", xlabel="optimizer step", ylabel="nats per token")
    right.set(title="minus bf16", xlabel="optimizer step", ylabel="nats per token")
    right.axhline(0, color="black", linewidth=1)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)


def report(runs: Path) -> Path:
    """Merge the finished curves in `runs`, write them with their settings and machine, and draw them."""
    complete = [json.loads(path.read_text()) for path in runs.glob("*.json") if finished(path)]
    found = {run["curve"]["variant"]: run for run in complete}
    records = [found[variant] for variant in VARIANTS if variant in found]
    shared = {key: value for key, value in records[0].items() if key != "curve"}
    for record in records:
        if different := [key for key in shared if record[key] != shared[key]]:
            raise SystemExit(f"{record['curve']['variant']} ran with other {', '.join(different)}; run it again")
    baseline = found["bf16"]["curve"] if "bf16" in found else None
    curves = {
        curve["variant"]: summary(curve, None if curve is baseline else baseline, shared["settings"]["eval_every"])
        for curve in (record["curve"] for record in records)
    }
    out = ROOT / "benchmarks" / "results" / f"{dt.date.today().isoformat()}-loss-curves-smollm2-135m.json"
    out.parent.mkdir(exist_ok=True)
    command = {"command": "python -m benchmarks.loss_curves --variant VARIANT, for each; then --report"}
    out.write_text(json.dumps({**command, **shared, "curves": curves}, indent=2) + "\n")
    draw(curves, out.with_suffix(".png"))
    return out


def finished(path: Path) -> bool:
    """Whether this is the record of a run that reached its last step."""
    record = json.loads(path.read_text()) if path.exists() else None
    return record is not None and str(record["settings"]["steps"]) in record["curve"]["held_out"]


def main() -> None:
    """One curve, all curves, or the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--variant", choices=VARIANTS)
    what.add_argument("--all", action="store_true")
    what.add_argument("--report", action="store_true")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "loss_curves", help="where the curves are")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    paths = {variant: args.runs / f"{variant.replace('/', '-')}.json" for variant in VARIANTS}
    if args.report:
        print(f"written to {report(args.runs)}")
    elif args.all:
        options = [f"--{key.replace('_', '-')}={value}" for key, value in dataclasses.asdict(settings).items()]
        for variant in tqdm([variant for variant, path in paths.items() if not finished(path)], desc="variants"):
            command = [sys.executable, "-m", "benchmarks.loss_curves", "--variant", variant, "--runs", str(args.runs)]
            subprocess.run([*command, *options], check=True, cwd=ROOT, env={**KEEP_PAGES, **os.environ})
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        args.runs.mkdir(parents=True, exist_ok=True)
        record = {"settings": dataclasses.asdict(settings), **machine_and_versions()}
        for curve in train(args.variant, settings):
            paths[args.variant].write_text(json.dumps({**record, "curve": curve}, indent=1))
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
