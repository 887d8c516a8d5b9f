"""docs/calibration.md says what is so: its code runs, in order, on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from layerwise import GPTQ, Max, Mse, calibrate
from qtensor import NVFP4BlockScaling
from tests.docs.pages import namespace, page
from tests.layerwise import models, small_runs
from tests.ranks import run_ranks

PAGE = page("calibration.md")
NVFP4 = NVFP4BlockScaling()


def build_model() -> small_runs.Model:
    """What the page calls `build_model`."""
    return small_runs.model_of(shard=False)


def calibrated(algorithm: Any) -> dict[str, str]:
    """What an algorithm comes to on the model of the page."""
    result = calibrate(build_model(), small_runs.batches(), recipe=NVFP4, algorithm=algorithm, progress=False)
    return models.fingerprints(result.state_dict())


def run_page(path: Path) -> None:
    """All blocks, one after the other, in one namespace; what they leave there is what the page says it is."""
    assert dist.get_world_size() == 1
    (path / "safetensors").mkdir()
    save_file(build_model().state_dict(), path / "safetensors" / "model.safetensors")
    names = namespace(build_model=build_model, path=path, device="cpu", batches=small_runs.batches())
    sharded: Any = None
    results: list[Any] = []  # what `result` was, each time it was another
    for number in range(len(PAGE.python)):
        PAGE.run(names, only=[number])
        sharded = sharded or names["model"]
        if not any(names["result"] is result for result in results):
            results.append(names["result"])
    fingerprints = models.fingerprints
    whole, from_disk, static = results

    # The result
    assert isinstance(sharded, FSDPModule)
    served = fingerprints(names["served"].state_dict())
    entries = fingerprints(whole.state_dict())
    assert len(entries) > 18, "six targets in each layer, several parts each"
    assert {name: served[name] for name in entries} == entries
    ids = names["batches"][0]
    assert torch.equal(names["served"](ids), sharded(ids)), "the model can be evaluated as it is"
    assert [*whole.starved] == [f"layers.{index}.spare.weight" for index in range(small_runs.LAYERS)]

    # Weights that are elsewhere
    assert all(param.is_meta for param in names["model"].parameters())
    assert fingerprints(from_disk.state_dict()) == calibrated(Mse())

    # Scales of inputs
    weights = {name for name in static.state_dict() if name.endswith(".weight")}
    assert len(weights) == 6 * small_runs.LAYERS + 1
    assert {*names["scales"]} == {name.replace(".weight", ".input_scale") for name in weights}
    assert all(float(scale) > 0 for scale in names["scales"].values())

    # Resume
    assert names["again"].report.resumed == (*range(small_runs.LAYERS),)
    assert fingerprints(names["again"].state_dict()) == entries

    # The report
    assert (path / "report.json").stat().st_size > 0
    assert (path / "report.png").read_bytes().startswith(b"\x89PNG")

    # An algorithm of your own
    found = {name: fingerprints(names[name].state_dict()) for name in ("clipped", "rounded", "smooth")}
    assert found["rounded"] == calibrated(GPTQ(scales=names["RowClip"](part=0.8))) != calibrated(GPTQ())
    assert found["clipped"] != calibrated(Max())
    assert found["clipped"] == calibrated(names["RowClip"](part=0.8)) != calibrated(names["RowClip"](part=1.0))
    assert calibrated(names["RowClip"](part=1.0)) == calibrated(Max())
    assert any("norm" in name for name in found["smooth"]), "factors were folded into norms"


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_ranks(1, run_page, tmp_path)
