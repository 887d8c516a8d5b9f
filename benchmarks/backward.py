"""Does a model learn as well where backward multiplies in low precision? Loss curves of a small Llama from scratch.

    python -m benchmarks.backward                     # all variants, two seeds, 200 steps; some minutes of one core
    python -m benchmarks.backward --steps 20 --seeds 0

A model that reads bytes learns the text of Python's language reference, which comes with Python. All linear layers are
quantized, with inputs (`activations="dynamic"`). A variant is a recipe; of each recipe there is one with dense backward
products and one or two whose products are quantized (`gradients`). Everything else is the same: initial values, the
order of the data, AdamW on fp32 masters.

Two seeds and a model of half a million weights tell whether backward's rounding breaks training, and how large its
effect is beside that of a seed. They do not tell what happens to large models, or after many more steps.
"""

import argparse
import contextlib
import datetime as dt
import json
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.machine import machine_and_versions
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantized_model_init,
)
from qtensor.spec.recipes import Recipe

RESULTS = Path(__file__).parent / "results"
VARIANTS: dict[str, Recipe | None] = {
    "bf16": None,
    "Float8 row, dense": Float8CurrentScaling(activations="dynamic"),
    "Float8 row, e5m2": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "Float8 row, e4m3": Float8CurrentScaling(activations="dynamic", gradients="e4m3"),
    "MXFP8 row, dense": MXFP8BlockScaling(activations="dynamic"),
    "MXFP8 row, e4m3": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
    "NVFP4 square, dense": NVFP4BlockScaling(blocks="square", activations="dynamic"),
    "NVFP4 square, nvfp4": NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4"),
    "NVFP4 square, nvfp4-nearest": NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4-nearest"),
    "NVFP4 square, nvfp4-unrotated": NVFP4BlockScaling(
        blocks="square", activations="dynamic", gradients="nvfp4-unrotated"
    ),
    "NVFP4 row, dense": NVFP4BlockScaling(activations="dynamic"),
    "NVFP4 row, nvfp4": NVFP4BlockScaling(activations="dynamic", gradients="nvfp4"),
    "NVFP4 row 4over6, dense": NVFP4BlockScaling(scale_choice="4over6", activations="dynamic"),
    "NVFP4 row 4over6, nvfp4": NVFP4BlockScaling(scale_choice="4over6", activations="dynamic", gradients="nvfp4"),
}
BATCH, LENGTH, HELD_OUT, LEARNING_RATE, WARMUP, EVERY = 4, 64, 64, 2e-3, 20, 50


def text_blocks(*, held_out: bool) -> Tensor:
    """int64 [blocks, LENGTH]: the bytes of every tenth topic, or of the others."""
    chosen = [text for number, (_, text) in enumerate(sorted(topics.items())) if (number % 10 == 9) is held_out]
    joined = torch.tensor(list("\n".join(chosen).encode()), dtype=torch.int64, device="cpu")
    return joined[: len(joined) // LENGTH * LENGTH].view(-1, LENGTH)


def model_of(recipe: Recipe | None, seed: int) -> nn.Module:
    """The same initial values for a seed; masters begin with them, and not with what they are rounded to."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(seed)
    quantized = quantized_model_init(recipe, preserve_high_precision_init_val=True) if recipe else None
    with quantized or contextlib.nullcontext():
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


@torch.no_grad()
def held_out_loss(model: Any, blocks: Tensor) -> float:
    """Next-byte loss in nats."""
    logits = model(input_ids=blocks).logits[:, :-1].float()  # [blocks, LENGTH - 1, 256]
    return F.cross_entropy(logits.transpose(1, 2), blocks[:, 1:]).item()


def train(recipe: Recipe | None, seed: int, steps: int, name: str) -> dict[str, Any]:
    """One curve: held-out loss every so many steps, and the mean training loss of as many before."""
    model: Any = model_of(recipe, seed)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rows, held_out = text_blocks(held_out=False), text_blocks(held_out=True)[:HELD_OUT]
    order = torch.randint(len(rows), (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    losses: list[float] = []
    curve: dict[int, float] = {}
    for step in tqdm(range(steps), desc=f"{name}, seed {seed}", mininterval=10):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        batch = rows[order[step]]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            curve[step + 1] = round(held_out_loss(model, held_out), 4)
    return {"held_out": curve, "last_training": round(statistics.fmean(losses[-EVERY:]), 4)}


def main() -> None:
    """Ask, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    settings = {"batch": BATCH, "length": LENGTH, "lr": LEARNING_RATE, "warmup": WARMUP, "steps": args.steps}
    curves: dict[str, dict[int, Any]] = {name: {} for name in args.variants}
    variants = " ".join(f'"{name}"' for name in args.variants)
    for seed in args.seeds:
        for name in args.variants:
            curves[name][seed] = train(VARIANTS[name], seed, args.steps, name)
            print(name, seed, curves[name][seed], flush=True)
        seeds = " ".join(str(each) for each in args.seeds[: args.seeds.index(seed) + 1])
        record = {
            "command": f"python -m benchmarks.backward --steps {args.steps} --seeds {seeds} --variants {variants}",
            "settings": settings,
            **machine_and_versions(),
            "seconds": round(time.monotonic() - begun),
            "curves": curves,
        }
        path = RESULTS / f"{dt.date.today().isoformat()}-backward.json"
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
