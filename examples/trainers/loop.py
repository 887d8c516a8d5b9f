"""A loop of your own: quantized weights under FSDP2, asynchronous checkpoints, and a resume from one of them.

    torchrun --nproc-per-node 2 examples/trainers/loop.py --out runs/loop
    torchrun --nproc-per-node 2 examples/trainers/loop.py --out runs/resumed --resume runs/loop/step-3

A resumed run on as many ranks ends in the bytes of the uninterrupted one; one on another number of ranks starts from
the same bytes. `examples/finetune.py` does this to a real model and measures it.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, QuantizedStager
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantized_model_init

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def sharded_model() -> LlamaForCausalLM:
    """An unmodified model, its linear weights quantized; the same values on any number of ranks."""
    config = LlamaConfig(**TINY, num_hidden_layers=2, num_key_value_heads=2)
    with torch.device("meta"), quantized_model_init(MXFP8BlockScaling()):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its table was on the meta device, too
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            full = torch.randn(param.shape, generator=generator) * 0.02 if param.ndim > 1 else torch.ones(param.shape)
            param.copy_(distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None))
    return model


def batch(step: int) -> torch.Tensor:
    """This rank's rows of four sequences that count up in steps of 1 to 4: token ids [4 / ranks, 16]."""
    tokens = (torch.arange(16) * torch.arange(1, 5)[:, None] + step) % TINY["vocab_size"]
    return tokens[dist.get_rank() :: dist.get_world_size()]


def training_state(model: LlamaForCausalLM, optimizer: MasterWeightOptimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer), "step": step}


def main(argv: list[str] | None = None) -> list[float]:
    """One run, a checkpoint every three steps; returns this rank's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", help="checkpoint to go on from")
    args, model = parser.parse_args(argv), sharded_model()
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    first = 0
    if args.resume is not None:
        state = training_state(model, optimizer, 0)
        dcp.load(state, checkpoint_id=args.resume, planner=QuantizedLoadPlanner())  # into the shards themselves
        set_optimizer_state_dict(model, optimizer, state["optim"])
        first = state["step"]

    losses: list[float] = []
    saved: Any = None
    stager, uploads = QuantizedStager(), dist.new_group(backend="gloo")  # the upload thread needs a group of its own
    for step in range(first, args.steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 3 == 0:
            if saved is not None:
                saved.result()  # raises what went wrong
            state, path = training_state(model, optimizer, step + 1), args.out / f"step-{step + 1}"
            saved = dcp.async_save(  # returns when the values of now are in host memory
                state, checkpoint_id=path, planner=QuantizedSavePlanner(), async_stager=stager, process_group=uploads
            )
    if saved is not None:
        saved.result()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
