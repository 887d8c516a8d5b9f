"""States in host memory: each use of a buffer by either stream is ordered, memory is for two chunks, one wait."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qtensor as qt
from fsdp_hooks.torch_private import local_of
from qtensor.optim.compressed.host import HostStates
from tests.gpu_offline.ordering import (
    Allocated,
    Freed,
    HostWaited,
    Lent,
    Recorded,
    Waited,
    faults_of,
    waits_of_host,
)
from tests.gpu_offline.recipes import RECIPES
from tests.gpu_offline.recording import recorded
from tests.gpu_offline.training import STEPS, Run, answers, mesh_without_peers, sharded, take_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMES = ("float8_row", "float8_tensor", "mxfp8_row", "nvfp4_row")
SHARE_SCALES = ("float8_tensor", "nvfp4_row")  # between the shards of a weight, which step twice
FORMS = (("fp32", "fp32"), ("remainder", "float8"), ("remainder", "bfloat16"))
KEPT = {("fp32", "fp32"): 3, ("remainder", "float8"): 5, ("remainder", "bfloat16"): 3}  # tensors of a weight
SETTLED = "Event.synchronize in compressed/streaming.py settle"
LAYERS = 4
every_run = pytest.mark.parametrize(("name", "form"), [(name, form) for name in NAMES for form in FORMS])


@pytest.fixture(scope="module")
def mesh(_gpu_that_is_not_there: None) -> Iterator[DeviceMesh]:
    with mesh_without_peers() as made:
        yield made
    run_of.cache_clear()


@functools.cache
def run_of(mesh: DeviceMesh, name: str, form: tuple[str, str]) -> tuple[Run, int]:
    """Steps whose chunks are a weight each; the CPU reads all states behind them. And the number of the side stream."""
    masters, moments = form
    with (
        patch("tests.gpu_offline.training.LAYERS", LAYERS),
        FakeTensorMode(),
        recorded(answers) as log,
    ):
        run = Run(log)
        # without norms, whose class here is one that has no remainders
        model = sharded(mesh, RECIPES[name], "quantized", reshard=True)
        weights = [param for param in model.parameters() if isinstance(local_of(param), qt.QuantizedTensor)]
        optimizer = qt.MasterWeightOptimizer(
            torch.optim.AdamW, weights, lr=1e-3, masters=masters, moments=moments, states="host"
        )
        assert isinstance(optimizer._states, HostStates)
        optimizer._states.chunk = 1
        for number in range(STEPS + 1):
            take_step(run, number, model, optimizer)
            with run.phase(f"read {number}"):
                for param in weights:
                    for value in optimizer.state[param].values():
                        for part in parts(value):
                            part + part  # on the CPU
                            assert part.device.type == "cpu"
        (side,) = optimizer._states.lanes._sides.values()
    return run, side.number


def parts(value: Any) -> list[torch.Tensor]:
    held = local_of(value).detach()
    return list(held.parts().values()) if isinstance(held, qt.QuantizedTensor) else [held]


@every_run
def test_uses_of_memory_are_ordered(mesh: DeviceMesh, name: str, form: tuple[str, str]) -> None:
    run, side = run_of(mesh, name, form)
    assert faults_of(run.log) == []
    for number in range(STEPS + 1):
        assert side in {entry.stream for entry in run.of(f"step {number}") if isinstance(entry, Waited)}


@every_run
def test_the_cpu_waits_once_for_copies(mesh: DeviceMesh, name: str, form: tuple[str, str]) -> None:
    run, _ = run_of(mesh, name, form)
    for number in range(STEPS + 1):
        waits = waits_of_host(run.of(f"step {number}"))
        assert waits[-1] == SETTLED
        # and where resident states have it wait, too: see test_streams.py
        assert all("_local_scalar_dense" in what for what in waits[:-1])
        assert len(waits) <= 3 + (number == 0)
        assert waits_of_host(run.of(f"read {number}")) == []


@every_run
def test_the_device_has_room_for_two_chunks(mesh: DeviceMesh, name: str, form: tuple[str, str]) -> None:
    run, side = run_of(mesh, name, form)
    live: set[int] = set()
    most = 0
    for entry in run.of(f"step {STEPS}"):
        if isinstance(entry, Allocated) and entry.stream == side:
            live.add(entry.storage)
        elif isinstance(entry, Freed):
            live.discard(entry.storage)
        most = max(most, len(live))
    assert most == 2 * KEPT[form]
    assert not live


@pytest.mark.parametrize(("name", "form"), [("float8_row", FORMS[0]), ("nvfp4_row", FORMS[1])])
def test_each_wait_of_the_side_stream_and_for_it_counts(mesh: DeviceMesh, name: str, form: tuple[str, str]) -> None:
    run, side = run_of(mesh, name, form)
    # what ranks and masters agree on is read by the CPU, which orders more than streams do where it is
    log = [entry for entry in run.log if not (isinstance(entry, HostWaited) and entry.what != SETTLED)]
    found, waits, before = [], [], set(faults_of(log))
    of_side = {entry.event for entry in log if isinstance(entry, Recorded) and entry.stream == side}
    for place, entry in enumerate(log):
        if isinstance(entry, Waited) and (entry.stream == side or entry.event in of_side):
            waits.append(entry.stream == side)
            found.append(bool(set(faults_of(log[:place] + log[place + 1 :])) - before))
    # weights that no step has written come twice, and so do, each time, those that share scales
    twice = [number == 0 or name in SHARE_SCALES for number in range(STEPS + 1)]
    assert len(waits) == 2 * LAYERS * (STEPS + 1 + sum(twice))
    assert all(found_it for found_it, by_side in zip(found, waits, strict=True) if not by_side)
    by_side = iter(found_it for found_it, by_side in zip(found, waits, strict=True) if by_side)
    for looks_first in twice:
        if looks_first:  # nothing is written, and only the last wait is behind the last use of buffers
            assert [next(by_side) for _ in range(LAYERS)] == [True] * (LAYERS - 2) + [False, True]
        assert [next(by_side) for _ in range(LAYERS)] == [True] * LAYERS


def test_states_that_are_read_before_they_are_home_are_found(mesh: DeviceMesh) -> None:
    log = run_of(mesh, "mxfp8_row", FORMS[1])[0].log
    for left_out in [entry for entry in log if isinstance(entry, HostWaited) and entry.what == SETTLED]:
        faults = faults_of([entry for entry in log if entry is not left_out])
        assert faults
        assert any("copy_" in fault.first and "on the CPU" in fault.second for fault in faults)


def test_new_states_are_lent_to_the_side_stream(mesh: DeviceMesh) -> None:
    """Those of the first step are made on the compute stream, which may give their memory away."""
    run, side = run_of(mesh, "mxfp8_row", FORMS[0])
    assert faults_of([e for e in run.log if not (isinstance(e, Lent) and e.stream == side)]) != []
