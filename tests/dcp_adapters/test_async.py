"""async_save writes the values at the moment of the call.

Optimizer states travel with the weights, and training goes on bit for bit.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_adapters import QuantizedSavePlanner, expand
from dcp_adapters.records.expand import quantized_local
from qtensor import MasterWeightOptimizer, QuantizedTensor, high_precision_init_val, quantized_model_init
from qtensor.tensor.contents import initial_value
from tests.dcp_adapters.cases import (
    RECIPES,
    assert_holds,
    assert_piece,
    bits,
    held,
    leaves,
    load,
    local_of,
    models,
    payload_bytes,
    reference,
    save,
)
from tests.ranks import run_ranks
from tests.recipes import HANDS
from tests.sampling import halves, sampled
from tests.torch_versions.release import RELEASE

WAYS = ("default", "blocking")


def options_of(way: str, path: Path) -> dict[str, Any]:
    where = {"checkpoint_id": path} if way == "default" else {"storage_writer": dcp.FileSystemWriter(path)}
    return {**where, "planner": QuantizedSavePlanner()}


def overwrite(state_dict: Any, byte: int) -> None:
    """Every byte of every tensor, in place, as a training step would."""
    for _, value in leaves(expand(state_dict)):
        if isinstance(value, Tensor):
            local_of(value).view(-1).view(torch.uint8).fill_(byte)


def snapshot(base: Path) -> None:
    upload = dist.new_group(backend="gloo")
    for way in WAYS:
        live = models(0)
        refuse = AssertionError("a save dequantized something")
        with patch.object(QuantizedTensor, "dequantize", side_effect=refuse):
            future = dcp.async_save(live, **options_of(way, base / way), process_group=upload)
            overwrite(live, 0xA5)
            for _ in range(20):  # training uses the default group meanwhile
                dist.all_reduce(torch.ones(100))
            future.result()
        target = models(1)
        load(target, base / way)
        assert_holds(target, reference(0))


@sampled("world", [1, 3], [3])
def test_the_snapshot_is_of_the_call_although_training_goes_on(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, snapshot, shared_tmp_path)


def two_in_flight(base: Path) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    live = models(0)
    futures = []
    for i, group in enumerate(groups):
        source = models(10 + i)
        for (_, value), (_, new) in zip(leaves(expand(live)), leaves(expand(source)), strict=True):
            local_of(value).copy_(local_of(new))
        futures.append(dcp.async_save(live, **options_of(WAYS[i], base / str(i)), process_group=group))
    for future in futures:
        future.result()
    for i in range(2):
        target = models(1)
        load(target, base / str(i))
        assert_holds(target, reference(10 + i))


def test_two_saves_in_sequence_each_hold_their_own_values(shared_tmp_path: Path) -> None:
    run_ranks(2, two_in_flight, shared_tmp_path)


SERVES_ONE_SAVE = RELEASE < (2, 13)  # torch's stager: it closes itself after each, and then knows no type any more


def one_stager_twice(base: Path) -> None:
    upload = dist.new_group(backend="gloo")
    stager = DefaultStager(StagingOptions(False, False, False, False))
    live = models(0)
    for i in range(2):
        if i and SERVES_ONE_SAVE:
            with pytest.raises(KeyError):
                stager.stage({"plain": [1]})
            stager = DefaultStager(StagingOptions(False, False, False, False))
        future = dcp.async_save(
            live, checkpoint_id=base / str(i), planner=QuantizedSavePlanner(), async_stager=stager, process_group=upload
        )
        future.result()
        overwrite(live, 0x30 + i)
    stager.close()
    target = models(1)
    load(target, base / "0")
    assert_holds(target, reference(0))
    overwritten = models(1)
    overwrite(overwritten, 0x30)
    load(target, base / "1")
    assert held(target) == held(overwritten)


def test_one_stager_serves_two_saves(shared_tmp_path: Path) -> None:
    run_ranks(2, one_stager_twice, shared_tmp_path)


def staged_copies(base: Path) -> None:
    live = models(0)
    stagers = {
        "default": DefaultStager(StagingOptions(False, False, False, False)),
        "blocking": dcp.FileSystemWriter(base),
    }
    for way, stager in stagers.items():
        staged = stager.stage(live)
        assert held(staged) == held(live)
        for (name, copy), (_, original) in zip(leaves(staged), leaves(live), strict=True):
            q, source = quantized_local(copy), quantized_local(original)
            if source is None:
                continue
            assert type(q) is type(source), (way, name)
            assert q.recipe == source.recipe
            parts = q.parts()
            for part, tensor in parts.items():
                assert type(tensor) is Tensor
                assert tensor.device.type == "cpu"
                assert tensor.untyped_storage().data_ptr() != source.parts()[part].untyped_storage().data_ptr()
            stored = sum(
                {
                    tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in parts.values()
                }.values()
            )
            rows = source._sharding.padded_rows or source.shape[0]
            padding = (
                sum(part[0].numel() * part.itemsize for part in parts.values() if part.ndim)
                if rows > source.shape[0] > 0
                else 0
            )
            assert stored <= payload_bytes(source) + padding, (way, name)
            assert initial_value(q) is None


def test_staged_copies_are_cpu_parts_of_the_payload_bytes(shared_tmp_path: Path) -> None:
    run_ranks(2, staged_copies, shared_tmp_path)


def staged_without_initial_values(base: Path) -> None:
    with quantized_model_init(RECIPES["mxfp8"], preserve_high_precision_init_val=True):
        net = fully_shard(nn.Linear(64, 96, bias=False, dtype=torch.bfloat16))
    live = {"w": net.state_dict()["weight"]}
    stagers = {
        "default": DefaultStager(StagingOptions(False, False, False, False)),
        "blocking": dcp.FileSystemWriter(base),
    }
    for way, stager in stagers.items():
        staged = stager.stage(live)
        assert held(staged) == held(live), way
        assert initial_value(quantized_local(staged["w"])) is None, way
    assert high_precision_init_val(net.weight) is not None


def test_staging_leaves_preserved_initial_values_behind(shared_tmp_path: Path) -> None:
    run_ranks(2, staged_without_initial_values, shared_tmp_path)


# -- with an optimizer -------------------------------------------------------------------------------------------------


class Training:
    """A small sharded model in training; the batch of a step is the same on every rank and world size."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        with quantized_model_init(RECIPES[name]):
            self.net = nn.Sequential(
                nn.Linear(64, 96, dtype=torch.bfloat16), nn.LayerNorm(96), nn.Linear(96, 48, dtype=torch.bfloat16)
            )
        self.net = self.net.to(torch.bfloat16)
        for layer in self.net:
            fully_shard(layer)
        fully_shard(self.net)
        self.optimizer = MasterWeightOptimizer(torch.optim.AdamW, self.net.parameters(), lr=0.05)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            self.net(x).float().square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optim": optimizer}

    def resume(self, path: Path) -> None:
        state = self.state()
        load(state, path)
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def whole(state: Any) -> dict[str, Any]:
    """Every tensor of a state dict as (shape, bytes) of the whole tensor; other leaves as they are."""
    found = {}
    for name, value in leaves(expand(state)):
        if isinstance(value, DTensor):
            full = value.full_tensor() if value.element_size() > 1 else bytewise(value)  # gloo knows no float8
            found[name] = (tuple(value.shape), bits(full))
        else:
            found[name] = (tuple(value.shape), bits(value)) if isinstance(value, Tensor) else value
    return found


def bytewise(value: DTensor) -> Tensor:
    as_bytes = DTensor.from_local(
        value.to_local().view(torch.uint8),
        value.device_mesh,
        value.placements,
        shape=value.shape,
        stride=value.stride(),
    )
    return as_bytes.full_tensor()


def interrupted_and_not(base: Path, names: tuple[str, ...]) -> dict[str, Any]:
    saved = {}
    for name in names:
        straight = Training(name, 0)
        straight.train(0, 2)
        state = straight.state()
        save(state, base / name)
        saved[name] = whole(state)
        straight.train(2, 4)

        resumed = Training(name, 1)
        before = whole(resumed.net.state_dict())
        resumed.state()  # initialises the optimizer's state by a step with lr=0
        assert whole(resumed.net.state_dict()) == before, "asking for the optimizer's state changed weights"
        resumed.resume(base / name)
        assert whole(resumed.state()) == saved[name]
        resumed.train(2, 4)
        assert whole(resumed.state()) == whole(straight.state())
        assert whole(resumed.state()) != saved[name]
    return saved


def resumed_elsewhere(base: Path, saved: dict[str, Any]) -> dict[str, Any]:
    for name, expected in saved.items():
        training = Training(name, 1)
        training.resume(base / name)
        found = whole(training.state())
        assert any(key.endswith("master_weight") for key in found)
        assert found == expected
        training.train(2, 3)
    return {}


# In `make test` one of each hand, and so one on each number of ranks. mxfp8_square would need 48 rows.
@pytest.mark.slow
@halves("names", [name for name in RECIPES if name != "mxfp8_square"], ["float8_tensor", "nvfp4", "mxfp4"])
def test_training_resumes_bit_for_bit_and_states_move_to_other_world_sizes(
    names: tuple[str, ...], shared_tmp_path: Path
) -> None:
    saved = run_ranks(2, interrupted_and_not, shared_tmp_path, names)
    assert saved[0] == saved[1]
    for world, hand in zip((1, 3, 4), HANDS, strict=True):  # each state on one other number of ranks
        some = {name: state for name, state in saved[0].items() if name in hand}
        run_ranks(world, resumed_elsewhere, shared_tmp_path, some)


def async_with_optimizer(base: Path) -> None:
    upload = dist.new_group(backend="gloo")
    training = Training("nvfp4", 0)
    training.train(0, 2)
    expected = whole(training.state())
    future = dcp.async_save(training.state(), checkpoint_id=base, planner=QuantizedSavePlanner(), process_group=upload)
    training.train(2, 4)
    future.result()
    other = Training("nvfp4", 1)
    other.resume(base)
    assert whole(other.state()) == expected
    assert whole(training.state()) != expected


def test_an_async_save_of_model_and_optimizer_is_a_snapshot(shared_tmp_path: Path) -> None:
    run_ranks(2, async_with_optimizer, shared_tmp_path)


def test_assert_piece_sees_a_wrong_byte() -> None:
    whole_tensor = torch.arange(8, dtype=torch.uint8)
    wrong = whole_tensor.clone()
    wrong[3] = 9
    with pytest.raises(AssertionError, match="x: other bytes"):
        assert_piece(wrong, whole_tensor, "x")


class Slow(dcp.FileSystemWriter):
    """Begins to write when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(plan, planner)


def one_planner_for_two(base: Path, *, caching: bool) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    planner = QuantizedSavePlanner(enable_plan_caching=caching)
    if caching:
        dcp.save(models(0), checkpoint_id=base / "warm", planner=planner)
    slow = Slow(base / "0")
    first = dcp.async_save(models(0), storage_writer=slow, planner=planner, process_group=groups[0])
    while not slow.path.exists() or not planner.current:  # until it is planned
        time.sleep(0.01)
    second = dcp.async_save(models(1), checkpoint_id=base / "1", planner=planner, process_group=groups[1])
    second.result()
    slow.go.set()
    with pytest.raises(BaseException, match="its planner has been given to another save while this one was being"):
        first.result()
    target = models(9)
    load(target, base / "1")
    assert_holds(target, reference(1))
    assert not (base / "0" / ".metadata").exists()


@pytest.mark.parametrize("caching", [False, True])
def test_one_planner_for_two_saves_at_once_fails_the_first(*, caching: bool, shared_tmp_path: Path) -> None:
    run_ranks(1, one_planner_for_two, shared_tmp_path, caching=caching)
