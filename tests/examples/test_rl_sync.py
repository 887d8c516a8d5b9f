"""The example of a trainer and an engine: versions arrive, both sides compute alike, the policy learns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.small_model import ROOT
from tests.ranks import agreed


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_engine_follows_the_trainer(tmp_path: Path) -> None:
    if agreed(value=str(tmp_path)) != str(tmp_path):
        return  # one rank of torchrun is enough
    command = [sys.executable, "examples/rl_sync.py", "--updates", "3", "--layers", "2", "--bucket-bytes", "8192"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "out").read_text())
    assert [row["version"] for row in told["rows"]] == [1, 2, 3]
    assert all(row["apart"] == 0 for row in told["rows"])  # the same bytes, and the same arithmetic
    assert told["nbytes"] < 0.5 * told["bf16"]
    assert told["buckets"] > 1
    assert "bytes a version in" in done.stdout
