"""Adapters of peft on a frozen, quantized and sharded base (QLoRA): only adapters are trained, and saved.

    torchrun --nproc-per-node 2 examples/trainers/qlora_peft.py --out runs/qlora [--base DIR]
    torchrun --nproc-per-node 1 examples/trainers/qlora_peft.py --out runs/resumed --resume runs/qlora/step-6 --steps 9

DIR is a dense checkpoint as `save_pretrained` writes it. The base is gathered as quantized bytes, and gets neither
gradients nor masters. Adapters are plain tensors, for any optimizer; a checkpoint of them and their optimizer's state
is small, and loads on any number of ranks. `qlora_merge.py` merges them into the base; with `--through-merge N` the
last N steps compute with the merged weights already, so that the merge takes nothing of what they learn.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dcp_adapters import QuantizedLoadPlanner
from qtensor import Float8BlockScaling, MXFP4BlockScaling, NVFP4BlockScaling, merge_aware, quantized_model_init

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
FORMATS = {"float8": Float8BlockScaling(), "mxfp4": MXFP4BlockScaling(), "nvfp4": NVFP4BlockScaling()}
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TOKENS = torch.arange(16) * torch.arange(1, 5)[:, None]  # four rows, dealt out to the ranks


def base_of(model: Any) -> dict[str, Any]:
    """The weights without adapters, under the names that they have without."""
    state = model.base_model.model.state_dict()
    return {name.replace(".base_layer", ""): state[name] for name in state if ".lora_" not in name}


def load_base(model: Any, directory: Path) -> None:
    """Fill the sharded base from a dense checkpoint: every rank reads its shards and quantizes them."""
    reader, planner = HuggingFaceStorageReader(str(directory)), QuantizedLoadPlanner(on_mismatch="convert")
    dcp.load(base_of(model), storage_reader=reader, planner=planner)


def adapted_model(directory: Path, form: str = "nvfp4") -> Any:
    """The base of a checkpoint, quantized, with fresh adapters; all of it sharded."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"), quantized_model_init(FORMATS[form]):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(**LORA))  # freezes the base
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    base.model.rotary_emb = type(base.model.rotary_emb)(config=config)  # a table that no checkpoint holds
    load_base(model, directory)
    generator = torch.Generator().manual_seed(0)
    for name, adapter in adapters_of(model).items():  # down at random, up zero
        full = torch.randn(adapter.shape, generator=generator) / adapter.shape[1] * (".lora_A" in name)
        adapter.copy_(distribute_tensor(full, adapter.device_mesh, adapter.placements, src_data_rank=None))
    return model


def adapters_of(model: Any) -> dict[str, Any]:
    """Name -> value, of all that is trained."""
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def training_state(model: Any, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"adapters": adapters_of(model), "optim": get_optimizer_state_dict(model, optimizer), "step": step}


def main(argv: list[str] | None = None) -> list[float]:
    """Train the adapters, save them at the end; returns this rank's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="directory with config.json and safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--through-merge", type=int, default=0, metavar="N", help="steps at the end")
    parser.add_argument("--resume", help="checkpoint of adapters to go on from")
    args = parser.parse_args(argv)
    if args.base is None and dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**TINY, num_hidden_layers=2)).to(torch.bfloat16).save_pretrained(args.out / "base")
    dist.barrier()
    model = adapted_model(args.base or args.out / "base", args.format)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=2e-2)
    state = training_state(model, optimizer, 0)
    if args.resume is not None:
        dcp.load(state, checkpoint_id=args.resume)
        set_optimizer_state_dict(model, optimizer, state["optim"])
    aware, losses = merge_aware(model) if args.through_merge else None, []
    for step in range(state["step"], args.steps):
        if aware and step >= args.steps - args.through_merge:
            aware.start()
        tokens = TOKENS[dist.get_rank() :: dist.get_world_size()]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dcp.save(training_state(model, optimizer, args.steps), checkpoint_id=args.out / f"step-{args.steps}")
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    print(f"losses: {main()}")
    dist.destroy_process_group()
