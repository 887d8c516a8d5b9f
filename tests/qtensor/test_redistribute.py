"""Collectives on the parts of a quantized tensor: none is left under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from qtensor import Float8CurrentScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.ops.redistribute import scatter
from tests.qtensor.recipes_under_test import same_bytes, weight
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor


class _Work:
    """Of a collective that ends when somebody waits for it."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


def test_every_part_of_a_scatter_is_waited_for() -> None:
    """torch waits for the last part alone, which is what it is given; gloo often hides that others were not."""
    works: list[_Work] = []
    sizes: list[tuple[int, int]] = []

    def send(out: list[Tensor], pieces: list[list[Tensor]], *_: Any) -> tuple[list[Tensor], _Work]:
        works.append(_Work())
        sizes.append((out[0].nbytes, pieces[0][0].nbytes))
        return out, works[-1]

    q = quantize(weight(), NVFP4BlockScaling())
    (out,), last = scatter(send, ([q], [[q.clone(), q.clone()]], None, 0), {})
    assert isinstance(out, QuantizedTensor)
    assert out is q
    assert last is works[-1]
    assert len(works) == len(q.parts()) == 3
    assert [one.waited for one in works] == [True] * 3
    assert all(own == piece for own, piece in sizes)


def _shards_of_their_own_scales(recipe: Float8CurrentScaling | NVFP4BlockScaling) -> None:
    """Each rank's shard is a quantized tensor of values of its own magnitude, as before the first `sync_scales`."""
    own = [quantize(weight(16, 32) * 2.0**rank, recipe) for rank in range(4)]
    shard = own[dist.get_rank()]
    line = DTensor.from_local(shard, init_device_mesh("cpu", (4,)), [Shard(0)])
    assert same_bytes(line.full_tensor().dequantize(), torch.cat([q.dequantize() for q in own]))
    square = DTensor.from_local(shard, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)])
    with pytest.raises(NotImplementedError, match=r"gathering .* over a second mesh dim is not defined; use"):
        square.full_tensor()


def test_shards_of_different_scales_are_gathered_over_one_mesh_dim_and_refused_over_two() -> None:
    for recipe in (Float8CurrentScaling(granularity="tensor"), NVFP4BlockScaling()):
        run_ranks(4, _shards_of_their_own_scales, recipe)


def _under_way_in_a_graph(recipe: NVFP4BlockScaling) -> None:
    q, group = quantize(weight(16, 32), recipe), dist.group.WORLD
    assert group is not None
    c10d = torch.ops._c10d_functional
    with tracing(TracingContext(FakeTensorMode())):
        gathering = c10d.all_gather_into_tensor(q, 2, group.group_name)
        assert (gathering.shape, gathering.dtype) == ((32, 32), q.dtype)
        for use in (lambda: gathering + 1, lambda: gathering[:3], gathering.t, gathering.clone):
            with pytest.raises(NotImplementedError, match="for a gather that is under way; call wait_tensor on it"):
                use()
        whole = c10d.wait_tensor(gathering.detach())
    assert same_bytes(whole.dequantize(), torch.cat([q.dequantize()] * 2))


def test_nothing_is_done_to_a_gather_of_a_graph_before_its_wait() -> None:
    """Until then its parts are bytes, which would be other numbers."""
    run_ranks(2, _under_way_in_a_graph, NVFP4BlockScaling())
