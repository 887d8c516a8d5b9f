"""Fine-tune SmolLM2-135M with quantized weights under FSDP2, checkpoint it while it trains, resume on any number of ranks.

    torchrun --nproc-per-node 2 examples/finetune.py --recipe mxfp8 --out runs/mxfp8
    torchrun --nproc-per-node 1 examples/finetune.py --recipe mxfp8 --out runs/mxfp8-resumed --resume runs/mxfp8/step-10

The whole life of a quantized weight: built on the meta device, sharded, filled from the file one tensor at a time,
gathered as quantized bytes, updated through fp32 masters, saved raw, loaded bit for bit. `make demo` runs it all.

The masters start from the values in the file, not from the quantized ones: a master that sits in the middle of a
quantization step has to travel half a step before the weight moves at all, and a fine-tuning run is over by then.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import smollm2
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import CountingAllGather, bytes_at_rest, saved_weight_bytes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    clear_high_precision_init_val,
    quantized_model_init,
)

RECIPES = {"bf16": None, "float8": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}


def sharded_model(recipe: Any) -> LlamaForCausalLM:
    """An unmodified transformers model, its linear weights quantized, one FSDP group a decoder layer; no bytes yet."""
    init = quantized_model_init(
        recipe or MXFP8BlockScaling(), enabled=recipe is not None, preserve_high_precision_init_val=True
    )
    with torch.device("meta"), init:
        model = LlamaForCausalLM(smollm2.config()).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its table was on the meta device, too
    return model


@torch.no_grad()
def load_pretrained(model: nn.Module) -> None:
    """Fill the shards from the file, each rank its rows; one full tensor exists at a time."""
    params = dict(model.named_parameters())
    for fqn, weight in smollm2.iter_weights(params):
        param = params[fqn]
        param.copy_(distribute_tensor(weight, param.device_mesh, param.placements, src_data_rank=None))


@torch.no_grad()
def held_out_loss(model: nn.Module, blocks: torch.Tensor) -> float:
    """Mean next-token loss in nats over `blocks` [n, seq_len], the same on every rank."""
    losses = [model(input_ids=block[None], labels=block[None]).loss for block in blocks]
    return torch.stack(losses).float().mean().item()


def verify_resumed(model: nn.Module, checkpoint: str) -> int:
    """Compare every payload and scale byte with the checkpoint's, read as plain tensors by stock DCP; returns how many bytes."""
    live = {f"model.{name}": tensor for name, tensor in expand(model.state_dict()).items()}
    saved = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    dcp.load(saved, checkpoint_id=checkpoint)
    checked = 0
    for name, tensor in live.items():
        mine, theirs = (
            t.to_local().reshape(-1).view(torch.uint8) if isinstance(t, DTensor) else t for t in (tensor, saved[name])
        )
        if not torch.equal(mine, theirs):
            raise SystemExit(f"{name}: bytes differ from the checkpoint's")
        checked += mine.nbytes
    return checked


def main() -> None:
    """One run; writes its figures to OUT/report.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="mxfp8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", help="checkpoint to resume from")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    uploads = dist.new_group(backend="gloo")  # async_save's own: its upload thread must not share one with training
    rank, world, recipe = dist.get_rank(), dist.get_world_size(), RECIPES[args.recipe]
    args.out.mkdir(parents=True, exist_ok=True)

    model = sharded_model(recipe)
    gathers = CountingAllGather.attach(model)
    start, report = 0, {"recipe": args.recipe, "ranks": world}
    if args.resume is None:
        load_pretrained(model)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=args.lr)
    for param in model.parameters():
        clear_high_precision_init_val(param)  # the masters have it now
    if args.resume is not None:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "step": 0}
        dcp.load(state, checkpoint_id=args.resume, planner=QuantizedLoadPlanner())
        set_optimizer_state_dict(model, optimizer, state["optim"])
        start = state["step"]
        report["verified_bytes"] = verify_resumed(model, args.resume)
    report |= bytes_at_rest(model)

    tokenizer = smollm2.tokenizer()
    train, held_out = (smollm2.token_blocks(tokenizer, args.seq_len, split=split) for split in ("train", "heldout"))
    held_out = held_out[:4]
    report["loss_before"] = held_out_loss(model, held_out)
    gathers.reset()
    upload, train_loss = None, 0.0
    bar = tqdm(
        range(start, args.steps),
        desc=f"{args.recipe} x{world}",
        unit="step",
        disable=rank != 0,
        initial=start,
        total=args.steps,
    )
    for step in bar:
        batch = train[step * args.global_batch :][: args.global_batch][rank::world]  # [global batch / world, seq_len]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train_loss = loss.item()
        bar.set_postfix(loss=f"{train_loss:.3f}")
        if step + 1 == args.steps // 2 and args.resume is None:
            state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "step": step + 1}
            began = time.perf_counter()
            report["checkpoint"] = str(args.out / f"step-{step + 1}")
            upload = dcp.async_save(
                state, checkpoint_id=report["checkpoint"], planner=QuantizedSavePlanner(), process_group=uploads
            )
            report["async_save_blocked_s"] = time.perf_counter() - began
    report["gathered_bytes_per_round"] = gathers.received / max(gathers.rounds(model), 1)
    if upload is not None:
        upload.result()
        report["weight_bytes_on_disk"] = saved_weight_bytes(report["checkpoint"], "model.")
    report["loss_after"] = held_out_loss(model, held_out)
    if rank == 0:
        (args.out / "report.json").write_text(json.dumps(report, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
