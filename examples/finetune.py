"""Fine-tune SmolLM2-135M with quantized weights under FSDP2, checkpoint it while it trains, resume on any world size.

    torchrun --nproc-per-node 2 examples/finetune.py --recipe mxfp8 --out runs/mxfp8
    torchrun --nproc-per-node 1 examples/finetune.py --recipe mxfp8 --out runs/resumed --resume runs/mxfp8/step-6

The whole life of a quantized weight: built on the meta device, sharded, filled from the file one tensor at a time,
gathered as quantized bytes, updated through fp32 masters, saved raw, loaded bit for bit. `make demo` runs it all.

A CPU that multiplies bf16 matrices slowly computes their products in fp32 (examples/cpu_products.py; the first of the
ranks measures it). How far a run is stands in OUT/log.txt, too.

The masters start from the values in the file, not from the quantized ones: a master that sits in the middle of a
quantization step has to travel half a step before the weight moves at all, and a short fine-tuning run is over by then.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smollm2
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cpu_products import BF16, Products, agreed
from measure import CountingAllGather, bytes_at_rest, saved_weight_bytes
from progress import Log
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import LlamaForCausalLM

import qtensor as qt
from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand

RECIPES: dict[str, Any] = {
    "bf16": None,
    "float8": qt.Float8CurrentScaling(),
    "mxfp8": qt.MXFP8BlockScaling(),
    "nvfp4": qt.NVFP4BlockScaling(),
}


def sharded_model(recipe: Any, layers: int | None) -> LlamaForCausalLM:
    """An unmodified transformers model, its linear weights quantized, one FSDP group a decoder layer; no bytes yet."""
    config = smollm2.config()
    config.num_hidden_layers = layers or config.num_hidden_layers
    quantized = qt.quantized_model_init(
        recipe or RECIPES["mxfp8"], enabled=recipe is not None, preserve_high_precision_init_val=True
    )
    with torch.device("meta"), quantized:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its table was on the meta device, too
    return model


@torch.no_grad()
def load_pretrained(model: nn.Module) -> None:
    """Fill the shards from the file, each rank its rows; one full tensor exists at a time."""
    params: dict[str, Any] = dict(model.named_parameters())
    for fqn, weight in smollm2.iter_weights(params):
        param = params[fqn]
        param.copy_(distribute_tensor(weight, param.device_mesh, param.placements, src_data_rank=None))


@torch.no_grad()
def held_out_loss(model: nn.Module, blocks: torch.Tensor, products: Products = BF16) -> float:
    """Mean next-token loss in nats over `blocks` [n, seq_len], the same on every rank."""
    with products.computed():
        losses = [model(input_ids=block[None], labels=block[None]).loss for block in blocks]
    return torch.stack(losses).float().mean().item()


def training_state(model: nn.Module, optimizer: qt.MasterWeightOptimizer, step: int) -> dict[str, Any]:
    """What a checkpoint of this run holds."""
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "step": step}


def resume(model: nn.Module, optimizer: qt.MasterWeightOptimizer, checkpoint: str) -> tuple[int, int]:
    """Load on whatever world size this is, then compare every payload, scale and other weight with the checkpoint's.

    The comparison reads the parts as plain tensors with stock DCP. Returns the step to go on from, and how many bytes
    were compared.
    """
    state = training_state(model, optimizer, 0)
    dcp.load(state, checkpoint_id=checkpoint, planner=QuantizedLoadPlanner())
    set_optimizer_state_dict(model, optimizer, state["optim"])
    live = {f"model.{name}": tensor for name, tensor in expand(model.state_dict()).items()}
    saved = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    dcp.load(saved, checkpoint_id=checkpoint)
    compared = 0
    for name, pair in ((name, (live[name], saved[name])) for name in live):
        mine, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in pair)
        if not torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            raise SystemExit(f"{name}: bytes differ from the checkpoint's")
        compared += mine.nbytes
    return int(state["step"]), compared


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run multiplies, where it says how far it is, and the directory for its checkpoint, if it writes one."""

    products: Products
    log: Log
    checkpoint: Path | None


def train(
    run: Run, model: nn.Module, optimizer: qt.MasterWeightOptimizer, data: torch.Tensor, steps: range
) -> dict[str, Any]:
    """An ordinary FSDP2 loop over `data` [batch, rows, seq_len]; saves a checkpoint half-way while it trains on."""
    report: dict[str, Any] = {}
    rank, world, upload = dist.get_rank(), dist.get_world_size(), None
    uploads = dist.new_group(backend="gloo")  # async_save's own: its upload thread must not share one with training
    for step in run.log.steps(steps):
        batch = data[step % len(data)][rank::world]
        with run.products.computed():
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log.step(f"loss {loss.item():.3f}")
        if run.checkpoint is not None and step + 1 == steps.stop // 2:
            state = training_state(model, optimizer, step + 1)
            report["checkpoint"] = str(run.checkpoint / f"step-{step + 1}")
            began = time.perf_counter()
            upload = dcp.async_save(
                state, checkpoint_id=report["checkpoint"], planner=QuantizedSavePlanner(), process_group=uploads
            )
            report["async_save_blocked_s"] = time.perf_counter() - began
            run.log(f"saving {report['checkpoint']} while training goes on")
    if upload is not None:
        upload.result()  # type: ignore[union-attr]  # the default stager blocks, so this is a plain future
        report["weight_bytes_on_disk"] = saved_weight_bytes(report["checkpoint"], "model.")
    return report


def main() -> None:
    """One run; writes its figures to OUT/report.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="mxfp8")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument("--eval-blocks", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--layers", type=int, help="only so many of the model's, to try things out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", help="checkpoint to resume from")
    parser.add_argument(
        "--products", choices=("bf16", "fp32"), help="what bf16 matrices are multiplied in; default: measured"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "log.txt", shown=dist.get_rank() == 0)
    products = agreed(args.products)
    log(f"{args.recipe}, ranks: {dist.get_world_size()}; bf16 matrices are multiplied in {products}")

    model = sharded_model(RECIPES[args.recipe], args.layers)
    gathers = CountingAllGather.attach(model)
    if args.resume is None:
        load_pretrained(model)
        log("the weights are read")
    optimizer = qt.MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=args.lr)
    for param in model.parameters():
        qt.clear_high_precision_init_val(param)  # the masters have it now
    start, compared = resume(model, optimizer, args.resume) if args.resume else (0, 0)
    if args.resume:
        log(f"resumed from {args.resume}: {compared} bytes compared, all equal")

    tokenizer = smollm2.tokenizer()
    rows, held_out = (smollm2.token_blocks(tokenizer, args.seq_len, split=split) for split in ("train", "heldout"))
    batches = rows[: len(rows) // args.global_batch * args.global_batch].unflatten(0, (-1, args.global_batch))
    report = {"recipe": args.recipe, "ranks": dist.get_world_size(), "compared_bytes": compared, **bytes_at_rest(model)}
    report |= {"products": str(products), "loss_before": held_out_loss(model, held_out[: args.eval_blocks], products)}
    log(f"held-out loss {report['loss_before']:.4f}")
    gathers.reset()
    run = Run(products=products, log=log, checkpoint=None if args.resume else args.out)
    report |= train(run, model, optimizer, batches, range(start, args.steps))
    report["gathered_bytes_per_round"] = gathers.received_per_round(model)
    report["loss_after"] = held_out_loss(model, held_out[: args.eval_blocks], products)
    if dist.get_rank() == 0:
        (args.out / "report.json").write_text(json.dumps(report, indent=2))
    log(f"held-out loss {report['loss_before']:.4f} -> {report['loss_after']:.4f}; see {args.out}/report.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
