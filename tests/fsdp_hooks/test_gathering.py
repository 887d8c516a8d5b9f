"""Many shards in one collective: whole tensors where they are kept, nothing elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_hooks.ranks.gathering import Gathering, cut_of
from tests.fsdp_hooks.cases import Collectives, bits
from tests.ranks import run_ranks

# Uneven, fewer rows than ranks, none at all, other dims, 1-D; dtypes of every size.
SHAPES = {(7, 5): 0, (2, 4): 0, (0, 3): 0, (6, 9): 1, (3, 5, 2): 2, (11,): 0, (4, 4): 0}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool)


def wholes() -> dict[Any, tuple[Tensor, int]]:
    found: dict[Any, tuple[Tensor, int]] = {}
    for (shape, dim), dtype in ((each, dtype) for each in SHAPES.items() for dtype in DTYPES):
        numbers = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(len(found)))
        found[shape, dtype] = numbers.to(dtype), dim
    return found


def _gathers(mesh_shape: tuple[int, ...], to: int | None) -> None:
    names = ("replicas", "shards")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    expected, tensors = wholes(), {}
    for key, (whole, dim) in expected.items():
        placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(dim)]
        as_bytes = whole.view(torch.uint8) if whole.dtype.itemsize == 1 else whole  # c10d knows no float8
        local = distribute_tensor(as_bytes, mesh, placements, src_data_rank=None).to_local().view(whole.dtype)
        tensors[key] = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
    with Collectives() as comms:
        gathering = Gathering(tensors, to)
        for tensor in tensors.values():
            assert cut_of(tensor) is not None
        gathering.wait()
    mine = to is None or mesh.get_coordinate()[0] == 0 or len(mesh_shape) == 1
    assert dict(comms.counts) == ({"_allgather_base_" if to is None else "gather_": 1} if mine else {})
    assert gathering.kept == (to in (None, dist.get_rank()))
    if gathering.kept:
        for tensor in tensors.values():
            tensor.to_local().zero_()  # they may be written now
        for key, (whole, _) in expected.items():
            found = gathering.whole(key)
            assert (found.dtype, found.shape) == (whole.dtype, whole.shape)
            assert torch.equal(bits(found), bits(whole)), key
    gathering.free()


@pytest.mark.parametrize(("mesh", "to"), [((2,), 0), ((3,), 2), ((3,), None), ((2, 2), 1), ((2, 2), None)])
def test_whole_tensors_arrive_where_they_are_kept(mesh: tuple[int, ...], to: int | None) -> None:
    run_ranks(torch.Size(mesh).numel(), _gathers, mesh, to)


def _cuts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    local = torch.zeros(2, 2)
    for placements in (
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
        [Shard(0), Shard(1)],
        [Partial(), Replicate()],
    ):
        assert cut_of(DTensor.from_local(local, mesh, placements, run_check=False)) is None, placements
    assert cut_of(local) is None
    whole = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    assert cut_of(whole) == cut_of(whole)
    assert len(cut_of(whole).ranks) == 2  # type: ignore[union-attr]
    other = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1))
    assert (cut_of(other) is None) == (mesh.get_coordinate()[1] == 0)  # 3 and 2 rows, as torch.chunk cuts


def test_what_is_cut_in_another_way_is_left_to_others() -> None:
    run_ranks(4, _cuts)
