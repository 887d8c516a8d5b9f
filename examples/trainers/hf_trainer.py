"""transformers' Trainer around a model that this script has sharded and quantized; it saves, and goes on from there.

    torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py --out runs/trainer
    torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py --out runs/resumed --resume runs/trainer/checkpoint-3

Optimizer and scheduler are given. `QuantizedTrainer` is a Trainer that leaves shards where they are, neither moved nor
wrapped into DDP, and whose checkpoints go through dcp. What does not work:
  * `TrainingArguments(fsdp=...)`: accelerate ignores it on CPU, and elsewhere gives the optimizer wrong parameters (see
    accelerate_fsdp2.py). Leave it out: the model is sharded already.
  * the Trainer as it is: it makes DDP of a model that it has not sharded itself.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dcp_adapters.transformers.trainer import QuantizedTrainer
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize_

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
STEPS, BATCH = 6, 4  # rows of a step on all ranks together


def main(argv: list[str] | None = None) -> list[float]:
    """One run, a checkpoint every three steps; returns the losses that the Trainer logged, of this run and before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", help="checkpoint to go on from")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_hidden_layers=2, num_key_value_heads=2)).to(torch.bfloat16)
    quantize_(model, MXFP8BlockScaling())  # a large model: on the meta device, as in transformers_fsdp2.py
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, 1.0, 0.1, STEPS)

    rows = [(torch.arange(16) * (row % 4 + 1) + row // 4) % TINY["vocab_size"] for row in range(STEPS * BATCH)]
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    options: dict[str, Any] = {"save_steps": 3, "use_cpu": True, "dataloader_pin_memory": False}
    options |= {"logging_steps": 1, "disable_tqdm": True, "report_to": "none", "max_steps": STEPS}
    options |= {"per_device_train_batch_size": BATCH // dist.get_world_size()}
    given = {"train_dataset": data, "optimizers": (optimizer, scheduler)}
    trainer = QuantizedTrainer(model, TrainingArguments(str(args.out), **options), **given)
    trainer.train(resume_from_checkpoint=args.resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
