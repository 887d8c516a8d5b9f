"""Every use of memory by FSDP2's streams is ordered, and the CPU waits for the GPU only where it is said here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import qtensor as qt
from fsdp_hooks import unsharded
from fsdp_hooks.torch_private import local_of
from tests.gpu_offline.ordering import Entry, HostWaited, Recorded, Waited, copies_to_host, faults_of, waits_of_host
from tests.gpu_offline.recipes import RECIPES
from tests.gpu_offline.recording import Stream, recorded
from tests.gpu_offline.training import STEPS, TOKENS, WIDTH, Run, answers, mesh_without_peers, parts_of, sharded, train

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMES = ("float8_row", "float8_tensor", "mxfp8_row", "nvfp4_row")
SHARE_SCALES = ("float8_tensor", "nvfp4_row")  # between the shards of a weight
READ = "aten._local_scalar_dense.default in"
FOLLOWS = f"{READ} optim/masters.py changed"  # were parameters written by others?
AGREES = f"{READ} ranks/exchange.py reduce_max"  # do ranks list the same weights?
MOVES = f"{READ} optim/step_agreement.py moves"  # once: did fresh masters move?
STAGED = "Stream.synchronize in staging/stager.py _copied"
EXPERTS = 4
COMPUTE, COPY_IN, GATHER, REDUCE = range(4)  # in the order in which FSDP2 makes its streams


@pytest.fixture(scope="module")
def mesh(_gpu_that_is_not_there: None) -> Iterator[DeviceMesh]:
    with mesh_without_peers() as made:
        yield made
    run_of.cache_clear()


@functools.cache
def run_of(mesh: DeviceMesh, name: str, storage: str, reshard: bool) -> Run:
    return train(mesh, RECIPES[name], storage, reshard=reshard)


every_run = pytest.mark.parametrize(
    ("name", "storage", "reshard"),
    [
        (name, storage, reshard)
        for name in NAMES
        for storage in ("quantized", "high_precision")
        for reshard in (True, False)
    ],
)


@every_run
def test_uses_of_memory_are_ordered(mesh: DeviceMesh, name: str, storage: str, reshard: bool) -> None:
    run = run_of(mesh, name, storage, reshard)
    assert faults_of(run.log) == []
    streams = {entry.stream for entry in run.log if isinstance(entry, Waited)}
    assert streams == {COMPUTE, COPY_IN, GATHER, REDUCE}


@every_run
def test_the_cpu_waits_where_it_must(mesh: DeviceMesh, name: str, storage: str, reshard: bool) -> None:
    run = run_of(mesh, name, storage, reshard)
    agrees = [AGREES] if name in SHARE_SCALES else []
    for number in range(STEPS + 1):
        assert waits_of_host(run.of(f"forward {number}")) == []
        assert waits_of_host(run.of(f"backward {number}")) == []
        waits = [FOLLOWS, AGREES, *[MOVES] * (number == 0)] if storage == "quantized" else []
        assert waits_of_host(run.of(f"step {number}")) == waits
        assert waits_of_host(run.of(f"sync_scales {number}")) == agrees
    assert waits_of_host(run.of("staging")) == [STAGED]
    assert waits_of_host(run.of("build")) == (agrees if storage == "quantized" else [])


@every_run
def test_nothing_but_a_snapshot_goes_to_the_cpu(mesh: DeviceMesh, name: str, storage: str, reshard: bool) -> None:
    run = run_of(mesh, name, storage, reshard)
    others = [entry for phase in run.phases if phase != "staging" for entry in run.of(phase)]
    assert copies_to_host(others) == []
    assert len(copies_to_host(run.of("staging"))) == len(run.weights)


@every_run
def test_weights_and_snapshots_are_where_they_belong(mesh: DeviceMesh, name: str, storage: str, reshard: bool) -> None:
    weights = run_of(mesh, name, storage, reshard).weights
    with FakeTensorMode():
        state = sharded(mesh, RECIPES[name], storage, reshard=reshard).state_dict()
        held = {f"{fqn}.{part}": tensor for fqn, value in state.items() for part, tensor in parts_of(value).items()}
    assert list(weights) == list(held)
    for fqn, tensor in held.items():
        assert tensor.device == torch.device("cuda", 0)
        assert weights[fqn].device == torch.device("cpu")
        assert (weights[fqn].dtype, weights[fqn].shape) == (tensor.dtype, tensor.shape)


# -- without a wait ----------------------------------------------------------------------------------------------------


def without(log: list[Entry], waiting: int, waited_for: int) -> list[Entry]:
    """The log of a program in which one stream does not wait for another."""
    source = {entry.event: entry.stream for entry in log if isinstance(entry, Recorded)}
    left = [
        entry
        for entry in log
        if not (isinstance(entry, Waited) and (entry.stream, source[entry.event]) == (waiting, waited_for))
    ]
    assert len(left) < len(log)
    return left


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("streams", "accesses"),
    [
        ((COPY_IN, COMPUTE), ("on stream 0", "fsdp.all_gather_copy_in")),
        ((GATHER, COPY_IN), ("fsdp.all_gather_copy_in", "c10d._allgather_base_")),
        ((COMPUTE, GATHER), ("c10d._allgather_base_", "fsdp.split_with_sizes_copy")),
        ((REDUCE, COMPUTE), ("fsdp.chunk_cat", "c10d._reduce_scatter_base_")),
        ((COMPUTE, REDUCE), ("c10d._reduce_scatter_base_", "its memory going to bfloat16")),
    ],
    ids=["copy in", "gather", "copy out", "reduce-scatter", "gradients"],
)
def test_a_wait_that_is_left_out_is_found(
    mesh: DeviceMesh, name: str, streams: tuple[int, int], accesses: tuple[str, str]
) -> None:
    """`streams`: the one that waits and the one it waits for; `accesses`: those that a fault names."""
    faults = faults_of(without(run_of(mesh, name, "quantized", True).log, *streams))
    found = [fault for fault in faults if accesses[0] in fault.first and accesses[1] in fault.second]
    assert found, faults
    assert "[" in found[0].storage  # its dtype and shape, and who made it


def test_a_snapshot_that_is_read_before_it_is_there_is_found(mesh: DeviceMesh) -> None:
    run = run_of(mesh, "mxfp8_row", "quantized", True)
    log = [entry for entry in run.log if not (isinstance(entry, HostWaited) and entry.what == STAGED)]
    faults = faults_of(log)
    assert len(faults) == len({(copied.dtype, copied.shape) for copied in run.weights.values()})  # each text once
    assert all("copy_" in fault.first and "on the CPU" in fault.second for fault in faults)


def test_a_program_that_waits_for_no_event_is_found(mesh: DeviceMesh) -> None:
    with patch.object(Stream, "wait_event"):
        run = train(mesh, RECIPES["float8_row"], "quantized", reshard=True)
    assert any("c10d._allgather_base_" in fault.first for fault in faults_of(run.log))


# -- the recorder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False])
def test_memory_that_another_stream_reads_is_lent_or_found(mesh: DeviceMesh, tells: bool) -> None:
    with FakeTensorMode(), recorded() as log:
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if tells:
            x.record_stream(side)
        del x
        torch.ones(4, device="cuda")
    faults = faults_of(log)
    assert bool(faults) is not tells
    assert all("aten.add" in fault.first and "aten.ones" in fault.second for fault in faults)
    assert y.device.type == "cuda"


def test_memory_that_is_resized_away_counts_as_freed(mesh: DeviceMesh) -> None:
    with FakeTensorMode(), recorded() as log:
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        x.untyped_storage().resize_(0)
        torch.ones(4, device="cuda")
    assert [("aten.add" in fault.first, "aten.ones" in fault.second) for fault in faults_of(log)] == [(True, True)]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_to_the_cpu_is_waited_for(mesh: DeviceMesh, non_blocking: bool) -> None:
    with FakeTensorMode(), recorded() as log:
        there = torch.ones(4, device="cuda").to("cpu", non_blocking=non_blocking)
        there.sum()
    assert len(copies_to_host(log)) == 1
    assert len(waits_of_host(log)) == (not non_blocking)
    assert len(faults_of(log)) == non_blocking  # nobody waits for it


def test_a_read_of_a_value_is_a_wait(mesh: DeviceMesh) -> None:
    with FakeTensorMode(), recorded() as log:
        values: Any = qt.quantize(torch.ones(32, 64, device="cuda"), RECIPES["mxfp8_row"]).dequantize()[0, :3].tolist()
    assert values == [True, True, True]
    assert [READ in what for what in waits_of_host(log)] == [True]


def test_each_part_of_a_weight_that_is_moved_is_waited_for(mesh: DeviceMesh) -> None:
    with FakeTensorMode(), recorded() as log:
        q = qt.quantize(torch.empty(32, 64, device="cuda"), RECIPES["nvfp4_row"])
        moved = q.to("cpu")
    assert moved.payload.device.type == "cpu"
    assert len(copies_to_host(log)) == len(waits_of_host(log)) == len(q.parts())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", NAMES)
def test_gathering_a_module_by_hand_waits_twice(mesh: DeviceMesh, name: str) -> None:
    """Twice as it ends: for the error about writes, and before resharding. Once for all parameters, not for each."""
    with FakeTensorMode(), recorded(answers) as log:
        model = sharded(mesh, RECIPES[name], "quantized", reshard=True)
        begin = len(log)
        with unsharded(model[0]):
            pass
    assert waits_of_host(log[begin:]) == [f"{READ} fsdp_hooks/unshard.py _same"] * 2
    assert faults_of(log) == []


def test_masters_of_preserved_initial_values_are_followed_with_one_wait(mesh: DeviceMesh) -> None:
    recipe = RECIPES["nvfp4_row"]
    with FakeTensorMode(), recorded() as log:
        with torch.device("cuda"), qt.quantized_model_init(recipe, preserve_high_precision_init_val=True):
            linear = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        optimizer = qt.MasterWeightOptimizer(torch.optim.AdamW, linear.parameters(), lr=1e-3)
        linear(torch.empty(8, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
        begin = len(log)
        optimizer.step()
    assert waits_of_host(log[begin:]) == [FOLLOWS, MOVES]


# -- products of quantized inputs --------------------------------------------------------------------------------------

LOW_PRECISION = {
    "float8_row": qt.Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "float8_tensor": qt.Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "mxfp8_row": qt.MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
}


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_a_weight_turned_for_backward_is_ordered_and_costs_no_wait(mesh: DeviceMesh, name: str) -> None:
    """FSDP frees it with the gathered bytes, on the stream of its products."""
    run = train(mesh, LOW_PRECISION[name], "quantized", reshard=True)
    assert faults_of(run.log) == []
    for number in range(STEPS):
        for phase in ("forward", "backward"):
            assert waits_of_host(run.of(f"{phase} {number}")) == []


class Stack(nn.Module):
    """Experts [E, N, K] that FSDP2 cuts along their rows."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(qt.quantize(torch.empty(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16), recipe))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.bmm(x, self.weight.transpose(1, 2)))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_experts_cut_along_their_rows_are_ordered_and_cost_no_wait(mesh: DeviceMesh, name: str, reshard: bool) -> None:
    """Their pieces are joined and put in order on FSDP2's own streams, the next layer's while one computes."""
    with FakeTensorMode(), recorded(answers) as log:
        with torch.device("meta"):
            model: Any = nn.Sequential(*[Stack(RECIPES[name]) for _ in range(3)])
        options = {"mesh": mesh, "reshard_after_forward": reshard, "shard_placement_fn": lambda _: Shard(1)}
        for each in model:
            fully_shard(each, **options)
        fully_shard(model, **options).to_empty(device="cuda")
        for before, each in itertools.pairwise(model):
            before.set_modules_to_forward_prefetch([each])
        begin = len(log)
        for _ in range(2):
            x = torch.empty(EXPERTS, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
            with torch.no_grad():  # a step, of another kind for each part
                for param in model.parameters():
                    for part in local_of(param).parts().values():
                        part.copy_(part.clone())
                    param.grad = None
    assert faults_of(log) == []
    assert waits_of_host(log[begin:]) == []
    assert {entry.stream for entry in log if isinstance(entry, Waited)} == {COMPUTE, COPY_IN, GATHER, REDUCE}
    # the copy in reads what the step has written; without the wait for it that is found
    assert faults_of(without(log, COPY_IN, COMPUTE))


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_a_weight_turned_for_backward_is_freed_as_fsdp_reshards(mesh: DeviceMesh, name: str) -> None:
    tokens = TOKENS, WIDTH
    with FakeTensorMode(), recorded(answers):
        model = sharded(mesh, LOW_PRECISION[name], "quantized", reshard=True)
        whole: list[Any] = []
        for each in model:
            each[1].register_forward_pre_hook(lambda linear, args: whole.append(linear.weight))
        for _ in range(2):
            model(torch.empty(tokens, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        kept = [held for weight in whole for held in weight._turned.held]
        made = [part for weight in whole for part in weight._turned._made.values()]
        assert len(made) == len(kept) == 2 * len(whole)
        assert {each.untyped_storage().nbytes() for each in (*kept, *made)} == {0}
