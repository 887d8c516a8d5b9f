"""What ranks say to each other in a step of Muon: how often, and what all of them hear of one that fails."""

from __future__ import annotations

import functools
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from qtensor import MasterWeightOptimizer
from qtensor.optim import inner_step
from qtensor.optim.matrices import arithmetic
from qtensor.optim.matrices import step as matrix_step
from tests.fsdp_hooks.cases import Collectives, exchanged, local
from tests.fsdp_hooks.test_muon import SMALL, assert_same, built, everything, gradients, optimizer_of, sharded, train
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each

BROKEN = 1  # the rank
NO_MEMORY = "OutOfMemoryError: no memory"
PLAIN: dict[str, Any] = {}
WHERE = ("before", "advance", "put_together", "orthogonalized")


def collectives(how: str, options: dict[str, Any], chunk: int) -> dict[str, int]:
    model = sharded(built("mxfp8"), how)
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, range(1))
    gradients(model, 1)
    with patch.dict(inner_step.CHUNK, {"cpu": chunk}), Collectives() as comms:
        optimizer.step()
    return dict(comms.counts)


@pytest.mark.parametrize("options", [PLAIN, SMALL], ids=["fp32", "small"])
def test_a_step_takes_two_collectives_a_bucket_and_mesh_dim_that_cuts(options: dict[str, Any]) -> None:
    """And one all-reduce more than that of AdamW. 4 matrices of 96 x 64, 33 x 96, 3 x 32 and 32 x 64 on 2 ranks."""
    matrices = [96 * 64, 33 * 96, 3 * 32, 32 * 64]
    for chunk, buckets in ((2**22, 1), (sum(matrices) // 2, 1), (1, 4)):
        for found in run_ranks(2, collectives, "fsdp", options, chunk):
            assert found == {"allreduce_": 2, "alltoall_base_": 2 * buckets}
    assert run_ranks(1, collectives, "fsdp", options, 2**22) == [{}]


def test_two_mesh_dims_that_cut_take_twice_as_many() -> None:
    """Two of the matrices are cut by both, the others by FSDP alone; what each is cut by is agreed on by itself."""
    for found in run_ranks(4, collectives, "tp and fsdp", PLAIN, 2**22):
        assert found == {"allreduce_": 4, "alltoall_base_": 4 + 2}


def misses_a_gradient(options: dict[str, Any]) -> None:
    model = sharded(built("mxfp8"), "fsdp")
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    gradients(model, 1)
    if dist.get_rank() == BROKEN:
        model.wide.weight.grad = None
    try:
        optimizer.step()
    finally:
        assert_same(everything(model, optimizer), before, "nothing has moved")


@pytest.mark.parametrize("options", [PLAIN, SMALL], ids=["fp32", "small"])
def test_a_matrix_that_has_a_gradient_on_some_ranks_is_refused_on_all(options: dict[str, Any]) -> None:
    for message in run_ranks_catching(3, misses_a_gradient, options):
        assert message.startswith("RuntimeError: MasterWeightOptimizer.step: wide.weight: (33, 96)"), message
        assert "has a gradient on some ranks and none on others; Muon takes the whole matrix" in message


def skips_what_has_none() -> None:
    """As torch's does: neither the weight nor its momentum moves."""
    found = []
    for cut in (False, True):
        model = sharded(built("mxfp8"), "fsdp") if cut else built("mxfp8")
        optimizer = optimizer_of(model)
        for step in range(3):
            gradients(model, step)
            model.wide.weight.grad = None
            if step == 1:
                model.tall.weight.grad = None
            optimizer.step()
        assert "momentum_buffer" not in optimizer.state[model.wide.weight]
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0], "one process")


def test_matrices_without_gradients_do_not_step() -> None:
    run_ranks(2, skips_what_has_none)


def fails(case: tuple[str, dict[str, Any]], how: str) -> None:
    where, options = case
    model, other = (sharded(built("mxfp8"), how) for _ in range(2))
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    gradients(model, 1)

    def no_memory(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    module = matrix_step
    small = "moments" in options
    if where == "advance" and small:
        from qtensor.optim.compressed import muon as module  # type: ignore[no-redef]
    told = ""
    try:
        if dist.get_rank() != BROKEN:
            optimizer.step()
        elif where == "before":
            with patch.object(type(optimizer), "_join_masters", no_memory):
                optimizer.step()
        else:
            with patch.object(module, where, no_memory):
                optimizer.step()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    every = exchanged(told)
    assert every[BROKEN] == NO_MEMORY, every
    others = [text for rank, text in enumerate(every) if rank != BROKEN]
    assert all(text.startswith("RanksDifferError: MasterWeightOptimizer.step: rank 1 failed") for text in others), every
    now = everything(model, optimizer)
    # masters in fp32 may have moved; where states are compressed, all of them wait for the agreement
    kept = before if small else {name: one for name, one in before.items() if "||" in name}
    assert_same({name: now[name] for name in kept}, kept, f"{case}: nothing quantized is written")
    # and ranks are in step: a model that begins anew trains on
    train(other, optimizer_of(other, **options), range(2))


def test_a_rank_that_fails_tells_the_others_wherever_it_does() -> None:
    cases = [(where, options) for where in WHERE for options in (PLAIN, SMALL)]
    run_ranks_each(3, cases, fails, "fsdp")


def test_so_it_does_where_replicas_are_compared() -> None:
    """All ranks take part in the agreement then, and not those of a shard group alone."""
    cases = [(where, {"check_replicas": True}) for where in ("before", "orthogonalized")]
    run_ranks_each(4, cases, fails, "hsdp")


def lists_other_parameters() -> None:
    model = sharded(built("mxfp8"), "fsdp")
    kept = [pair for pair in model.named_parameters() if dist.get_rank() != BROKEN or "few" not in pair[0]]
    optimizer = MasterWeightOptimizer(torch.optim.Muon, kept, lr=0.1)
    gradients(model, 0)
    optimizer.step()


def test_ranks_that_list_other_matrices_are_refused() -> None:
    for message in run_ranks_catching(2, lists_other_parameters):
        assert message.startswith("RanksDifferError"), message
        assert "few.weight" in message


def lists_them_in_another_order(names: bool) -> None:
    """Without names, shapes tell them apart. Of 4 matrices one of 2 ranks owns several: what it gets is in an order."""
    found = []
    for cut in (False, True):
        model = sharded(built("mxfp8"), "fsdp") if cut else built("mxfp8")
        listed: list[Any] = [*model.named_parameters()] if names else [*model.parameters()]
        turned = listed[::-1] if cut and dist.get_rank() == 1 else listed
        optimizer = MasterWeightOptimizer(torch.optim.Muon, turned, lr=0.1)
        train(model, optimizer, range(2))
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0], f"names: {names}")


def test_ranks_may_list_matrices_in_another_order() -> None:
    run_ranks_each(2, [True, False], lists_them_in_another_order)


def counts_its_writes() -> None:
    """Of weights in fp32, too, which are their own masters: a backward that needs the old values is to raise."""
    for name in ("fp32", "mxfp8"):
        model = sharded(built(name), "fsdp")
        optimizer = optimizer_of(model)
        held = [one for param in model.parameters() for one in (param, local(param))]
        before = [one._version for one in held]
        train(model, optimizer, range(1))
        assert all(one._version > old for one, old in zip(held, before, strict=True)), name


def test_a_step_counts_as_a_write_into_shards() -> None:
    run_ranks(2, counts_its_writes)


def placed_otherwise() -> None:
    models = [sharded(built(None), "fsdp") for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    for step in range(2):
        for model in models:
            gradients(model, step)
        for param in models[1].parameters():
            grad = param.grad
            assert isinstance(grad, DTensor)
            param.grad = grad.redistribute(grad.device_mesh, [Replicate()])
        for optimizer in optimizers:
            optimizer.step()
    assert_same(*(everything(*pair) for pair in zip(models, optimizers, strict=True)), "placed otherwise")


def test_gradients_that_are_placed_otherwise_are_brought_to_their_shards() -> None:
    run_ranks(2, placed_otherwise)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(case: str) -> str:
    """Of a model of experts or vectors; on one rank alone, too, which the others hear of."""
    shapes = {"experts": (4, 64, 32), "bias": (64,)}
    param: Any = nn.Parameter(torch.zeros(shapes[case]))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(param.detach(), mesh, src_data_rank=None))
    told = ""
    try:
        MasterWeightOptimizer(torch.optim.Muon, [(f"layer.{case}", param)], lr=0.1)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return told


def test_what_is_no_matrix_is_refused_by_name() -> None:
    for case, kind in (("experts", "(4, 64, 32), a stack of matrices"), ("bias", "(64,), no matrix")):
        for message in run_ranks(2, refused, case):
            assert f"ValueError: MasterWeightOptimizer(Muon): layer.{case} has shape {kind}" in message
            assert "Muon takes matrices [N, K] alone. Give it to another optimizer" in message


def runs_of_rows(made: bool) -> None:
    """Rows that a strided placement leaves in several runs on a rank, as none of torch's ways to shard does."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    places = [_StridedShard(0, split_factor=4), Replicate()]
    param = DTensor.from_local(torch.zeros(16, 4), mesh, places, run_check=False)
    kind: Any = functools.partial(torch.optim.Muon) if made else torch.optim.Muon
    MasterWeightOptimizer(kind, [("odd", nn.Parameter(param))], lr=0.1)


def test_shards_of_several_runs_of_rows_are_refused_by_name() -> None:
    for made, name in ((False, "odd"), (True, "a parameter")):
        for message in run_ranks_catching(4, runs_of_rows, made):
            assert message.startswith(f"NotImplementedError: MasterWeightOptimizer(Muon): {name} of shape (32, 4) is")
            assert "rows are several runs; shard it by" in message


def test_a_torch_that_computes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_adjustment", lambda shape, _: 1.0 + shape[0] / shape[1])
    arithmetic._same_bytes.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match=r"torch 2.* computes a step with .* otherwise than"):
            MasterWeightOptimizer(torch.optim.Muon, [nn.Parameter(torch.zeros(4, 32))], moments="float8")
        arithmetic._same_bytes.cache_clear()
        monkeypatch.undo()
        later = MasterWeightOptimizer(torch.optim.Muon, [nn.Parameter(torch.zeros(4, 32))], moments="float8")
        later.param_groups[0] |= {"nesterov": False, "initial_lr": 1.0}
        monkeypatch.setattr(arithmetic, "_adjustment", lambda shape, _: 1.0 + shape[0] / shape[1])
        with pytest.raises(NotImplementedError, match=r"'nesterov': False.* otherwise than"):
            later.step()
        # one process with states in fp32 is torch's own
        optimizer = MasterWeightOptimizer(torch.optim.Muon, [nn.Parameter(torch.zeros(4, 32))])
    finally:
        arithmetic._same_bytes.cache_clear()
    assert local(optimizer.param_groups[0]["params"][0]).shape == (4, 32)


class _SaysSo(torch.optim.Muon):
    elementwise = True


def test_a_class_of_muon_that_says_it_is_elementwise_is_not_believed() -> None:
    with pytest.raises(NotImplementedError, match=r"_SaysSo.* is not known to step each element"):
        MasterWeightOptimizer(_SaysSo, [nn.Parameter(torch.zeros(4, 32))], moments="float8")


@pytest.mark.parametrize("how", [None, "original", "match_rms_adamw", "spectral_unclamped"])
def test_steps_that_are_split_are_torchs_with_each_adjustment_that_it_has(how: str | None) -> None:
    param = nn.Parameter(torch.zeros(4, 32))
    try:
        torch.optim.Muon([param], adjust_lr_fn=how)
    except ValueError as error:
        assert how == "spectral_unclamped"  # it came with torch 2.14
        with pytest.raises(ValueError, match=re.escape(str(error))):
            MasterWeightOptimizer(torch.optim.Muon, [param], adjust_lr_fn=how, moments="float8")
        return
    MasterWeightOptimizer(torch.optim.Muon, [param], adjust_lr_fn=how, moments="float8")
