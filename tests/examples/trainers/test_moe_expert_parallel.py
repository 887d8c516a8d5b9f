"""Quantized experts under expert parallelism x FSDP2: the losses and the bytes of one process, step by step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from examples.trainers import moe_expert_parallel as example
from qtensor import QuantizedTensor
from tests.fsdp_hooks.cases import Collectives, local
from tests.ranks import run_ranks


def test_four_ranks_train_to_the_bytes_of_one_process() -> None:
    ((expected, digest),) = run_ranks(1, example.main)
    assert all(last < 0.9 * first for first, last in zip(expected[0], expected[-1], strict=True))
    for rank, (losses, found) in enumerate(run_ranks(4, example.main)):
        assert losses == [[step[rank]] for step in expected]
        assert found == digest


def laid_out() -> None:
    mesh = example.init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: Any = example.Model()
    example.shard(model, mesh)
    experts = model.layers[0].experts
    for param in experts.parameters():
        assert isinstance(param, DTensor)
        assert isinstance(local(param), QuantizedTensor)
        assert param.placements == (Shard(1), Shard(0))
        assert local(param).shape == (param.shape[0] // 2, param.shape[1] // 2, param.shape[2])
    with Collectives() as comms:
        (loss,) = model([example.batch(0, dist.get_rank())])
        loss.backward()
    # in each layer how many rows, the rows there and back, and their gradients there and back
    assert comms.counts["alltoall_base_"] == 2 * 5
    # in each layer its own weights and its experts', for forward and backward; and the root's
    assert comms.counts["_allgather_base_"] == 2 * 4 + 1, comms.counts


def test_experts_are_quantized_shards_of_rows_and_rows_travel_there_and_back() -> None:
    run_ranks(4, laid_out)
