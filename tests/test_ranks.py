"""The rank pool itself: what it returns, how it reports ranks that raise, die or hang, and that the
call after a failure works. The last tests run it as pytest-xdist and torchrun would.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import _rank_worker, crash_reports, ranks
from tests.ranks import RankFailure, own_group, run_ranks, run_ranks_catching, run_ranks_each

REPO = Path(__file__).resolve().parent.parent

# The tests of dead and hung ranks would kill torchrun's own.
pool_only = pytest.mark.skipif(_rank_worker.under_torchrun(), reason="tests the pool, torchrun has none")


def _sum_of_ranks() -> tuple[int, int, float]:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    total = sum(range(world_size))
    assert run_ranks(world_size, _sum_of_ranks) == [(rank, world_size, total) for rank in range(world_size)]


def _scale(x: torch.Tensor, *, by: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x * factor + dist.get_rank() for name, factor in by.items()}


def test_tensors_go_in_and_out() -> None:
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    for rank, result in enumerate(run_ranks(2, _scale, x, by={"a": torch.tensor(2.0), "b": torch.ones(3)})):
        torch.testing.assert_close(result["a"], x * torch.tensor(2.0) + rank)
        torch.testing.assert_close(result["b"], x * torch.ones(3) + rank)


def _draw() -> torch.Tensor:
    return torch.rand(3)


def test_every_call_is_seeded_alike() -> None:
    first, again = run_ranks(2, _draw), run_ranks(2, _draw)
    torch.manual_seed(0)
    expected = torch.rand(3)
    assert all(torch.equal(drawn, expected) for drawn in first + again)


def _draw_and_sum(case: str, by: float) -> tuple[str, float, float]:
    x = torch.tensor(by * dist.get_rank())
    dist.all_reduce(x)
    return case, torch.rand(()).item(), x.item()


def test_cases_run_in_turn_and_are_seeded_alike() -> None:
    torch.manual_seed(0)
    drawn = torch.rand(()).item()
    assert run_ranks_each(2, ["a", "b"], _draw_and_sum, 3.0) == [[("a", drawn, 3.0), ("b", drawn, 3.0)]] * 2


def _raise_in_a_case(case: str, bad: str, path: Path) -> None:
    if dist.get_rank() == 1 and case == bad:
        raise ValueError("bad luck")
    (path / f"{case}{dist.get_rank()}").touch()


def test_a_failure_names_its_case(shared_tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="1 of 2 ranks failed in _raise_in_a_case") as failure:
        run_ranks_each(2, ("a", "b", "c"), _raise_in_a_case, "b", shared_tmp_path)
    assert "rank 1 of 2:" in str(failure.value)
    assert str(failure.value).endswith("ValueError: bad luck\nin the case 'b'")
    assert (shared_tmp_path / "a1").exists()
    assert not (shared_tmp_path / "c1").exists()


def test_world_size_is_checked() -> None:
    with pytest.raises(ValueError, match=r"world_size must be 1\.\.8, got 9"):
        run_ranks(9, _draw)


def _raise_on(bad: set[int]) -> str:
    if dist.get_rank() in bad:
        raise ValueError(f"bad luck on {dist.get_rank()}")
    return "fine"


def test_every_failing_rank_is_reported() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, _raise_on, {1, 2})
    message = str(failure.value)
    assert message.startswith("2 of 3 ranks failed in _raise_on")
    assert "rank 0 of 3:" not in message
    for rank in (1, 2):
        assert f"rank {rank} of 3:\nTraceback (most recent call last):\n" in message
        assert f"ValueError: bad luck on {rank}" in message
    assert 'raise ValueError(f"bad luck on {dist.get_rank()}")' in message


def test_errors_can_be_caught_per_rank() -> None:
    assert run_ranks_catching(3, _raise_on, {0, 2}) == ["ValueError: bad luck on 0", "", "ValueError: bad luck on 2"]
    assert run_ranks_catching(2, _raise_on, set()) == ["", ""]


def _raise_while_others_reduce() -> None:
    if dist.get_rank() == 0:
        raise KeyError("lost")
    dist.all_reduce(torch.ones(1))


def test_ranks_left_waiting_in_a_collective_are_freed() -> None:
    start = time.monotonic()
    errors = run_ranks_catching(2, _raise_while_others_reduce)
    assert errors[0] == "KeyError: 'lost'"
    assert "Connection closed by peer" in errors[1]
    assert time.monotonic() - start < _rank_worker.UNBLOCK_AFTER + ranks.GRACE
    assert run_ranks(2, _sum_of_ranks)[1] == (1, 2, 1.0)


def _return_what_cannot_travel() -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    (error,) = run_ranks_catching(1, _return_what_cannot_travel)
    assert "pickle" in error


def _warn(category: type[Warning]) -> None:
    warnings.warn("look out", category, stacklevel=1)


@pytest.mark.parametrize("category", [UserWarning, FutureWarning, DeprecationWarning])
def test_a_warning_is_an_error(category: type[Warning]) -> None:
    assert run_ranks_catching(1, _warn, category) == [f"{category.__name__}: look out"]


def _die(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


@pool_only
def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2: died with exit code 3"):
        run_ranks(2, _die, 1)
    with pytest.raises(RankFailure, match="rank 0 of 1: died with exit code 3"):
        run_ranks_catching(1, _die, 0)
    assert run_ranks(2, _sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]


def _crash(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "SIGABRT":
            os.abort()  # as the C library does when it finds the heap damaged
        ctypes.string_at(8)
    dist.barrier()


@pytest.mark.full
@pool_only
@pytest.mark.slow  # gdb reads the symbols of torch
@pytest.mark.parametrize("how", ["SIGABRT", "SIGSEGV"])
def test_a_rank_that_crashes_in_c_code_shows_its_stacks(how: str) -> None:
    with pytest.raises(RankFailure, match=f"rank 1 of 2: died, killed by {how}") as failure:
        run_ranks(2, _crash, 1, how)
    said = str(failure.value)
    assert "in _crash" in said
    assert re.search(rf"{how} in process \d+, in tests/test_ranks.py::test_a_rank_that_crashes.* \(call\)", said)
    pattern = crash_reports.PATTERN.read_text() if crash_reports.PATTERN.exists() else "|"
    unlimited = resource.getrlimit(resource.RLIMIT_CORE)[1] == resource.RLIM_INFINITY
    if pattern.startswith("core") and unlimited and shutil.which("gdb"):
        assert re.search(r"the stacks of C code:(\n.*)*\n#\d+ .* in (os_abort|.*string_at)", said), said
    else:
        assert "stacks of C code: " in said
    assert not list(Path.cwd().glob("core*"))
    assert len(said) < 40_000
    assert run_ranks(2, _sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_the_core_of_a_process_is_found_by_the_systems_pattern(tmp_path: Path) -> None:
    for name in ("core", "core.7", "core.python.7.x", "core.8"):
        (tmp_path / name).touch()
    find = crash_reports.find_core
    assert find("core", 9, 0.0, tmp_path) == (tmp_path / "core", "")
    assert find("core.%e.%p.%h", 7, 0.0, tmp_path) == (tmp_path / "core.python.7.x", "")
    assert find(f"{tmp_path}/core.%p", 8, 0.0, Path("/")) == (tmp_path / "core.8", "")
    assert "do not become files here" in find("|/usr/lib/systemd/systemd-coredump %P", 7, 0.0, tmp_path)[1]
    later = time.time() + 60
    assert find("core", 7, later, tmp_path)[1].startswith(f"there is no core file {tmp_path}/core (the hard limit")


def _get_stuck(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pool_only
def test_a_hung_rank_is_named_and_its_stack_shown() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2: hung for 3 s, stopped in") as failure:
        run_ranks(2, _get_stuck, 1, timeout=3)
    assert "rank 0 of 2" not in str(failure.value)
    assert "in _get_stuck" in str(failure.value)
    assert run_ranks(2, _sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]


def _raise_beside_a_stuck_rank() -> None:
    if dist.get_rank() == 0:
        raise ValueError("first")
    time.sleep(600)


@pool_only
def test_a_failure_beside_a_hung_rank_shows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 1.0)
    with pytest.raises(RankFailure) as failure:
        run_ranks_catching(2, _raise_beside_a_stuck_rank)
    assert "ValueError: first" in str(failure.value)
    assert "rank 1 of 2: still busy 1 s after another rank failed, stopped in" in str(failure.value)


def _mesh_of_a_sum(groups_before: int) -> tuple[bool, list[float]]:
    for _ in range(groups_before):  # so that the mesh's groups get other names than in the last call
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    total = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)]) + 1
    assert isinstance(total, DTensor)
    return total.device_mesh is mesh, total.full_tensor().tolist()


def test_no_mesh_with_groups_of_its_own_survives_its_call() -> None:
    for groups_before in (2, 0):
        assert run_ranks(2, _mesh_of_a_sum, groups_before) == [(True, [1.0, 2.0, 3.0, 4.0])] * 2


WAITING: list[threading.Event] = []


def _collectives_before(then: str) -> int:
    """How many collectives the default group has had before this call, which does one, `then` something else."""
    while WAITING:
        WAITING.pop().set()  # the thread of an earlier call
    assert dist.group.WORLD is not None
    before = dist.group.WORLD._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    if then == "a group of its own":
        with own_group([0, 1]):
            pass
    elif then == "a thread":
        WAITING.append(threading.Event())
        threading.Thread(target=WAITING[-1].wait, daemon=True).start()
    elif then == "a message between two of three" and dist.get_rank() < 2:
        (dist.send if dist.get_rank() == 0 else dist.recv)(torch.ones(1), 1 - dist.get_rank())
    elif then == "an error":
        raise ValueError(then)
    return before


@pool_only
@pytest.mark.parametrize(
    ("then", "after"),
    [
        ("nothing", 1),
        ("a group of its own", 0),
        ("a thread", 0),
        ("a message between two of three", 0),
        ("an error", 0),
    ],
)
def test_a_group_outlives_a_call_that_leaves_it_as_it_was(then: str, after: int) -> None:
    run_ranks_catching(3, _collectives_before, "an error")
    if then == "an error":
        assert run_ranks_catching(3, _collectives_before, then) == ["ValueError: an error"] * 3
    else:
        assert run_ranks(3, _collectives_before, then) == [0] * 3
    run_ranks(2, _collectives_before, "nothing")  # other world sizes have groups, and workers, of their own
    assert run_ranks(3, _collectives_before, "nothing") == [after] * 3


def _own_group_of_a_slow_rank() -> tuple[float, float]:
    """When this rank had made a group of its own, and when it destroyed it; rank 1 needs longer to connect."""
    new, destroy, times = dist.new_group, dist.destroy_process_group, []

    def made(*args: Any) -> Any:
        group = new(*args)
        time.sleep(0.3 * dist.get_rank())
        times.append(time.monotonic())
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", made)
        patch.setattr(dist, "destroy_process_group", lambda group: (times.append(time.monotonic()), destroy(group)))
        with own_group([0, 1]) as group:
            assert group.size() == 2
    return times[0], times[1]


@pool_only  # one machine, one clock
def test_no_rank_destroys_a_group_that_another_one_still_connects_to() -> None:
    (_, destroyed), (connected, _) = run_ranks(2, _own_group_of_a_slow_rank)
    assert destroyed > connected


def _groups_destroyed(path: Path) -> list[str]:
    """Where this file destroys a group, other than all of them at its end."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for node in calls
        if ast.unparse(node.func).endswith("destroy_process_group") and (node.args or node.keywords)
    ]


@pytest.mark.full
def test_groups_are_destroyed_in_one_place() -> None:
    """Where all ranks have met before."""
    packages = ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise", "examples", "benchmarks", "tests")
    files = [path for package in packages for path in sorted((REPO / package).rglob("*.py"))]
    found = [place for path in files for place in _groups_destroyed(path)]
    assert [place.partition(":")[0] for place in found] == ["tests/ranks.py"], found


def _mesh_of_a_sum_on_all() -> tuple[bool, bool, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    total = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) + 1
    assert isinstance(total, DTensor)
    return total.device_mesh is mesh, total.device_mesh == mesh, total.full_tensor().tolist()


@pool_only
def test_what_dtensor_knows_of_an_op_outlives_a_call_with_its_group() -> None:
    run_ranks_catching(2, _raise_on, {0, 1})
    for first in (True, False):
        assert run_ranks(2, _mesh_of_a_sum_on_all) == [(first, True, [1.0, 2.0, 3.0, 4.0])] * 2


def _train_and_save(path: Path) -> float:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return loss.item()


KEPT: list[Any] = []


def pid_after_keeping_groups(count: int) -> int:
    """Groups that somebody keeps keep their threads."""
    KEPT.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(count))
    return os.getpid()


@pool_only
def test_a_worker_with_too_many_threads_is_replaced() -> None:
    first = run_ranks(2, pid_after_keeping_groups, 0)
    assert run_ranks(2, pid_after_keeping_groups, 0) == first
    run_ranks(2, pid_after_keeping_groups, 30)
    assert not set(run_ranks(2, pid_after_keeping_groups, 0)) & set(first)


def test_fsdp_and_dcp_work_without_a_warning(shared_tmp_path: Path) -> None:
    losses = run_ranks(2, _train_and_save, shared_tmp_path)
    assert losses[0] == losses[1]
    assert (shared_tmp_path / ".metadata").exists()


PROBE = """
import os

import pytest
import torch
import torch.distributed as dist
from tests import ranks
from tests.ranks import RankFailure, run_ranks, run_ranks_catching

ranks.PRELOAD[:] = ["torch.distributed.tensor", "tests._rank_worker"]  # what these tests need: starts faster


def gather(path, big):
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (str(path), big.numel()))
    return dist.get_rank(), seen, os.getpid()


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("bad luck")


@pytest.mark.parametrize("attempt", range(3))
def test_values(shared_tmp_path, attempt):
    big = torch.zeros(3 << 20)  # more than a store takes as one value
    (rank0, seen0, pid0), (rank1, seen1, pid1) = run_ranks(2, gather, shared_tmp_path, big)
    assert (rank0, rank1) == (0, 1)
    assert pid0 != pid1
    assert seen0 == seen1 == [(str(shared_tmp_path), 3 << 20)] * 2


def test_fewer_ranks():
    ((rank, seen, _),) = run_ranks(1, gather, "", torch.zeros(1))
    assert (rank, len(seen)) == (0, 1)


@pytest.mark.xfail(strict=True, raises=RankFailure)
def test_failure():
    run_ranks(2, fail_on_one)


def test_failure_is_told():
    with pytest.raises(RankFailure, match="(?s)1 of 2 ranks failed.*rank 1 of 2:.*ValueError: bad luck"):
        run_ranks(2, fail_on_one)
    assert run_ranks_catching(2, fail_on_one) == ["", "ValueError: bad luck"]


def test_ranks_that_are_not_there():
    assert len(run_ranks(3, gather, "", torch.zeros(1))) == 3
"""


def _run_probe(tmp_path: Path, *launcher: str, options: tuple[str, ...] = ()) -> str:
    """Run PROBE in fresh pytest processes with this repository's plugins; returns their output."""
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    pytest_options = ["-c", str(REPO / "pyproject.toml"), "--rootdir", str(REPO), "-p", "tests.conftest"]
    pytest_options += ["-p", "pytest_timeout"]  # pyproject configures it
    # prepend: the probe is no part of the repository, so its directory must be importable.
    pytest_options += [
        "--import-mode=prepend",
        "-p",
        "no:cacheprovider",
        "-vrA",
        "-o",
        "faulthandler_timeout=60",
        *options,
    ]
    own = ("PYTEST_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "GROUP_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    env |= {"PYTHONPATH": str(REPO), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # only what is used: starts faster
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "pytest", *pytest_options, str(probe)],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=540,  # seconds; starting seven torch processes on a busy machine took two minutes
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.mark.full
@pool_only
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_xdist(tmp_path: Path) -> None:
    assert "6 passed, 1 xfailed" in _run_probe(tmp_path, options=("-p", "xdist", "-n", "2"))


@pytest.mark.full
@pool_only
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_torchrun(tmp_path: Path) -> None:
    # A log for each rank: in one pipe their lines would mix.
    logs = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    _run_probe(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *logs)
    outputs = [log.read_text(encoding="utf-8") for log in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert len(outputs) == 2
    for output in outputs:
        assert "5 passed, 1 skipped, 1 xfailed" in output
        assert "needs 3 ranks, torchrun gave 2" in output
