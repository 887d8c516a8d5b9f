"""torchtitan's checkpoint manager, with its optimizer and scheduler containers, on quantized weights.

    torchrun --nproc-per-node 2 examples/trainers/torchtitan_checkpoint.py --out runs/titan [--async-mode async]

Started again with the same OUT it goes on from its newest checkpoint. torchtitan's CheckpointManager takes no planner,
but whatever it writes and reads goes through its `dcp_save` and `dcp_load`, so that a subclass suffices; folders,
intervals, last saves and waiting stay torchtitan's own. What does not work (torchtitan 0.3):
  * the manager as it is: its stock planner is refused for quantized weights.
  * its ModelWrapper: it compares storages, and quantized weights have several. `Weights` takes its place.
  * `async_with_pinned_mem` without CUDA, and last saves in Hugging Face's layout.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan_llama import loss_of, sharded_llama

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, QuantizedStager
from qtensor import MasterWeightOptimizer


class Checkpoints(CheckpointManager):  # type: ignore[misc] # torchtitan's types are not followed
    """The manager with this library's planners."""

    def dcp_save(self, state_dict: Any, checkpoint_id: str, async_mode: AsyncMode, **_: Any) -> Any:
        """Every save of the manager ends here."""
        options: dict[str, Any] = {"checkpoint_id": checkpoint_id, "planner": QuantizedSavePlanner()}
        if async_mode == AsyncMode.DISABLED:
            return dcp.save(state_dict, **options)
        return dcp.async_save(state_dict, **options, async_stager=QuantizedStager(), process_group=self.pg)

    def dcp_load(self, state_dict: Any, checkpoint_id: str, **_: Any) -> None:
        """Every load of the manager ends here; weights are written in place."""
        dcp.load(state_dict, checkpoint_id=checkpoint_id, planner=QuantizedLoadPlanner())


class Weights:
    """The model as a `Stateful`."""

    def __init__(self, model: Any) -> None:
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


class Masters(OptimizersContainer):  # type: ignore[misc]
    """The container of optimizers, around one with fp32 masters."""

    def __init__(self, model: Any) -> None:
        self.model_parts, named = [model], list(model.named_parameters())
        self.optimizers = [MasterWeightOptimizer(torch.optim.AdamW, named, lr=2e-3)]
        torch.optim.Optimizer.__init__(self, [param for _, param in named], {})


def main(argv: list[str] | None = None) -> list[float]:
    """Train up to some step, a checkpoint every three; returns this rank's losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--async-mode", choices=("disabled", "async"), default="async")
    args, model = parser.parse_args(argv), sharded_llama()
    masters, counters = Masters(model), {"step": torch.zeros(())}
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=masters, training_steps=6)
    config = Checkpoints.Config(enable=True, interval=3, async_mode=args.async_mode, export_dtype="bfloat16")
    parts = {"model_parts": [model], "optimizers": masters, "lr_schedulers": schedule, "dataloader": None}
    manager = Checkpoints(config, **parts, states={"counters": counters}, sd_adapter=None, base_folder=str(args.out))
    manager.states["model"] = Weights(model)
    manager.load()
    losses = []
    for step in range(int(counters["step"]), args.steps):
        loss = loss_of(model, step)
        loss.backward()
        masters.step()
        masters.zero_grad()
        schedule.step()
        counters["step"].fill_(step + 1)
        manager.save(step + 1)  # last_step=True: the weights alone, as they are, for use elsewhere
        losses.append(loss.item())
    manager.maybe_wait_for_saving()
    manager.close()
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    print(f"losses: {main()}")
    dist.destroy_process_group()
