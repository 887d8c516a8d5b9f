"""The main job, two short steps of it: first layers and tokens of the real model, all three launches, the figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import small_model
from tests.ranks import agreed

LAYERS = 2
LINEAR = 576 * (2 * 576 + 2 * 192 + 3 * 1536)  # elements of a layer's weights
EMBEDDING = small_model.TOKENS * 576 * 2  # bytes, in bf16
NORMS = (2 * LAYERS + 1) * 576 * 2


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_demo_trains_checkpoints_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    if agreed(value=str(tmp_path)) != str(tmp_path):
        pytest.skip("launches its own ranks: rank 0 runs it")
    command = [sys.executable, str(small_model.ROOT / "examples" / "run_demo.py"), "--out", str(tmp_path / "runs")]
    command += [
        "--steps",
        "2",
        "--resumed-steps",
        "1",
        "--seq-len",
        "32",
        "--eval-blocks",
        "2",
        "--layers",
        str(LAYERS),
    ]
    environment = small_model.install(tmp_path / "packages", layers=LAYERS + 1)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((tmp_path / "runs" / "demo.json").read_text())
    bf16, mxfp8, resumed = reports["bf16"], reports["mxfp8"], reports["resumed"]
    assert mxfp8["bytes_per_param_linear"] == 1 + 1 / 32
    assert bf16["bytes_per_param_linear"] == 2.0
    # one rank of two receives half of everything
    gathered = [report["gathered_bytes_per_round"] - EMBEDDING / 2 for report in (mxfp8, bf16)]
    assert gathered[0] < 0.52 * gathered[1]
    assert resumed["ranks"] == 1
    assert resumed["compared_bytes"] == LAYERS * LINEAR * 33 / 32 + 2 * EMBEDDING + NORMS  # a tied weight has two names
    assert mxfp8["loss_after"] < mxfp8["loss_before"]
    said = " ".join(done.stdout.split())
    assert "byte for byte" in said
    assert f"products of bf16 matrices: {bf16['products']}" in said
    assert bf16["products"] == mxfp8["products"] == resumed["products"]
    for run, steps in (("bf16", ("1/2", "2/2")), ("mxfp8", ("1/2", "2/2")), ("resumed", ("2/2",))):
        log = (tmp_path / "runs" / run / "log.txt").read_text().splitlines()
        assert [line.split(": loss")[0].split()[-1] for line in log if ": loss" in line] == list(steps)
        assert set(log) <= set(done.stdout.splitlines())  # without a terminal
