"""Expert parallelism beside FSDP2: experts on one mesh dim, each rank's experts sharded over another.

The experts train like those of one process, whether FSDP2 cuts them along their rows or by experts once more, and all
ranks of both mesh dims agree on the scales that they share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import RECIPES, STAND_INS, Collectives, assert_same_bytes, exchanged, local, parts_of
from tests.fsdp_hooks.expert_meshes import K, Layout, built, built_alone
from tests.fsdp_hooks.test_tensor_parallel import assert_reference_bytes
from tests.ranks import run_ranks_each
from tests.sampling import sampled

EXPERTS, TOKENS = 5, 4
SMALL = {"masters": "remainder", "moments": "float8"}
LAYOUTS = [Layout(2, 2, 1), Layout(2, 2, 0), Layout(2), Layout(4), Layout(2, 4, 1), Layout(2, 2, 1, 2)]


def tokens(step: int, group: int) -> Tensor:
    """[E, T, K], others on each rank of "efsdp"."""
    generator = torch.Generator().manual_seed(100 * step + group)
    return torch.randn(EXPERTS, TOKENS, K, generator=generator).bfloat16()


def own(layout: Layout) -> tuple[slice, int]:
    """Which experts this rank has, and its place on "efsdp", of all replicas."""
    group, place = divmod(dist.get_rank(), layout.ep)
    size = -(-EXPERTS // layout.ep)
    return slice(place * size, (place + 1) * size), group


def trains(name: str, layout: Layout, form: dict[str, Any]) -> None:
    """Outputs before each step, gradients, and all bytes after it."""
    model, reference = built(name, layout), built_alone(name)
    mine, group = own(layout)
    optimizers = [
        MasterWeightOptimizer(torch.optim.AdamW, [*net.experts.parameters()], lr=0.02, **form)
        for net in (model, reference)
    ]
    for step in range(2):
        out = model.experts(tokens(step, group)[mine])
        its = reference.experts(tokens(step, group))
        assert_same_bytes(out.detach(), its.detach()[mine], f"step {step}")
        out.float().square().sum().backward()
        totals: dict[str, Tensor] = {}
        groups = layout.efsdp * layout.replicas
        for other in range(groups):
            reference.zero_grad()
            reference.experts(tokens(step, other)).float().square().sum().backward()
            for key, param in reference.experts.named_parameters():
                totals[key] = totals.get(key, 0) + param.grad
        for key, param in reference.experts.named_parameters():
            param.grad = totals[key] / groups
            found = model.experts.get_parameter(key).grad
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            # a mean of two is rounded once, wherever it is made; that of more depends on the order
            if groups <= 2:
                assert_same_bytes(whole, param.grad, f"step {step}: gradient of {key}")
            param.grad = whole
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert_reference_bytes(model.experts, reference.experts, f"step {step}")


@sampled("layout", LAYOUTS, LAYOUTS[:2], ids=[layout.where for layout in LAYOUTS])
def test_experts_train_like_those_of_one_process(layout: Layout) -> None:
    """The stand-ins have scales of rows, square blocks that shards cut, and one scale for all experts of all ranks."""
    for form in ({}, SMALL):
        run_ranks_each(layout.ranks, STAND_INS, trains, layout, form)


def writes_back(name: str, layout: Layout) -> int:
    """Written while they are gathered: each rank of "ep" has the experts of its own, and a scale for these."""
    model, reference = built(name, layout), built_alone(name)
    with torch.no_grad(), unsharded(model, writeback=True):
        for param in model.experts.parameters():
            local(param).copy_(local(param).dequantize() * 3)
    with torch.no_grad():
        for param in reference.experts.parameters():
            param.copy_(param.dequantize() * 3)
    if tensor_wide(RECIPES[name]) is None:
        assert_reference_bytes(model.experts, reference.experts, name)
    return sync_scales(model)


def test_gathered_experts_are_written_back() -> None:
    """To the bytes of one process where scales belong to rows and blocks; a scale for all must be agreed on."""
    for layout in LAYOUTS[:2]:
        names = ["mxfp8", "mxfp8_square", "nvfp4"]
        assert run_ranks_each(4, names, writes_back, layout) == [[0, layout.dim, 2]] * 4


def shards_nothing(name: str, layout: Layout) -> str:
    try:
        built(name, layout, count=1)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_rank_without_experts_is_told_before_others_wait_for_it() -> None:
    """1 expert on 2 ranks: torch itself would raise in the first forward."""
    empty = run_ranks_each(4, ["mxfp8"], shards_nothing, Layout(2, 2, 1))
    assert empty[0] == empty[2] == [""]
    assert empty[1] == empty[3]
    (message,) = empty[1]
    assert "(0, 64, 96)" in message
    assert "along its rows: FSDP2 cannot cut a stack of no matrices; share the experts out" in message


def agree(name: str, layout: Layout) -> int:
    """Written by hand, each shard has a scale of its own; afterwards all ranks have the largest."""
    model = built(name, layout)
    with torch.no_grad():
        for param in model.experts.parameters():
            local(param).copy_(torch.randn(local(param).shape) * 2.0 ** dist.get_rank())
    wide = tensor_wide(RECIPES[name])
    before = [exchanged(float(getattr(local(param), wide))) for param in model.experts.parameters()] if wide else []
    assert all(len(set(each)) > 1 for each in before)
    with Collectives() as comms:
        count = sync_scales(model)
    assert sum(comms.counts.values()) == 3  # over each mesh, also where nothing is shared: all mean the same weights
    for param, scales in zip(model.experts.parameters(), before, strict=bool(wide)):
        assert set(exchanged(float(getattr(local(param), wide)))) == {max(scales)}
    with unsharded(model):
        for param in model.experts.parameters():
            (scale,) = {*parts_of(local(param))[wide].tolist()} if wide else {0.0}
            assert scale == (float(getattr(local(param), wide)[0]) if wide else 0.0)
    return count


@sampled("layout", LAYOUTS[:2], LAYOUTS[:1], ids=[layout.where for layout in LAYOUTS[:2]])
def test_ranks_of_both_mesh_dims_agree_on_one_scale(layout: Layout) -> None:
    """One all-reduce for each mesh dim; 1 for blocks that shards cut along rows; none for scales of rows."""
    names = ["nvfp4", "float8_tensor", "mxfp8_square", "mxfp8"]
    cut = [1 if layout.dim else 0, 0]
    assert run_ranks_each(layout.ranks, names, agree, layout) == [[2, 2, *cut]] * layout.ranks
