"""Two ranks calibrate a sharded SmolLM2-135M: how often each FSDP group is gathered, and the peak of memory.

    torchrun --nproc-per-node 2 -m benchmarks.calibration_ranks OUT TASK...

The batches are split unevenly, three to one, and the peak is compared with what cannot be avoided: the root and the
layer that is worked on, the inputs of one layer for all batches, the result, and for GPTQ the Hessians of one layer.
FSDP gathers a group into one buffer and copies the parameters out of it, so for a moment the group exists twice.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.calibration_sides import ROOT, Job, batches, calibrate_ours, first_layers, pretrained
from benchmarks.live_storages import LiveStorages

sys.path.append(str(ROOT / "examples"))
from measure import CountingAllGather

HESSIANS = {"nvfp4_max": (), "fp8_gptq": (576, 576, 576, 1536)}  # columns of each distinct input of a layer


def count_gathers(model: nn.Module) -> dict[str, CountingAllGather]:
    """A counter for each FSDP group, by the name of its module."""
    counters: dict[str, CountingAllGather] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            counters[name or "root"] = CountingAllGather()
            module.set_custom_all_gather(counters[name or "root"])  # type: ignore[arg-type]
    return counters


def local_parts(model: nn.Module) -> list[Tensor]:
    """The plain tensors of all shards and buffers."""
    params = [param.to_local() if isinstance(param, DTensor) else param.data for param in model.parameters()]
    return [*params, *model.buffers()]


def nbytes(module: nn.Module) -> int:
    """Bytes of all parameters, gathered; a tied one counts once."""
    return sum(param.numel() * param.element_size() for param in module.parameters())


def measure(task: Any, layers: int, count: int) -> dict[str, Any]:
    """One calibration; the figures of this rank."""
    model: Any = pretrained()
    rank, sizes = dist.get_rank(), (count * 3 // 4, count - count * 3 // 4)
    job = Job(task=task, side="layerwise", layers=layers, batches=count)
    mine = batches(job)[: sizes[0]] if rank == 0 else batches(job)[sizes[0] :]
    with first_layers(model, layers):
        layer, whole = nbytes(model.model.layers[0]), nbytes(model)
        for child in model.model.layers:
            fully_shard(child)
        fully_shard(model)
        counters = count_gathers(model)
        with LiveStorages(except_for=local_parts(model), resized=True) as live:
            calibrate_ours(model, job, data=mine)
    hidden = model.config.hidden_size
    parts = {
        "layer": layer,
        "root": whole - layers * layer,
        "inputs of a layer": sizes[rank] * job.seq_len * hidden * 4,
        "result": layers * layer // 2 * (9 if task == "nvfp4_max" else 16) // 64,  # NVFP4: 4.5 bits of 32, FP8: 8
        "Hessians": sum(columns**2 * 4 for columns in HESSIANS[task]),
    }
    at_work = sum(parts.values()) + layer  # the layer once more: the buffer that it was gathered into
    unavoidable = max(at_work, 2 * parts["root"])
    return {
        "batches": sizes[rank],
        "gathers": {name: counter.calls for name, counter in counters.items()},
        "collectives": dict(live.collectives),
        "bytes": parts,
        "peak_bytes": live.peak,
        "unavoidable_bytes": unavoidable,
        "peak_over_unavoidable": round(live.peak / unavoidable, 3),
    }


def main(out: Path, task: str, layers: int, count: int) -> None:
    """Measure a task and write the figures of both ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, measure(task, layers, count))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
