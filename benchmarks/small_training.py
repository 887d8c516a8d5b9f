"""A language model so small that thousands of steps take a minute or two of one core: what optimizers are judged by.

The model `bytes` of dense_models.py, shrunk to 139,584 weights: two layers of width 64, every weight's last dimension a
multiple of 32. It reads Python's language reference byte by byte, 8 rows of 64 bytes a step; 2,000 steps see the text
two and a half times. Everything is drawn from the seed: initial values, and the order of the data. Held-out loss is
that of topics that are not trained on, in nats a byte.

The rate rises for 100 steps and falls along a cosine to a twentieth.
"""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import dense_models
from benchmarks.dense_models import next_token_losses
from qtensor import quantized_model_init
from qtensor.spec.recipes import Recipe

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
BATCH, LENGTH, HELD_OUT = 8, 64, 256  # rows of a step, their bytes, and rows that are judged on
WARMUP, LEAST = 100, 0.05  # steps; the last rate over the largest
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.999), 0.1, 1.0  # torch's own betas: the second moment is as slow as it gets
SETTINGS = {
    "model": SHAPE,
    "batch": BATCH,
    "length": LENGTH,
    "warmup": WARMUP,
    "betas": BETAS,
    "weight_decay": WEIGHT_DECAY,
    "clip": CLIP,
}


def model_of(recipe: Recipe | None, seed: int, dtype: torch.dtype) -> nn.Module:
    """The same initial values for a seed; masters begin with them, and not with what they are rounded to."""
    from transformers import LlamaForCausalLM

    config = dense_models.bytes_config(**SHAPE)
    config.dtype = dtype
    config._attn_implementation = "eager"  # noqa: SLF001 - for rows this short it takes half the time
    torch.manual_seed(seed)
    quantized = quantized_model_init(recipe, preserve_high_precision_init_val=True) if recipe else None
    with quantized or contextlib.nullcontext():
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype)


def rows_of(split: dense_models.Split) -> Tensor:
    """The text of a split, int64 [n, LENGTH]."""
    return dense_models.token_rows("bytes", split).view(-1, LENGTH)


def order_of(seed: int, steps: int) -> Tensor:
    """Which rows each step reads, int64 [steps, BATCH]: each of them once before any of them again."""
    drawn, count = torch.Generator(device="cpu").manual_seed(seed), len(rows_of("train"))
    passes = [torch.randperm(count, generator=drawn, device="cpu") for _ in range(math.ceil(steps * BATCH / count))]
    return torch.cat(passes)[: steps * BATCH].view(steps, BATCH)


def rate_at(step: int, steps: int) -> float:
    """What the largest learning rate is multiplied with in a step, counted from 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(steps - 1 - WARMUP, 1)
    return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Next-byte losses of rows in fp32, [n, LENGTH - 1]."""
    return next_token_losses(model(input_ids=ids, use_cache=False).logits.float(), ids)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """The mean over the rows that are judged on."""
    rows = rows_of("heldout")[:HELD_OUT]
    return torch.cat([loss_of(model, ids) for ids in rows.split(64)]).mean().item()
