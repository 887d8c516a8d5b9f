"""transformers' Trainer around a model that this script has sharded and quantized; its checkpoints are ours.

    torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py --out runs/trainer
    torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py --out runs/resumed --resume runs/trainer/step-3

The Trainer is told that the model owns its sharding, so that it neither moves it nor wraps it into DDP; optimizer and
scheduler are given; a callback saves. What does not work:
  * `TrainingArguments(fsdp=...)`: accelerate ignores it on CPU, and elsewhere gives the optimizer wrong parameters (see
    accelerate_fsdp2.py). Leave it out: the model is sharded already.
  * the Trainer's own checkpoints, and with them `train(resume_from_checkpoint=...)`: it refuses to save them for such a
    model. Load by dcp, and give it the rest of the data.
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
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize_

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
STEPS, BATCH = 6, 4  # rows of a step on all ranks together


class ShardedLlama(LlamaForCausalLM):  # type: ignore[misc] # transformers has no types
    """An ordinary Llama that tells the Trainer to leave its placement alone."""

    is_distributed_loading_by_transformers = True


class Checkpoints(TrainerCallback):  # type: ignore[misc] # likewise
    """Saves model, optimizer and scheduler every three steps."""

    def __init__(self, out: Path, done: int) -> None:
        self.out, self.done = out, done  # steps before this run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer on every rank."""
        step = self.done + state.global_step
        if step % 3 == 0:
            held = training_state(kwargs["model"], kwargs["optimizer"].optimizer, kwargs["lr_scheduler"], step)
            dcp.save(held, checkpoint_id=self.out / f"step-{step}", planner=QuantizedSavePlanner())


def training_state(model: Any, optimizer: MasterWeightOptimizer, scheduler: LinearLR, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    optim = get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optim": optim, "scheduler": scheduler, "step": step}


def main(argv: list[str] | None = None) -> list[float]:
    """One run; returns the losses that the Trainer logged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", help="checkpoint to go on from")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = ShardedLlama(LlamaConfig(**TINY, num_hidden_layers=2, num_key_value_heads=2)).to(torch.bfloat16)
    quantize_(model, MXFP8BlockScaling())  # a large model: on the meta device, as in transformers_fsdp2.py
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, 1.0, 0.1, STEPS)
    done = 0  # steps
    if args.resume is not None:
        state = training_state(model, optimizer, scheduler, 0)
        dcp.load(state, checkpoint_id=args.resume, planner=QuantizedLoadPlanner())  # weights and scheduler, in place
        set_optimizer_state_dict(model, optimizer, state["optim"])
        done = state["step"]

    rows = [(torch.arange(16) * (row % 4 + 1) + row // 4) % TINY["vocab_size"] for row in range(STEPS * BATCH)]
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    options: dict[str, Any] = {"save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False}
    options |= {"train_sampling_strategy": "sequential", "logging_steps": 1, "disable_tqdm": True, "report_to": "none"}
    options |= {"per_device_train_batch_size": BATCH // dist.get_world_size(), "max_steps": STEPS - done}
    rest: Subset[Any] = Subset(data, range(done * BATCH, len(data)))
    given = {"optimizers": (optimizer, scheduler), "callbacks": [Checkpoints(args.out, done)]}
    trainer = Trainer(model, TrainingArguments(str(args.out), **options), train_dataset=rest, **given)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
