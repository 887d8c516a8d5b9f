"""Runs of the command: the bytes of the Python API on any number of ranks, resumed, finished; exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled

pytest.importorskip("transformers")
pytest.importorskip("yaml")

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import layerwise.command.main
from dcp_adapters import digest, export_hf, read_manifest
from layerwise import AWQ, GPTQ, calibrate
from layerwise.command.record import NAME
from qtensor import NVFP4BlockScaling
from tests.layerwise.command.runs import (
    BATCH,
    LENGTH,
    SAMPLES,
    command,
    environment,
    files_of,
    same_files,
    save_model,
    write_config,
)
from tests.ranks import agreed, run_ranks

TARGETS = 2 * 7


def ran(config: Path) -> str:
    """What a run that was done told."""
    status, told = command(config)
    assert status == 0, told
    return told


def command_in_ranks(directory: Path, config: Path) -> dict[str, bytes]:
    """A run of all ranks: what it exported."""
    ran(config)
    return files_of(directory / f"{config.stem}-out")


def made_in_rank_0(directory: Path) -> None:
    if dist.get_rank() == 0:
        save_model(directory)
        for name in ("one", "two", "two-disk"):
            changed: dict[str, Any] = {"weights_on": "disk"} if name.endswith("disk") else {}
            write_config(directory, name, model=changed)
    dist.barrier()


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_the_bytes_are_those_of_the_python_api(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    told = ran(write_config(tmp_path, output={"checkpoint": str(tmp_path / "dcp")}))
    assert f"{TARGETS} weights in 2 layers to NVFP4BlockScaling(blocks='row') by GPTQ(damping=None" in told
    assert f"on {SAMPLES} samples of {LENGTH} tokens, 1 rank; " in told

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    blocks = torch.from_numpy(np.load(tmp_path / "ids.npy")).view(-1, LENGTH)
    rows = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))[:SAMPLES]]
    result = calibrate(
        model,
        [{"input_ids": batch, "use_cache": False} for batch in rows.split(BATCH)],
        recipe=NVFP4BlockScaling(),
        algorithm=GPTQ(),
        exclude=["lm_head"],
        inputs="static",
    )
    export_hf(result, tmp_path / "api", config=directory, rest=directory)
    assert same_files([tmp_path / "config-out", tmp_path / "api"])
    assert len(read_manifest(tmp_path / "dcp").tensors) == TARGETS
    assert digest(tmp_path / "dcp") == digest({**model.state_dict(), **result.state_dict()})

    ran(write_config(tmp_path, "disk", model={"weights_on": "disk"}))
    assert same_files([tmp_path / "config-out", tmp_path / "disk-out"])


@pytest.mark.usefixtures("alone")
def test_algorithms_that_fold_write_the_norms_that_they_changed(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    options = {"name": "AWQ", "alpha_step": 0.25, "clip_step": 0.25}
    ran(write_config(tmp_path, algorithm=options, data={"batch_size": 1}, output={"layout": "modelopt"}))
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    blocks = torch.from_numpy(np.load(tmp_path / "ids.npy")).view(-1, LENGTH)
    rows = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))[:SAMPLES]]
    result = calibrate(
        model,
        [{"input_ids": row[None], "use_cache": False} for row in rows],
        recipe=NVFP4BlockScaling(),
        algorithm=AWQ(alpha_step=0.25, clip_step=0.25),
        exclude=["lm_head"],
        inputs="static",
    )
    assert any("norm" in name for name in result.state_dict())
    export_hf(result, tmp_path / "api", config=directory, rest=directory, layout="modelopt")
    assert same_files([tmp_path / "config-out", tmp_path / "api"])


@pytest.mark.usefixtures("alone")
@sampled(("ranks", "name"), [(1, "one"), (2, "two"), (2, "two-disk")], [(2, "two-disk")])
def test_the_bytes_are_the_same_on_any_number_of_ranks(
    ranks: int, name: str, tmp_path: Path, shared_tmp_path: Path
) -> None:
    save_model(tmp_path)
    ran(write_config(tmp_path, "alone"))
    expected = files_of(tmp_path / "alone-out")
    run_ranks(2, made_in_rank_0, shared_tmp_path)
    for found in run_ranks(ranks, command_in_ranks, shared_tmp_path, shared_tmp_path / f"{name}.yaml"):
        assert found == expected, name


# -- resumed, finished -------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import layerwise
from layerwise.command.main import main

class GPTQ(layerwise.GPTQ):
    layers = []
    def decide(self, group, recipe):
        self.layers.append(group.linears[0].name.split(".")[2])
        if self.layers[-1] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decide(group, recipe)

main(sys.argv[1:], algorithms={"GPTQ": GPTQ})
"""


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_a_run_that_is_killed_goes_on_and_then_is_finished(tmp_path: Path, shared_tmp_path: Path) -> None:
    if agreed(value=str(tmp_path)) != str(tmp_path):
        pytest.skip("kills a process of its own: rank 0 runs it")
    save_model(tmp_path)
    config, whole = write_config(tmp_path), write_config(tmp_path, "whole")
    killed = subprocess.run([sys.executable, "-c", KILLED, config], env=environment(), capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "config-out").exists()

    ran(config)
    assert json.loads((tmp_path / "config.json").read_text())["resumed"] == [0]
    ran(whole)
    assert json.loads((tmp_path / "whole.json").read_text())["resumed"] == []
    assert same_files([tmp_path / "config-out", tmp_path / "whole-out"])

    again = ran(config)
    assert "finished already, by an earlier run of this config: " in again
    assert str(tmp_path / "config-out") in again
    assert "weights in" not in again


@pytest.mark.usefixtures("alone")
def test_what_is_missing_of_a_finished_run_is_made_again(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = write_config(tmp_path, algorithm="Max", data=None, calibration={"inputs": "dynamic"})
    ran(config)
    exported = files_of(tmp_path / "config-out")
    (tmp_path / "config.json").unlink()
    stamp = (tmp_path / "config-out" / "model.safetensors").stat().st_mtime_ns
    assert "finished already" not in ran(config)
    assert json.loads((tmp_path / "config.json").read_text())["resumed"] == [0, 1]
    assert (tmp_path / "config-out" / "model.safetensors").stat().st_mtime_ns == stamp, "it was complete"

    (tmp_path / "config-out").rename(tmp_path / "moved")
    assert "finished already" not in ran(config)
    assert files_of(tmp_path / "config-out") == exported

    record = tmp_path / "config-state" / NAME  # killed between the last output and the note of it
    record.write_text(record.read_text().replace('"finished"', '"writing"'))
    assert "finished already" not in ran(config)
    assert "finished already" in ran(config)


@pytest.mark.usefixtures("alone")
def test_finished_means_of_these_very_files(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = write_config(tmp_path, algorithm="Max")
    ran(config)
    os.utime(tmp_path / "ids.npy", ns=(1, 1))
    status, told = command(config)
    assert status == 2
    assert f"output.path: {tmp_path / 'config-out'} exists already; choose another name" in told
    assert f"(an earlier run of this config has read another {tmp_path / 'ids.npy'})" in told
    other = write_config(tmp_path, calibration={"checkpoint_dir": str(tmp_path / "other")})
    assert command(other)[0] == 2


# -- exit statuses -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_check_reads_no_weight_and_writes_nothing(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = write_config(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    status, told = command(config, "--check")
    assert (status, f"{TARGETS} weights in 2 layers" in told) == (0, True)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("alone")
def test_a_config_that_is_wrong_is_status_2(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\nrecipe: nvfp4\nalgorithm: Max\noutput: {pth: o}\n")
    status, told = command(path)
    keys = "path, layout, like, max_shard_size, checkpoint, report"
    assert status == 2
    assert told == (
        f"python -m layerwise: error: {path}: output.pth: unknown key; did you mean 'path'? known keys are {keys}\n"
    )
    path.write_text("model: {path: m}\nrecipe: nvfp4\nmodel: {}\n")
    assert command(path) == (
        2,
        f"python -m layerwise: error: {path}: line 3: the key 'model' stands twice, first in line 1\n",
    )
    assert command(tmp_path / "gone.yaml")[0] == 2
    assert "it cannot be read: " in command(tmp_path / "gone.yaml")[1]
    path.write_bytes(b"\xff")
    assert "it cannot be read: " in command(path)[1]


def test_bad_usage_is_status_2() -> None:
    for arguments in ((), ("--exampel",), ("a.yaml", "--example"), ("a.yaml", "b.yaml")):
        status, told = command(*arguments)
        assert status == 2
        assert told.endswith("(see python -m layerwise --help)\n")


def refused_in_ranks(directory: Path) -> list[tuple[int, str]]:
    """What each rank is told of configs that rank 0 alone, or each rank, finds wrong."""
    if dist.get_rank() == 0:
        save_model(directory)
        write_config(directory, "samples", data={"samples": 21})
        write_config(directory, "layers", calibration={"layers": ["x"]})
        (directory / "yaml.yaml").write_text("a: 1\na: 2\n")
    dist.barrier()
    return [command(directory / f"{name}.yaml") for name in ("samples", "layers", "yaml")]


def test_all_ranks_refuse_alike_and_rank_0_tells(shared_tmp_path: Path) -> None:
    first, second = run_ranks(2, refused_in_ranks, shared_tmp_path)
    assert [status for status, _ in first + second] == [2] * 6
    told = ["data.samples: ", "calibration.layers: 'x' matches no module", "line 2: the key 'a' stands twice"]
    assert all(words in text for words, (_, text) in zip(told, first, strict=True))
    assert all(text.count("error: ") == 1 for _, text in first)
    assert [text for _, text in second] == [""] * 3


class Failing(GPTQ):
    """Fails in the second layer, in the way that `error` says."""

    error: Any = RuntimeError("no room")

    def decide(self, group: Any, recipe: Any) -> Any:
        if ".1." in group.linears[0].name:
            raise self.error
        return super().decide(group, recipe)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("no room"), "no room"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_run_that_fails_is_status_1(error: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "error", error)
    save_model(tmp_path)
    config = write_config(tmp_path, algorithm="Failing")
    status, text = command(config, algorithms={"Failing": Failing})
    assert status == 1
    assert told in text.splitlines()[-1]
    assert not (tmp_path / "config-out").exists()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_dir_of_another_calibration_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    ran(write_config(tmp_path, algorithm="Max"))
    other = write_config(
        tmp_path, "other", algorithm="Mse", calibration={"checkpoint_dir": str(tmp_path / "config-state")}
    )
    status, told = command(other)
    assert status == 2
    assert 'holds a calibration of another algorithm: type was "Max", now "Mse"' in told


def done_later_in_rank_1(directory: Path) -> bool:
    """Whether rank 1 was done when this rank's command returned, in a run in which no rank waits for another one."""
    arrived = directory / "arrived"

    def run(*_: object) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.3)
            arrived.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise.command.main, "_run", run)
        ran(directory / "any.yaml")
    return arrived.exists()


def test_no_rank_leaves_a_group_that_another_one_may_still_connect_to(shared_tmp_path: Path) -> None:
    assert run_ranks(2, done_later_in_rank_1, shared_tmp_path) == [True, True]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("alone")
def test_torchrun_and_the_module_itself(tmp_path: Path) -> None:
    """Two ranks that succeed, two that fail, and a process without ranks, which has a status of its own."""
    if agreed(value=str(tmp_path)) != str(tmp_path):
        pytest.skip("launches its own ranks: rank 0 runs it")
    save_model(tmp_path)
    config = write_config(tmp_path, algorithm="Max", data=None, calibration={"inputs": "dynamic"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "layerwise"]

    def told(*arguments: object, status: int) -> str:
        done = subprocess.run([*map(str, arguments)], env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done.stderr

    assert ", 2 ranks; " in told(*torchrun, config, status=0)
    assert "finished already" in ran(config)
    bad = write_config(tmp_path, "bad", algorithm="Maxx")
    wrong = "error: " + str(bad) + ": algorithm.name: unknown algorithm 'Maxx'; did you mean 'Max'?"
    assert told(*torchrun, bad, status=1).count(wrong) == 1, "rank 0 tells, and is not stopped before it has"
    assert wrong in told(sys.executable, "-m", "layerwise", bad, status=2)
