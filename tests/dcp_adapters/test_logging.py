"""What `dcp_adapters` logs: a few lines for operators once they are asked for, and nothing by default."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_adapters import QuantizedSavePlanner, QuantizedStager, SafeFileSystemReader, export_hf, write_delta
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.save import save_log
from dcp_adapters.save.steps import plan_cache
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, load, save, values

LOGGER = logging.getLogger("dcp_adapters")


def state(recipe: str = "mxfp8", seed: int = 0) -> dict[str, Any]:
    return {"w": quantize(values((64, 64), seed), RECIPES[recipe]), "b": torch.ones(64), "step": seed}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name.startswith("dcp_adapters.")]
    caplog.clear()
    return found


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="dcp_adapters")
    return caplog


def test_a_save_tells_its_size_and_its_time(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    save(state(), tmp_path)
    planned, written = lines(told)
    # the parts of w, b, the manifest and the table of checksums
    assert planned.startswith(f"save to {tmp_path}: this rank writes 5 tensors of ")
    assert " bytes and 1 other entries; planned in " in planned
    assert written.startswith(f"save to {tmp_path}: 1 files are written, ")


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_save_tells_of_an_older_checkpoint_and_of_kept_plans(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    plan_cache._locals.clear()
    for seed in range(2):
        save(state(seed=seed), tmp_path, enable_plan_caching=True)
        found = lines(told)
        assert any("no earlier plan is the same, so all 4 items are sent" in line for line in found) == (seed == 0)
        assert any("an earlier plan is the same, so none of 4 items is sent" in line for line in found) == (seed == 1)
        assert any("its checkpoint stays until the new one is complete" in line for line in found) == (seed == 1)
    save(state(), tmp_path, overwrite="delete_first")
    assert any("held a checkpoint, which has been removed before" in line for line in lines(told))


def test_a_load_tells_what_it_reads_and_converts(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    save(state(), tmp_path)
    lines(told)
    load(state("nvfp4", 1), None, reader=SafeFileSystemReader(tmp_path), on_mismatch="convert")
    found = lines(told)
    assert found[0].startswith(
        "load: this rank reads 4 pieces for 2 tensors, of which 1 are converted; compared and planned in "
    )
    assert found[1].startswith("load: w is converted from MXFP8BlockScaling(")
    assert " to NVFP4BlockScaling(" in found[1]
    assert found[-2].startswith("reading ")
    assert found[-2].endswith(f" pieces from {tmp_path}: begins")
    assert f" pieces from {tmp_path}: ended after " in found[-1]


def test_deltas_tell_where_they_begin_and_end(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for seed in range(2):
        save(state(seed=seed), tmp_path / str(seed))
    save(state(seed=1), tmp_path / "delta", delta_to=tmp_path / "0")
    lines(told)
    write_delta(tmp_path / "0", tmp_path / "1", tmp_path / "file")
    found = [line for line in lines(told) if line.startswith("write_delta from ")]
    assert [line.partition(": ")[2].split()[0] for line in found] == ["begins", "ended"]
    assert all(line.endswith(" bytes)") for line in found)
    load(state(seed=2), tmp_path / "delta")
    rebuilt = f"{tmp_path / 'delta'} is a delta: its chunks are rebuilt from {tmp_path / '0'}"
    assert rebuilt in lines(told)


def test_an_export_tells_where_it_begins_and_ends(told: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    export_hf({"model.w.weight": state()["w"]}, tmp_path / "out", layout="compressed-tensors", no_dist=True)
    begins, ended = (line for line in lines(told) if line.startswith(f"export_hf to {tmp_path / 'out'}: "))
    assert "begins (" in begins
    assert "ended after " in ended


def test_work_that_fails_is_told(told: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with log_work(save_log.LOG, "copying %s", "a"):
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail()
    begins, failed = lines(told)
    assert begins == "copying a: begins"
    assert failed.startswith("copying a: failed after ")
    assert failed.endswith(" s: OSError")


def test_nothing_is_told_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert (LOGGER.level, LOGGER.handlers) == (logging.NOTSET, [])
    planner = QuantizedSavePlanner()
    planner.set_up_planner(state())
    assert not any(isinstance(step, save_log.SaveLog) for step in planner.steps)
    assert lines(caplog) == []


SILENT = """
    import sys, warnings
    import torch, torch.distributed.checkpoint as dcp
    from dcp_adapters import AtomicFileSystemWriter, QuantizedLoadPlanner, QuantizedSavePlanner
    from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize
    warnings.simplefilter("ignore")  # of torch, which says that there is one process
    path = sys.argv[1]
    for _ in range(2):
        state = {"w": quantize(torch.ones(32, 64), MXFP8BlockScaling())}
        dcp.save(state, storage_writer=AtomicFileSystemWriter(path), planner=QuantizedSavePlanner(), no_dist=True)
    state = {"w": quantize(torch.ones(32, 64), NVFP4BlockScaling())}
    dcp.load(state, checkpoint_id=path, planner=QuantizedLoadPlanner(on_mismatch="convert"), no_dist=True)
"""


@pytest.mark.slow
def test_a_process_that_asks_for_nothing_prints_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SILENT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_snapshot_tells_how_much_it_copies(told: pytest.LogCaptureFixture) -> None:
    stager = QuantizedStager()
    stager.stage(state())
    stager.close()
    begins, ended = lines(told)
    assert begins.startswith("QuantizedStager: copying 3 tensors: begins (")
    assert ended.startswith("QuantizedStager: copying 3 tensors: ended after ")
