"""Tables and pictures are extras: a calibration runs without them, and on one rank without numpy, too."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent

SCRIPT = """
import sys
for name in ("numpy", "rich", "matplotlib", "transformers"):
    sys.modules[name] = None  # importing it fails
import torch
from torch import nn
from layerwise import GPTQ, calibrate
from qtensor import MXFP8BlockScaling

model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
run = dict(recipe=MXFP8BlockScaling(), algorithm=GPTQ(), layers=["0", "1"], inputs_on="disk")
result = calibrate(model, [torch.randn(4, 32)], checkpoint_dir=sys.argv[1], **run)
assert {record.tokens for record in result.report.records} == {4}
print(result.report.table())
"""


def test_a_calibration_needs_no_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0.weight" in done.stdout
