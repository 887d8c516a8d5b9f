"""The calibration example on first layers and tokens of the real model: two ranks, two algorithms, what it leaves."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_adapters import read_manifest
from dcp_adapters.cli.main import main
from layerwise.report.report import Report
from tests.examples import small_model
from tests.ranks import agreed

LAYERS = 2
LINEAR = 576 * (2 * 576 + 2 * 192 + 3 * 1536)  # elements of a layer's weights


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_example_calibrates_saves_and_compares(tmp_path: Path) -> None:
    if agreed(value=str(tmp_path)) != str(tmp_path):
        pytest.skip("launches its own ranks: rank 0 runs it")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [
        str(small_model.ROOT / "examples" / "calibrate.py"),
        "--out",
        str(tmp_path),
        "--algorithms",
        "Max",
        "GPTQ",
    ]
    command += ["--batches", "3", "--seq-len", "32", "--eval-blocks", "2", "--layers", str(LAYERS)]
    environment = small_model.install(tmp_path / "packages", layers=LAYERS + 1)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "calibration.json").read_text())
    assert [row["algorithm"] for row in rows] == ["Max", "GPTQ"]
    assert rows[0]["before"] == rows[1]["before"]
    for row in rows:
        assert 0.5 * row["before"] < row["after"] < 2 * row["before"]
        assert row["bytes"] < 0.57 * LAYERS * LINEAR + 1e5  # 4.5 bits each of the linear weights
        assert len(read_manifest(tmp_path / row["algorithm"]).tensors) == 7 * LAYERS
        report = Report.load(tmp_path / f"{row['algorithm']}.json")
        assert len(report.records) == 7 * LAYERS
        assert len(report.layer_errors) == LAYERS
        assert (tmp_path / f"{row['algorithm']}.png").stat().st_size > 0
    assert "| GPTQ |" in (tmp_path / "calibration.md").read_text()
    assert "GPTQ" in done.stdout
    exports_and_writes(tmp_path, environment)


def exports_and_writes(runs: Path, environment: dict[str, str]) -> None:
    """What docs/demo.md does next: the dense model as a directory, the export, and a few words by transformers."""
    examples = small_model.ROOT / "examples"

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    dense, exported = str(runs / "smollm2"), str(runs / "exported")
    python(str(examples / "smollm2.py"), dense, "--layers", str(LAYERS))
    options = ("--config", dense, "--rest", dense)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["export", str(runs / "GPTQ"), exported, *options]) == 0
    assert said.getvalue().startswith(f"{exported}: ")
    written = python(str(examples / "generate.py"), exported, "--prompt", "The", "--tokens", "8")
    assert written.startswith("The")
    assert len(written) > len("The\n")
