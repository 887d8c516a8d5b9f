"""Code that earns the messages of docs/troubleshooting.md: one function each, run on two ranks; all must raise.

A trigger gets a directory that both ranks share. Warnings are errors in a rank, so they count as raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, read_manifest
from fsdp_hooks import sync_scales, unsharded
from layerwise import GPTQ, calibrate
from qtensor import (
    Float8DelayedScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantize_,
    quantized_model_init,
    stochastic_rounding,
)
from tests.docs.small_models import Model, batch, shard

MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
TRIGGERS: dict[str, Callable[[Path], object]] = {}
_directories = itertools.count()


def earns(quoted: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Register a trigger of the message with these words in its heading."""

    def register(trigger: Callable[[Path], object]) -> Callable[[Path], object]:
        assert quoted not in TRIGGERS
        TRIGGERS[quoted] = trigger
        return trigger

    return register


def earned(where: Path) -> dict[str, str]:
    """What every trigger raises, "" for one that does not."""
    found = {}
    for quoted, trigger in TRIGGERS.items():
        path = where / f"{next(_directories)}"
        try:
            trigger(path)
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            found[quoted] = str(error)
        else:
            found[quoted] = ""
        dist.barrier()
    return found


def weight(rows: int = 64, columns: int = 64) -> Any:
    return torch.randn(rows, columns, dtype=torch.bfloat16)


def linear(recipe: Any = MXFP8, rows: int = 64, columns: int = 64, **options: Any) -> nn.Linear:
    with quantized_model_init(recipe, **options):
        return nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)


def quantized(recipe: Any = MXFP8) -> Any:
    with quantized_model_init(recipe):
        return shard(Model())


def meta() -> Any:
    with torch.device("meta"), quantized_model_init(NVFP4):
        return shard(Model())


@contextmanager
def saved(path: Path, **options: Any) -> Iterator[Any]:
    """A checkpoint of a small quantized model, and the model."""
    model = quantized()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner(**options))
    yield model


def load(model: Any, path: Path, **options: Any) -> None:
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedLoadPlanner(**options))


# Building


@earns("shape … has K=…, which is not a multiple")
def odd_k(_: Path) -> object:
    return linear(columns=40)


@earns("needs its last two dims to be multiples")
def odd_square(_: Path) -> object:
    return linear(MXFP8BlockScaling(blocks="square"), rows=40)


@earns("quantize_: include pattern")
def no_such_module(_: Path) -> object:
    return quantize_(Model(), MXFP8, include=["*.weight"])


@earns("is a DTensor already; quantize before")
def sharded_before(_: Path) -> object:
    return quantize_(shard(Model()), MXFP8)


@earns("expected a recipe")
def no_recipe(_: Path) -> object:
    return quantize(weight(), "mxfp8")  # type: ignore[arg-type]


@earns("keeps a history")
def delayed_without_a_place(_: Path) -> object:
    return linear(Float8DelayedScaling(), storage="high_precision")


# Operations


@earns("is not defined for quantized tensors (got")
def unknown_op(_: Path) -> object:
    return torch.linalg.norm(quantize(weight(), MXFP8))


@earns("has no single storage")
def saved_without_planner(path: Path) -> object:
    return dcp.save({"model": quantized().state_dict()}, checkpoint_id=path)


@earns("tolist, numpy and DLPack")
def to_numpy(_: Path) -> object:
    return quantize(weight(), MXFP8).numpy()


@earns("assigning .data of")
def assigned_data(_: Path) -> object:
    q = linear().weight
    q.data = weight()
    return q


@earns("writing into some columns")
def some_columns(_: Path) -> object:
    return quantize(weight(), MXFP8)[:, :32].copy_(weight()[:, :32])


@earns("writing into some rows")
def some_rows(_: Path) -> object:
    return quantize(weight(), NVFP4)[:8].copy_(8 * weight()[:8])


@earns("a leaf Variable that requires grad")
def with_grad(_: Path) -> object:
    return linear().weight.copy_(weight())


# Sharding


@earns("changes more than the rows")
def sharded_on_columns(_: Path) -> object:
    return fully_shard(linear(), shard_placement_fn=lambda param: Shard(1))


@earns("cuts along K must be multiples")
def cut_in_a_block(_: Path) -> object:
    pair = nn.Sequential(linear(columns=96))
    return parallelize_module(pair, init_device_mesh("cpu", (2,)), {"0": RowwiseParallel()})


@earns("FSDP2 would cut its one row")
def vector(_: Path) -> object:
    module = nn.Module()
    module.vector = nn.Parameter(quantize(torch.ones(64, dtype=torch.bfloat16), MXFP8))
    return fully_shard(module)


@earns("sync_scales: the parameters are on the meta device")
def agree_on_meta(_: Path) -> object:
    return sync_scales(meta())


@earns("unsharded(writeback=False)")
def without_writeback(_: Path) -> None:
    with unsharded(quantized()) as model, torch.no_grad():
        model.layers[0].mlp.up_proj.weight.zero_()


@earns("and then sharded again")
def sharded_inside(_: Path) -> None:
    with unsharded(quantized(), writeback=True) as model, torch.no_grad():
        model.layers[0].mlp.up_proj.weight.zero_()
        model.state_dict()


@earns("the state dict holds a DTensor on")
def other_mesh(_: Path) -> object:
    state = quantized().state_dict()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    with quantized_model_init(MXFP8):
        other: Any = Model()
    for layer in other.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    return other.load_state_dict(state)


# Optimizers and kernels


@earns("MasterWeightOptimizer: parameters are on the meta")
def masters_of_nothing(_: Path) -> object:
    return MasterWeightOptimizer(torch.optim.AdamW, meta().parameters())


@earns("fused=True")
def fused(_: Path) -> object:
    layer = linear()
    layer(weight()).sum().backward()
    return torch.optim.AdamW(layer.parameters(), fused=True).step()


@earns("so an average with such small weights stands still")
def moving_average(_: Path) -> object:
    with torch.no_grad():
        return quantize(weight(), MXFP8).lerp_(weight(), 0.01)


@earns("stochastic_rounding: the generator is on")
def other_device(_: Path) -> object:
    q: Any = quantize(weight().to("meta"), MXFP8)
    with torch.no_grad(), stochastic_rounding(torch.Generator().manual_seed(0)):
        return q.add_(1)


@earns("DTensor random operators may not")
def drawn(_: Path) -> object:
    return nn.init.normal_(shard(Model()).layers[0].mlp.up_proj.weight)


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


@earns("verify_checksums=True: the checkpoint has no checksums")
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


@earns("tensor parallelism is not supported by calibrate")
def calibrated_in_parallel(_: Path) -> object:
    model = Model()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"layers.0.mlp.down_proj": RowwiseParallel()})
    return calibrate(model, [batch()], recipe=NVFP4, progress=False)


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
