"""What FSDP2 cannot do with quantized weights is refused by name, on every rank alike, before any collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from qtensor import quantized_model_init
from tests.fsdp_hooks.cases import (
    RECIPES,
    SQUARE,
    SQUARE_RECIPES,
    Collectives,
    K,
    Net,
    batch,
    build,
    mesh_of,
    rows_for,
    shard,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each


def _refused(name: str, **options: Any) -> None:
    """Raises what fully_shard raises, having checked that nothing was said to the other ranks."""
    net = build(RECIPES[name], rows_for(name))
    mesh = mesh_of(dist.get_world_size())
    with Collectives() as comms:
        try:
            fully_shard(net.blocks[0], mesh=mesh, **options)
        finally:
            assert not comms.counts, comms.counts


def _on_columns(param: nn.Parameter) -> Shard:
    return Shard(1) if param.ndim == 2 else Shard(0)


def _assert_alike(messages: list[str], *words: str) -> None:
    assert len(set(messages)) == 1, messages
    for word in words:
        assert word in messages[0], messages[0]


@pytest.mark.parametrize("name", RECIPES)
def test_reshard_after_forward_to_a_smaller_mesh_is_refused(name: str) -> None:
    messages = run_ranks_catching(4, _refused, name, reshard_after_forward=2)
    _assert_alike(
        messages,
        "NotImplementedError",
        "reshard_after_forward=<int>",
        "use True or False",
        f"({rows_for(name)[0]}, {K})",
    )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_sharding_columns_is_refused(name: str, world_size: int) -> None:
    messages = run_ranks_catching(world_size, _refused, name, shard_placement_fn=_on_columns)
    _assert_alike(messages, "FSDP2 asks for", "shard on dim 0", f"({rows_for(name)[0]}, {K})")


def _goes_on_after_a_refusal(name: str) -> None:
    """A refused model is not half sharded: the same layers can be sharded as they should be."""
    for options in ({"shard_placement_fn": _on_columns}, {"reshard_after_forward": dist.get_world_size() // 2}):
        if options.get("reshard_after_forward") == 1:
            continue  # FSDP takes 1 for False
        net = build(RECIPES[name], rows_for(name))
        try:
            fully_shard(net.blocks[0], **options)
        except (NotImplementedError, ValueError):
            pass
        else:
            raise AssertionError("no error")
        fresh = shard(build(RECIPES[name], rows_for(name)))
        fresh(batch(0)).float().sum().backward()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_can_go_on_after_a_refusal(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8"), _goes_on_after_a_refusal)


def _dense_weights_may(name: str) -> None:
    """The refusals are for quantized weights: dense parameters beside them are sharded as anyone likes."""
    net = Net((8,))
    fully_shard(net, shard_placement_fn=_on_columns)
    net(batch(0)).float().sum().backward()
    net = build(RECIPES[name], rows_for(name))
    net.extra = nn.Linear(K, 6, bias=False, dtype=torch.bfloat16)
    fully_shard(net, shard_placement_fn=lambda param: _on_columns(param) if param is net.extra.weight else None)
    net(batch(0)).float().sum().backward()


def test_dense_weights_beside_quantized_ones_may_be_sharded_on_columns() -> None:
    run_ranks(2, _dense_weights_may, "nvfp4")


def _misfit(name: str, rows: int, columns: int) -> None:
    with Collectives() as comms:
        try:
            with quantized_model_init(RECIPES[name]):
                nn.Linear(columns, rows)
        finally:
            assert not comms.counts


@pytest.mark.parametrize(
    ("name", "rows", "columns", "multiple"),
    [
        ("mxfp8", 8, 48, 32),
        ("nvfp4", 8, 40, 16),
        ("mxfp8_square", 48, 64, 32),
        ("nvfp4_square", 40, 64, 16),
    ],
)
def test_a_shape_that_does_not_fit_the_blocks_is_refused(name: str, rows: int, columns: int, multiple: int) -> None:
    messages = run_ranks_catching(2, _misfit, name, rows, columns)
    _assert_alike(messages, "ValueError", f"({rows}, {columns})", f"{multiple}")


def _square_blocks_cut(name: str) -> None:
    """Square blocks are stored a row at a time: shards may cut them, and gather exactly."""
    from tests.fsdp_hooks.cases import assert_equals_reference, gathered

    reference = build(RECIPES[name], (32, 96))
    net = shard(build(RECIPES[name], (32, 96)))
    assert_equals_reference(gathered(net), reference, name)
    net(batch(0)).float().sum().backward()


@pytest.mark.parametrize("world_size", [3, 4])
def test_shards_that_cut_square_blocks_gather_exactly(world_size: int) -> None:
    assert SQUARE
    run_ranks_each(world_size, SQUARE_RECIPES, _square_blocks_cut)
