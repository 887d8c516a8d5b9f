"""Leaves that DCP would read or write at the wrong place are refused, by name, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_adapters.records.placements import placement_problem
from fsdp_hooks.torch_private import dtensor_around
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, held, load, save, values
from tests.ranks import run_ranks

# placements on a mesh of 2 x 2 -> whether a rank's rows are one run
LAYOUTS: dict[str, tuple[tuple[Any, Any], bool]] = {
    "fsdp x tp": ((_StridedShard(0, split_factor=2), Shard(0)), True),
    "hsdp": ((Replicate(), Shard(0)), True),
    "cut twice": ((Shard(0), Shard(0)), True),
    "rows and columns": ((Shard(0), Shard(1)), True),
    "strided alone": ((Replicate(), _StridedShard(0, split_factor=2)), False),
    "strided otherwise": ((_StridedShard(0, split_factor=4), Shard(0)), False),
    "strided, cut along columns": ((_StridedShard(0, split_factor=2), Shard(1)), False),
}


def one_run(mesh: Any, placements: Any) -> bool:
    """By asking torch for the rows themselves: distribute row numbers, look at what each rank got."""
    numbers = torch.arange(16).reshape(16, 1).expand(16, 8).contiguous()
    local = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()[:, 0]
    return bool((local.diff() == 1).all())


def layouts() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name, (placements, fits) in LAYOUTS.items():
        assert one_run(mesh, placements) == fits, name
        local = distribute_tensor(torch.zeros(16, 8), mesh, placements, src_data_rank=None).to_local()
        problem = placement_problem(dtensor_around(local, mesh, placements, (16, 8)))
        assert (problem is None) == fits, name
        assert fits or "a rank's rows are several runs, of which DCP knows the first" in str(problem)


def test_strided_shards_fit_where_their_rows_are_one_run() -> None:
    run_ranks(4, layouts)


class Narrow(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, rows), nn.Linear(rows, 16)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x))


def taken(path: Path) -> None:
    """Fewer rows than ranks, and rows that no number of ranks divides: some shards are empty, in several shapes."""
    for dp, tp in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        for rows in (3, 7):
            model = Narrow(rows)
            if tp > 1:
                parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            state = fully_shard(model, mesh=mesh["dp"]).state_dict()
            assert {placement_problem(value) for value in state.values()} == {None}
            before = held(state)
            save(state, path / f"{dp}-{tp}-{rows}")
            for value in state.values():
                value.to_local().zero_()
            load(state, path / f"{dp}-{tp}-{rows}")
            assert held(state) == before


def test_what_fsdp2_and_tensor_parallelism_cut_is_taken(shared_tmp_path: Path) -> None:
    run_ranks(4, taken, shared_tmp_path)


def refused(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    scattered = (Replicate(), _StridedShard(0, split_factor=2))
    q = quantize(values((32, 64), 1), RECIPES["mxfp8"])
    targets = {
        "q": (DTensor.from_local(q, mesh, scattered, run_check=False, shape=(64, 64), stride=(64, 1)), "several runs"),
        "d": (dtensor_around(torch.zeros(32, 64), mesh, scattered, (64, 64)), "several runs"),
        "p": (dtensor_around(torch.zeros(64, 64), mesh, (Partial(), Replicate()), (64, 64)), "a term of a sum"),
    }
    for name, (target, text) in targets.items():
        for mode in ("raise", "convert"):
            before = held({name: target})
            with pytest.raises(BaseException, match=f"{name}: it is placed as .*{text}"):
                load({name: target}, path, on_mismatch=mode)
            assert held({name: target}) == before


def save_one_of_each(path: Path) -> None:
    weight = quantize(values((64, 64), 0), RECIPES["mxfp8"])
    save({"q": weight, "d": torch.ones(64, 64), "p": torch.ones(64, 64)}, path)


def test_a_load_into_other_placements_is_refused(shared_tmp_path: Path) -> None:
    run_ranks(1, save_one_of_each, shared_tmp_path)
    run_ranks(4, refused, shared_tmp_path)


def test_a_slice_of_columns_is_no_target(tmp_path: Path) -> None:
    save({"w": quantize(values((32, 64), 0), RECIPES["mxfp8"])}, tmp_path)
    base = quantize(torch.zeros(32, 128), RECIPES["mxfp8"])
    with pytest.raises(BaseException, match="w: it is a slice of some columns, which is a copy"):
        load({"w": base[:, :64]}, tmp_path)
