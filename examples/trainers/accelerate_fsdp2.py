"""accelerate with its FSDP2 plugin: the plugin shards, then the optimizer is built; checkpoints go through dcp.

    torchrun --nproc-per-node 2 examples/trainers/accelerate_fsdp2.py --out runs/accelerate [--storage high_precision]

What does not work (accelerate 1.15):
  * `prepare(model, optimizer)` gives the optimizer the shards in place of the weights it was built with.
    MasterWeightOptimizer, whose masters are those of whole weights, refuses to step then. Shard by
    `fsdp2_prepare_model`, as `prepare` does, then build the optimizer, and hand it to `prepare_optimizer`.
  * On CPU the plugin is ignored, and `prepare` makes DDP of the model; see `accelerator`.
  * `cpu_ram_efficient_loading=True` broadcasts weights, which is refused. Read a checkpoint instead.
  * `save_state` has no place for a planner, and is refused. Use dcp.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, quantized_model_init

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def accelerator() -> Accelerator:
    """One with the FSDP2 plugin in force, on CPU too, where accelerate itself leaves it out."""
    policy, layers = "transformer_based_wrap", ["LlamaDecoderLayer"]
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy=policy, transformer_cls_names_to_wrap=layers)
    made = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if not made.is_fsdp2:
        PartialState().distributed_type = made.state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = plugin
    return made


def prepared(accelerate: Accelerator, storage: str) -> tuple[Any, Any]:
    """The model, sharded by the plugin, and an optimizer on its shards."""
    torch.manual_seed(0)
    with quantized_model_init(NVFP4BlockScaling(), storage=storage):
        config = LlamaConfig(**TINY, num_hidden_layers=2, num_key_value_heads=2)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = fsdp2_prepare_model(accelerate, model)
    if storage == "quantized":
        return model, accelerate.prepare_optimizer(
            MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # any will do: shards are dense, gathers are quantized
    optimizer.register_step_post_hook(lambda *_: (sync_scales(model), None)[1])
    return model, accelerate.prepare_optimizer(optimizer)


def training_state(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer.optimizer), "step": step}


def main(argv: list[str] | None = None) -> list[float]:
    """One run, a checkpoint every three steps; returns this rank's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--storage", choices=("quantized", "high_precision"), default="quantized")
    parser.add_argument("--resume", help="checkpoint to go on from")
    args, accelerate = parser.parse_args(argv), accelerator()
    model, optimizer = prepared(accelerate, args.storage)
    state = training_state(model, optimizer, 0)
    if args.resume is not None:
        dcp.load(state, checkpoint_id=args.resume, planner=QuantizedLoadPlanner())
        set_optimizer_state_dict(model, optimizer.optimizer, state["optim"])
    sync_scales(model)
    losses = []
    for step in range(state["step"], 6):
        tokens = (torch.arange(16) * torch.arange(1, 5)[:, None]) % TINY["vocab_size"]
        tokens = tokens[accelerate.process_index :: accelerate.num_processes]
        accelerate.backward(loss := model(input_ids=tokens, labels=tokens).loss)
        accelerate.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 3 == 0:
            state = training_state(model, optimizer, step + 1)
            dcp.save(state, checkpoint_id=args.out / f"step-{step + 1}", planner=QuantizedSavePlanner())
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    print(f"losses: {main()}")
    dist.destroy_process_group()
