"""Masters of sharded parameters: what moves shards to other storage is no write, what writes them on one rank is."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import unsharded
from qtensor import MasterWeightOptimizer, quantized_model_init
from qtensor.spec.recipes import Recipe
from tests.ranks import run_ranks
from tests.recipes import ROW

RECIPES = [ROW["mxfp8"], ROW["nvfp4"]]


def _sharded(recipe: Recipe, rows: int = 33) -> nn.Module:
    torch.manual_seed(0)
    with quantized_model_init(recipe, preserve_high_precision_init_val=True):
        model = nn.Linear(64, rows, bias=False, dtype=torch.bfloat16)
    return fully_shard(model)


def _padding_is_no_write(recipe: Recipe) -> None:
    """FSDP pads uneven shards once more before the first forward, into new storage."""
    torch.manual_seed(0)
    initial = nn.Linear(64, 33, bias=False, dtype=torch.bfloat16).weight.detach().float()
    model = _sharded(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.0)
    model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    master = optimizer.state[model.weight]["master_weight"].full_tensor()
    assert torch.equal(master, initial)  # not what the quantized bytes decode to


def _write_on_one_rank(recipe: Recipe) -> None:
    model = _sharded(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.0)
    for step in range(3):
        model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and dist.get_rank() == 0:
            with torch.no_grad():
                model.weight.to_local().fill_(0.5)
    with unsharded(model):
        rows = -(-33 // dist.get_world_size())
        assert torch.equal(model.weight.dequantize()[:rows], torch.full((rows, 64), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_padding_uneven_shards_is_no_write(recipe: Recipe) -> None:
    run_ranks(2, _padding_is_no_write, recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_write_on_one_rank_reaches_its_master_and_hangs_nobody(recipe: Recipe) -> None:
    run_ranks(2, _write_on_one_rank, recipe)


def _load_after_the_optimizer_was_built(recipe: Recipe, path: str, rows: int) -> None:
    model = _sharded(recipe, rows)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner())
    saved = [part.reshape(-1).view(torch.uint8).clone() for part in model.weight.to_local().parts().values()]
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=1.0)
    for lr in (1.0, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        model(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if lr:
            dcp.load({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedLoadPlanner())
    for part, before in zip(model.weight.to_local().parts().values(), saved, strict=True):
        assert torch.equal(part.reshape(-1).view(torch.uint8), before)


@pytest.mark.parametrize("recipe", [*RECIPES, ROW["int4_32"]], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize(("world_size", "rows"), [(1, 33), (2, 33), (4, 3)])
def test_a_checkpoint_loaded_after_the_optimizer_was_built_is_not_undone(
    world_size: int, rows: int, recipe: Recipe, shared_tmp_path: Path
) -> None:
    """Nor are its bytes made anew where nothing moves: INT4's would be others. The last of 4 ranks has no rows."""
    run_ranks(world_size, _load_after_the_optimizer_was_built, recipe, str(shared_tmp_path), rows)
