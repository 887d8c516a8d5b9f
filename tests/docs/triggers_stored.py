"""Code that earns the messages about checkpoints and calibration, and what runs all triggers; see triggers.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, read_manifest
from layerwise import GPTQ, calibrate
from tests.docs.small_models import Model, batch, shard
from tests.docs.triggers import MXFP8, NVFP4, TRIGGERS, earns, quantized


def earned(where: Path) -> dict[str, str]:
    """What every trigger raises, "" for one that does not."""
    found = {}
    for number, (quoted, trigger) in enumerate(TRIGGERS.items()):
        path = where / f"{number}"
        try:
            trigger(path)
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            found[quoted] = str(error)
        else:
            found[quoted] = ""
        dist.barrier()
    return found


@contextmanager
def saved(path: Path, **options: Any) -> Iterator[Any]:
    """A checkpoint of a small quantized model, and the model."""
    model = quantized()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner(**options))
    yield model


def load(model: Any, path: Path, **options: Any) -> None:
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedLoadPlanner(**options))


# Saving


@earns("a tensor-wide scale must be the same in all shards")
def scales_apart(path: Path) -> object:
    model = quantized(NVFP4)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().copy_(torch.full(param.to_local().shape, 1.0 + dist.get_rank()))
    return dcp.save({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner())


# Loading


@earns("the checkpoint does not fit the target")
def half_a_checkpoint(path: Path) -> None:
    with saved(path) as model:
        state = model.state_dict()
        state.popitem()
        dcp.load({"model": state}, checkpoint_id=path, planner=QuantizedLoadPlanner())


@earns("the checkpoint holds …, the target is …;")
def other_recipe(path: Path) -> None:
    with saved(path):
        load(quantized(NVFP4), path)


@earns("the target is dense; build the target")
def dense_target(path: Path) -> None:
    with saved(path):
        load(shard(Model()), path)


@earns("missing in the checkpoint")
def missing(path: Path) -> None:
    with saved(path) as model:
        dcp.load({"net": model.state_dict()}, checkpoint_id=path, planner=QuantizedLoadPlanner())


@earns("only the checkpoint has it")
def extra(path: Path) -> None:
    half_a_checkpoint(path)


@earns("no master can be compared with its weight, so nothing would be known of whether they are of one step")
def masters_alone(path: Path) -> None:
    state = {"state": {"w": {"master_weight": torch.zeros(2, 2)}}}
    dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner(verify="deep"))


@earns("in the target, and the checkpoint has different values for them")
def tied_differently(path: Path) -> None:
    state = {"model": {"embed": torch.zeros(2, 3), "head": torch.ones(2, 3)}}
    dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner())
    tied = torch.zeros(2, 3)
    dcp.load({"model": {"embed": tied, "head": tied}}, checkpoint_id=path, planner=QuantizedLoadPlanner())


@earns("the checkpoint has none of the … tensors of the target")
def nothing_found(path: Path) -> None:
    with saved(path) as model:
        target = {"net": model.state_dict()}
        dcp.load(target, checkpoint_id=path, planner=QuantizedLoadPlanner(allow_partial_load=True))


@earns("no .metadata, so this is no checkpoint")
def no_checkpoint(path: Path) -> object:
    return read_manifest(path)


@earns("it was not saved with QuantizedSavePlanner")
def dense_checkpoint(path: Path) -> object:
    dcp.save({"model": shard(Model()).state_dict()}, checkpoint_id=path)
    return read_manifest(path)


@earns("is truncated")
def truncated(path: Path) -> None:
    with saved(path) as model:
        dist.barrier()
        if dist.get_rank() == 0:
            for file in path.glob("*.distcp"):
                file.write_bytes(file.read_bytes()[:100])
        dist.barrier()
        load(model, path)


@earns("the file is damaged")
def flipped(path: Path) -> None:
    with saved(path) as model:
        row = bytes(model.layers[0].mlp.up_proj.weight.to_local().payload.view(torch.uint8)[0].tolist())
        dist.barrier()
        if dist.get_rank() == 0:
            for file in path.glob("__0_*.distcp"):
                content = bytearray(file.read_bytes())
                content[content.index(row)] ^= 1
                file.write_bytes(content)
        dist.barrier()
        load(model, path, verify_checksums=True)


@earns("the checkpoint has no checksums, since it was saved without QuantizedSavePlanner")
def no_checksums(path: Path) -> None:
    with saved(path, checksums=False) as model:
        load(model, path, verify_checksums=True)


# Calibration


@earns("calibrate: include pattern")
def no_such_target(_: Path) -> object:
    return calibrate(Model(), [batch()], recipe=NVFP4, include=["nothing"], progress=False)


@earns("say where its values are")
def calibrated_on_meta(_: Path) -> object:
    with torch.device("meta"):
        model = Model()
    return calibrate(model, [batch()], recipe=NVFP4, progress=False)


@earns("calibrate: the ranks disagree on")
def calibrated_otherwise(_: Path) -> object:
    layers = ["layers.0", "layers.1"][:: 1 - 2 * dist.get_rank()]
    return calibrate(Model(), [batch()], recipe=NVFP4, layers=layers, progress=False)


@earns("holds other values now")
def one_object_for_all_batches(_: Path) -> object:
    context = SimpleNamespace(number=0)

    def batches() -> Iterator[Any]:
        for number in range(2):
            context.number = number
            yield batch(), context

    return calibrate(Model(), batches(), recipe=NVFP4, progress=False)


@earns("must get the same batches")
def calibrated_in_parallel(_: Path) -> object:
    model = Model()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"layers.0.mlp.down_proj": RowwiseParallel()})
    return calibrate(model, [batch()] * (1 + dist.get_rank()), recipe=NVFP4, progress=False)


@earns("Look for an overflow")
def infinite_inputs(_: Path) -> object:
    return calibrate(Model(), [batch() * float("inf")], recipe=NVFP4, algorithm=GPTQ(), progress=False)


@earns("no rank has a batch")
def used_up(_: Path) -> object:
    return calibrate(Model(), iter(()), recipe=NVFP4, algorithm=GPTQ(), progress=False)


@earns("holds a calibration of")
def other_run(path: Path) -> object:
    torch.manual_seed(0)
    model = shard(Model())
    data = [torch.ones(2, 64, dtype=torch.bfloat16)]
    calibrate(model, data, recipe=NVFP4, checkpoint_dir=path, progress=False)
    return calibrate(shard(Model()), data, recipe=MXFP8, checkpoint_dir=path, progress=False)


class Twice(Model):
    """Runs each layer twice."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(layer(x))
        return x


@earns("layers must be called once each")
def called_twice(_: Path) -> object:
    return calibrate(Twice(), [batch()], recipe=NVFP4, algorithm=GPTQ(), progress=False)
