"""Float8DelayedScaling: the formulas against a reference in numpy, the history's life and agreement over ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, read_manifest
from fsdp_hooks import sync_scales, unsharded
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    Float8Tensor,
    MasterWeightOptimizer,
    QuantizedTensor,
    quantize,
    quantized_model_init,
)
from qtensor.tensor.contents import write
from tests.fsdp_hooks.cases import Collectives, assert_same_bytes, batch, build, local, shard
from tests.qtensor.recipes_under_test import same_bytes, same_parts, weight
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled

F32 = np.float32


class Reference:
    """Delayed scaling as the numerics say, one number at a time; ml_dtypes rounds."""

    def __init__(self, recipe: Float8DelayedScaling) -> None:
        self.recipe, self.history, self.enc = recipe, [F32(0)] * recipe.amax_history_len, F32(1)
        self.kind, largest = {
            "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
            "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
        }[recipe.element]
        self.largest = F32(largest)

    def begin(self, x: np.ndarray) -> np.ndarray:
        self.history, self.enc = [F32(0)] * self.recipe.amax_history_len, F32(1)
        self.history[0] = np.abs(x).max()
        self._rescale()
        return self._payload(x)

    def step(self, x: np.ndarray) -> np.ndarray:
        self._rescale()
        self.history = [np.abs(x).max(), *self.history[:-1]]
        return self._payload(x)

    def _rescale(self) -> None:
        amax = max(self.history) if self.recipe.amax_compute == "max" else self.history[0]
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                self.enc = min(F32(self.largest * F32(2.0**-self.recipe.margin)) / amax, np.finfo(F32).max)

    def _payload(self, x: np.ndarray) -> np.ndarray:
        return np.clip(x * self.enc, -self.largest, self.largest).astype(self.kind).view(np.uint8)


VARIANTS = {
    "max": Float8DelayedScaling(amax_history_len=3),
    "most_recent": Float8DelayedScaling(amax_history_len=3, amax_compute="most_recent"),
    "margin": Float8DelayedScaling(amax_history_len=2, margin=2),
    "e5m2": Float8DelayedScaling(element="e5m2", amax_history_len=1),
}


def values(scale: float, seed: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * scale


def assert_equals(q: QuantizedTensor, payload: np.ndarray, reference: Reference) -> None:
    assert np.array_equal(q.payload.view(torch.uint8).numpy(), payload)
    assert q.scale.item() == F32(1) / reference.enc
    assert q.amax_history.tolist() == [float(amax) for amax in reference.history]


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_follow_the_formulas(name: str) -> None:
    recipe = VARIANTS[name]
    reference, x = Reference(recipe), values(1.0, 0)
    q = quantize(x, recipe)
    assert isinstance(q, Float8Tensor)
    assert_equals(q, reference.begin(x.numpy()), reference)
    for seed, scale in enumerate((2.0, 0.1, 0.1, 0.1, 1e-3, 1e-3, 1e4, 1.0), start=1):
        x = values(scale, seed)
        write(q, x, step=True)
        assert_equals(q, reference.step(x.numpy()), reference)
    q.copy_(x)  # no step: the history begins anew
    assert_equals(q, reference.begin(x.numpy()), reference)


def test_without_margin_the_first_value_is_scaled_as_by_current_scaling() -> None:
    x = weight()
    q, current = quantize(x, Float8DelayedScaling()), quantize(x, Float8CurrentScaling(granularity="tensor"))
    assert same_bytes(q.payload, current.payload)
    assert same_bytes(q.scale, current.scale)
    assert q.amax_history.shape == (1024,)
    assert q.amax_history[0] == x.abs().max()
    assert not q.amax_history[1:].any()


def test_a_step_clamps_what_outgrows_the_history() -> None:
    q = quantize(torch.ones(4, 8), Float8DelayedScaling(amax_history_len=2))
    write(q, torch.full((4, 8), 3.0), step=True)
    assert q.dequantize().unique().item() == 1.0
    write(q, torch.full((4, 8), 3.0), step=True)
    assert q.dequantize().unique().item() == 3.0


def test_zeros_keep_the_previous_scale() -> None:
    q = quantize(torch.full((2, 4), 8.0), Float8DelayedScaling(amax_history_len=1))
    scale = q.scale.clone()
    for _ in range(3):
        write(q, torch.zeros(2, 4), step=True)
        assert same_bytes(q.scale, scale)
        assert not q.dequantize().any()


def test_bad_values_are_named() -> None:
    for field, value, message in (
        ("element", "e3m4", "element='e3m4' is not one of 'e4m3', 'e5m2'"),
        ("amax_compute", "mean", "amax_compute='mean' is not one of 'max', 'most_recent'"),
        ("amax_history_len", 0, "amax_history_len=0 is not an integer of at least 1"),
        ("amax_history_len", True, "amax_history_len=True is not an integer of at least 1"),
        ("margin", -1, "margin=-1 is not an integer of at least 0"),
        ("margin", 10**400, "a margin of more than 126 leaves the range of fp32"),
    ):
        with pytest.raises(ValueError, match=rf"^Float8DelayedScaling: {message}$"):
            Float8DelayedScaling(**{field: value})
    refusal = (
        r'^quantized_model_init: Float8DelayedScaling\(.*\) keeps a history, which storage="high_precision" has no'
    )
    with (
        pytest.raises(ValueError, match=refusal),
        quantized_model_init(Float8DelayedScaling(), storage="high_precision"),
    ):
        pass


def test_the_history_travels_through_copies_and_pickle() -> None:
    q = quantize(values(1.0, 0), Float8DelayedScaling(amax_history_len=3))
    write(q, values(2.0, 1), step=True)
    for other in (q.clone(), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.to(torch.float16)):
        assert same_bytes(other.amax_history, q.amax_history)
        assert other.amax_history.data_ptr() != q.amax_history.data_ptr()
    other = quantize(values(5.0, 2), q.recipe)
    other.copy_(q)
    assert same_parts(other, q)


def test_a_step_without_a_learning_rate_is_a_step_of_the_history() -> None:
    q = nn.Parameter(quantize(values(1.0, 0), Float8DelayedScaling(amax_history_len=3)))
    optimizer = MasterWeightOptimizer(torch.optim.SGD, [q], lr=0.1)
    for lr in (0.1, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        q.grad = torch.ones(8, 16)
        before = q.amax_history.clone()
        optimizer.step()
        assert same_bytes(q.amax_history[1:], before[:-1])
        assert q.amax_history[0] == optimizer.state[q]["master_weight"].abs().max()


RECIPE = Float8DelayedScaling(amax_history_len=3)


def trains_like_one_process() -> None:
    net = build(RECIPE, (112, 33, 3))
    reference = copy.deepcopy(net)
    shard(net)
    optimizers = [MasterWeightOptimizer(torch.optim.AdamW, each.parameters(), lr=0.05) for each in (net, reference)]
    for step in range(4):
        x = batch(step)
        out = net(x)
        out.float().square().mean().backward()
        with torch.no_grad():
            assert_same_bytes(out, reference(x), f"step {step}: output")
        for param, its in zip(net.parameters(), reference.parameters(), strict=True):
            its.grad = param.grad.full_tensor()
        with Collectives() as comms:
            optimizers[0].step()
        assert comms.counts["allreduce_"] == (dist.get_world_size() > 1)
        optimizers[1].step()
        for param, its in zip(net.parameters(), reference.parameters(), strict=True):
            q = local(param)
            if isinstance(q, QuantizedTensor):
                assert same_bytes(q.scale, its.scale)
                assert same_bytes(q.amax_history, its.amax_history)
                assert step < 2 or bool(its.amax_history.all()), "every step is recorded"
        with unsharded(net):
            for param, its in zip(net.parameters(), reference.parameters(), strict=True):
                if isinstance(its, QuantizedTensor):
                    assert_same_bytes(param.payload, its.payload, "payload")
                    assert same_bytes(param.amax_history, its.amax_history)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert sync_scales(net) == (dist.get_world_size() > 1)


@sampled("world_size", [1, 2, 4], [4])
def test_training_and_its_history_equal_one_process(world_size: int) -> None:
    run_ranks(world_size, trains_like_one_process)


def history_stays_at_home() -> None:
    linear = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(quantize(linear.weight, RECIPE))
    fully_shard(linear)
    with Collectives() as comms:
        linear.unshard()
    assert comms.given == [32 * 64 // dist.get_world_size() + 4]


def test_the_all_gather_leaves_the_history_out() -> None:
    run_ranks(2, history_stays_at_home)


def agrees_after_writes_by_hand() -> None:
    net = build(RECIPE, (32,))
    shard(net)
    q = local(net.head.weight)
    write(q, q.dequantize(torch.float32), step=True)
    if dist.get_rank() == 1:
        with torch.no_grad():
            q.copy_(q.dequantize() * 7)
    before = q.dequantize()
    assert sync_scales(net) == 1
    held: list[Any] = [None, None]
    dist.all_gather_object(held, (q.scale.item(), q.amax_history.tolist()))
    assert held[0] == held[1]
    assert held[0][1][0] > 0
    if dist.get_rank() == 1:
        assert torch.equal(q.dequantize(), before), "the shard with the largest scale keeps its bytes"


def test_sync_scales_agrees_on_scale_and_history() -> None:
    run_ranks(2, agrees_after_writes_by_hand)


def saves(path: str) -> None:
    net = build(RECIPE, (48,))
    shard(net)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.5)
    for step in range(2):
        net(batch(step)).float().square().mean().backward()
        optimizer.step()
    dcp.save({"model": net.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner())
    if dist.get_rank() == 0:
        q = local(net.head.weight)
        torch.save([q.scale, q.amax_history], f"{path}.pt")


def loads(path: str) -> None:
    net = build(RECIPE, (48,), seed=5)
    shard(net)
    dcp.load({"model": net.state_dict()}, checkpoint_id=path, planner=QuantizedLoadPlanner())
    q = local(net.head.weight)
    scale, history = torch.load(f"{path}.pt")
    assert same_bytes(q.scale, scale)
    assert same_bytes(q.amax_history, history)
    assert bool((history > 0).all())
    entry = read_manifest(path).tensors["model.head.weight"]
    assert entry.recipe == RECIPE


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_history_is_saved_and_resharded(ranks: int, shared_tmp_path: Any) -> None:
    path = str(shared_tmp_path / "checkpoint")
    run_ranks(2, saves, path)
    run_ranks(ranks, loads, path)


def saves_histories_that_differ(path: str) -> None:
    net = build(RECIPE, (32,))
    shard(net)
    sync_scales(net)
    if dist.get_rank() == 1:
        local(net.head.weight).amax_history[2] = 9.0
    dcp.save({"model": net.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner())


def test_histories_that_differ_are_not_saved(shared_tmp_path: Any) -> None:
    for error in run_ranks_catching(2, saves_histories_that_differ, str(shared_tmp_path / "checkpoint")):
        assert "model.head.weight.amax_history" in error
