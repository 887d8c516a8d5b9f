"""Calibrate SmolLM2-135M to NVFP4 with several algorithms, sharded by FSDP2, and see what each does to perplexity.

    make demo  # makes the environment, and brings the model
    torchrun --nproc-per-node 2 examples/calibrate.py --out runs/calibrate

For each algorithm: the model from the file in fp32, one FSDP group a decoder layer; one layer at a time gathered and
calibrated on real text, each rank with its own batches; perplexity on text that was held out; the quantized weights
saved by DCP. Prints a table, and leaves it in --out as Markdown, with a picture and the report of every linear.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import smollm2
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finetune import held_out_loss, load_pretrained
from measure import saved_weight_bytes
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import qtensor as qt
from dcp_adapters import QuantizedSavePlanner
from layerwise import AWQ, GPTAQ, GPTQ, Max, Mse, Qronos, calibrate

ALGORITHMS: dict[str, Any] = {type(one).__name__: one for one in (Max(), Mse(), AWQ(), GPTQ(), GPTAQ(), Qronos())}
COLUMNS = ("algorithm", "perplexity before", "after", "SNR of layers, dB", "MiB on disk")
MIB = 1 << 20


def sharded_model(layers: int | None) -> LlamaForCausalLM:
    """The pretrained model in fp32, each rank its shards; or only its first layers, to try things out."""
    config = smollm2.config()
    config.num_hidden_layers = layers or config.num_hidden_layers
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its table was on the meta device, too
    load_pretrained(model)
    return model.eval()


def perplexity(model: Any, blocks: torch.Tensor) -> float:
    """Perplexity on `blocks` [n, seq_len], the same on every rank; ranks share the work: n is a multiple of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = torch.tensor(held_out_loss(model, blocks[rank::world]) / world)
    dist.all_reduce(loss)
    return math.exp(loss.item())


def run(name: str, data: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """One algorithm on a fresh model; the figures of its row."""
    model: Any = sharded_model(args.layers)
    before = perplexity(model, held_out)
    batches = [{"input_ids": row[None], "use_cache": False} for row in data[dist.get_rank() :: dist.get_world_size()]]
    # The output projection is the embedding, which stays as it is.
    result = calibrate(model, batches, recipe=qt.NVFP4BlockScaling(), algorithm=ALGORITHMS[name], exclude=("lm_head",))
    checkpoint = str(args.out / name)
    dcp.save({"model": result.state_dict()}, checkpoint_id=checkpoint, planner=QuantizedSavePlanner())
    after = perplexity(model, held_out)  # the model's weights have the quantized values now
    if dist.get_rank() == 0:
        result.report.save(args.out / f"{name}.json")
        result.report.plot(args.out / f"{name}.png")
    return {
        "algorithm": name,
        "before": before,
        "after": after,
        "layer_errors": dict(result.report.layer_errors),
        "bytes": saved_weight_bytes(checkpoint, "model."),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, as text."""
    errors = list(row["layer_errors"].values())
    mean = f"{sum(errors) / len(errors):.1f}" if errors else "-"
    numbers = [
        f"{row['before']:.2f}",
        f"{row['after']:.2f}",
        mean,
        f"{row['bytes'] / MIB:.1f}",
    ]
    return [row["algorithm"], *numbers]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The error of each layer for each algorithm, and what becomes of perplexity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for number, row in enumerate(rows):
        errors = row["layer_errors"]
        left.plot(list(errors), list(errors.values()), ".-", color=f"C{number}", label=row["algorithm"])
        right.bar(number, row["after"], 0.7, color=f"C{number}")
        right.annotate(f"{row['after']:.2f}", (number, row["after"]), ha="center", va="bottom")
    before = rows[0]["before"]
    right.axhline(before, color="black", linewidth=1)
    left.set(title="SmolLM2-135M in NVFP4", xlabel="layer", ylabel="output SNR in dB (higher is better)")
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    right.set(xticks=range(len(rows)), xticklabels=[row["algorithm"] for row in rows])
    right.set_title(f"held-out perplexity (line: fp32, {before:.2f})")
    right.set_ylim(0.9 * before, 1.05 * max(row["after"] for row in rows))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the algorithms one after the other and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--batches", type=int, default=16, help="of one row, over all ranks")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--eval-blocks", type=int, default=24, help="a multiple of the ranks")
    parser.add_argument("--layers", type=int, help="only so many of the model's, to try things out")
    parser.add_argument("--out", type=Path, default=Path("runs/calibrate"))
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    dist.init_process_group("gloo")
    if args.eval_blocks % dist.get_world_size():
        parser.error(f"--eval-blocks {args.eval_blocks} is not a multiple of the {dist.get_world_size()} ranks")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = smollm2.tokenizer()
    data = smollm2.token_blocks(tokenizer, args.seq_len)[: args.batches]
    held_out = smollm2.token_blocks(tokenizer, args.seq_len, split="heldout")[: args.eval_blocks]
    rows = [run(name, data, held_out, args) for name in args.algorithms]
    if dist.get_rank() == 0:
        table = Table(title=f"SmolLM2-135M, NVFP4 weights, {dist.get_world_size()} ranks, {data.numel()} tokens")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
        for row in rows:
            table.add_row(*cells(row))
        Console().print(table)
        lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *map(cells, rows)]
        markdown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        (args.out / "calibration.md").write_text(f"{table.title}, perplexity on {held_out.numel()}.\n\n{markdown}")
        (args.out / "calibration.json").write_text(json.dumps(rows, indent=1))
        draw(rows, args.out / "calibration.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
