"""The version is that of the code: it needs no installed package, and is none that happens to be installed."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open
from torch import nn

from dcp_adapters import WeightStream, export_hf
from fsdp_hooks.release import VERSION
from layerwise import calibrate
from qtensor import MXFP8BlockScaling, quantize_
from qtensor.numerics.graph_key import code_digest

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"model_type": "mine"}


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from_name = metadata.Distribution.from_name

    def found(name: str) -> Any:
        if name == "qtensor-fsdp":
            raise metadata.PackageNotFoundError(name)
        return from_name(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", found)
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("qtensor-fsdp")


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    quantize_(model, MXFP8BlockScaling())
    return model


def test_an_export_names_the_version_of_the_code(tmp_path: Path) -> None:
    export_hf(quantized().state_dict(), tmp_path / "out", config=CONFIG, layout="modelopt", progress=False)
    written = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            written += json.dumps(file.metadata())
    assert VERSION in written
    assert len([*WeightStream(quantized(), config=CONFIG)]) > 0


def test_a_calibration_notes_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 32)))
    for _ in range(2):  # the second one reads what the first one noted
        calibrate(model, None, recipe=MXFP8BlockScaling(), layers=["0"], checkpoint_dir=tmp_path, progress=False)
    noted = [json.loads(path.read_text()) for path in tmp_path.rglob("progress.json")]
    assert [f'"qtensor": "{VERSION}"' in json.dumps(one) for one in noted] == [True]


def test_so_does_a_compiled_graph_without_sources(tmp_path: Path) -> None:
    assert code_digest((tmp_path,)) == VERSION
