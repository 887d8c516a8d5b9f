"""What the peers' process leaves; once for all tests of this folder."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for library in ("torchao", "compressed_tensors", "modelopt", "transformers", "bitsandbytes"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    out = tmp_path_factory.mktemp("adopting") / "found.pkl"
    command = [sys.executable, "-m", "tests.dcp_adapters.adopting.peers", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=False)  # type: ignore[no-any-return]
