"""Code that earns the messages of docs/troubleshooting.md: one function each, run on two ranks; all must raise.

Here those about models and optimizers; those about checkpoints and calibration are in triggers_stored.py.

A trigger gets a directory that both ranks share. Warnings are errors in a rank, so they count as raised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from fsdp_hooks import sync_scales, unsharded
from qtensor import (
    Float8BlockScaling,
    Float8DelayedScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantize_,
    quantized_model_init,
    stochastic_rounding,
)
from tests.docs.small_models import Model, shard

MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
TRIGGERS: dict[str, Callable[[Path], object]] = {}


def earns(quoted: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Register a trigger of the message with these words in its heading."""

    def register(trigger: Callable[[Path], object]) -> Callable[[Path], object]:
        assert quoted not in TRIGGERS
        TRIGGERS[quoted] = trigger
        return trigger

    return register


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


# Building


@earns("shape … has K=…, which is not a multiple")
def odd_k(_: Path) -> object:
    return linear(columns=40)


@earns("needs its last two dims to be multiples")
def odd_square(_: Path) -> object:
    return linear(MXFP8BlockScaling(blocks="square"), rows=40)


@earns("is one row, and the square blocks of")
def square_blocks_of_a_vector(_: Path) -> object:
    return quantize(weight()[0], Float8BlockScaling())


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


@earns("does not support uneven sharding")
def uneven_rows(_: Path) -> object:
    module = nn.Module()
    module.experts = nn.Parameter(quantize(torch.ones(3, 33, 64), MXFP8))
    return fully_shard(module, shard_placement_fn=lambda param: Shard(1))


@earns("cuts along K must be multiples")
def cut_in_a_block(_: Path) -> object:
    pair = nn.Sequential(linear(columns=96))
    return parallelize_module(pair, init_device_mesh("cpu", (2,)), {"0": RowwiseParallel()})


@earns("FSDP2 would cut its one row")
def vector(_: Path) -> object:
    module = nn.Module()
    module.vector = nn.Parameter(quantize(torch.ones(64, dtype=torch.bfloat16), MXFP8))
    return fully_shard(module)


@earns("…: the parameters are on the meta device")
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
