"""Checkpoints of linears whose inputs are rotated at run time: they say so, and fit no model that does not rotate."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, QuantizedStager, read_manifest
from dcp_adapters.manifest import Manifest
from layerwise import rotate_inputs_
from qtensor import MXFP8BlockScaling, quantize_
from qtensor.input_rotation import input_rotations, noted_rotations

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model(block: int | None = 16) -> nn.Module:
    torch.manual_seed(0)
    built = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32), "head": nn.Linear(32, 8)})
    quantize_(built, MXFP8BlockScaling(), exclude=["head"])
    if block is not None:
        rotate_inputs_(built, {"down": block, "head": block})
    return built


def save(built: nn.Module, path: Path, *, nested: bool, **options: Any) -> Path:
    state = built.state_dict()
    planner = QuantizedSavePlanner(**options)
    dcp.save({"model": state} if nested else state, checkpoint_id=path, planner=planner, no_dist=True)
    return path


def load(built: nn.Module, path: Path, **options: Any) -> None:
    planner = QuantizedLoadPlanner(**options)
    dcp.load({"model": built.state_dict()}, checkpoint_id=path, planner=planner, no_dist=True)


@pytest.mark.parametrize("nested", [True, False])
def test_the_manifest_says_so(nested: bool, tmp_path: Path) -> None:
    manifest = read_manifest(save(model(), tmp_path, nested=nested))
    prefix = "model." if nested else ""
    assert manifest.input_rotations == {f"{prefix}down": 16, f"{prefix}head": 16}
    assert manifest.format_version == 3
    assert Manifest.from_tensor(manifest.to_tensor()) == manifest


def test_others_have_the_version_of_before(tmp_path: Path) -> None:
    manifest = read_manifest(save(model(None), tmp_path, nested=True))
    assert (manifest.format_version, manifest.input_rotations) == (1, {})
    assert "input_rotations" not in manifest.to_json()


def test_a_delta_says_so_too(tmp_path: Path) -> None:
    full = save(model(), tmp_path / "full", nested=True)
    manifest = read_manifest(save(model(), tmp_path / "delta", nested=True, delta_to=full))
    assert manifest.format_version == 3
    assert manifest.base is not None
    assert manifest.input_rotations == {"model.down": 16, "model.head": 16}
    load(model(), tmp_path / "delta")


def test_a_snapshot_keeps_it(tmp_path: Path) -> None:
    staged = QuantizedStager().stage({"model": model().state_dict()})
    assert noted_rotations(staged["model"]) == {"down": 16, "head": 16}


def test_plans_of_models_with_other_rotations_are_not_taken_for_one(tmp_path: Path) -> None:
    for block in (16, 32, None):
        path = save(model(block), tmp_path / str(block), nested=True, enable_plan_caching=True)
        found = read_manifest(path).input_rotations
        assert found == ({} if block is None else {"model.down": block, "model.head": block})


def test_it_loads_into_a_model_that_rotates(tmp_path: Path) -> None:
    built, other = model(), model(None)
    save(built, tmp_path, nested=True)
    rotate_inputs_(other, {"down": 16, "*ead": 16})
    with torch.no_grad():
        other.head.weight.zero_()
    load(other, tmp_path)
    assert torch.equal(other.head.weight, built.head.weight)


@pytest.mark.parametrize("options", [{}, {"on_mismatch": "convert"}, {"allow_partial_load": True}])
@pytest.mark.parametrize(("held", "wanted"), [(16, None), (None, 16), (16, 32)])
def test_it_loads_into_no_other(held: int | None, wanted: int | None, options: Any, tmp_path: Path) -> None:
    path, target = save(model(held), tmp_path, nested=True), model(wanted)
    words = {
        block: f"inputs that are rotated at run time in blocks of {block}" if block else "inputs as they are"
        for block in (held, wanted)
    }
    with pytest.raises(CheckpointException) as raised:
        load(target, path, **options)
    ((error, _),) = raised.value.failures.values()
    assert str(error) == "the checkpoint does not fit the target; nothing has been loaded:" + "".join(
        f"\n  model.{name}.weight: the checkpoint has it for {words[held]}, the target for {words[wanted]}; "
        "layerwise.rotate_inputs_ gives a model that is built anew the rotations of its checkpoint"
        for name in ("down", "head")
    )


@pytest.mark.parametrize("value", [{"down": 24}, {"down": True}, {"down": 1}, [16], None, {"down": "16"}])
def test_manifests_that_are_wrong_are_refused(value: Any, tmp_path: Path) -> None:
    record = read_manifest(save(model(), tmp_path, nested=False)).to_json() | {"input_rotations": value}
    with pytest.raises(ValueError, match=r"^the checkpoint's qtensor.manifest says that the inputs of .* are rotated"):
        Manifest.from_json(record)


CALLS: dict[str, tuple[type[Exception], Any, str]] = {
    "nothing": (ValueError, {"*.w2": 16}, "the pattern '*.w2' of online= matches no module"),
    "no power": (ValueError, {"down": 24}, "online= has 24 for 'down', which is no power of two from 2 on"),
    "too large": (ValueError, {"down": 128}, "block=128 does not divide the 64 inputs of down, which online= names"),
    "all": (TypeError, {"*": 16}, " is a ModuleDict; only nn.Linear, as it is, can be rotated"),
    "twice": (ValueError, {"up": 16, "u*": 32}, "online= has several blocks for up: 16, 32"),
}


@pytest.mark.parametrize("case", CALLS)
def test_rotations_that_do_not_fit_are_refused(case: str) -> None:
    error, online, message = CALLS[case]
    built = model(None)
    with pytest.raises(error, match=f"^{re.escape('rotate_inputs_: ' + message)}"):
        rotate_inputs_(built, online)
    assert not input_rotations(built)
    rotate_inputs_(built, {"up": 16})
    with pytest.raises(ValueError, match=r"^rotate_inputs_: the inputs of up are rotated at run time already"):
        rotate_inputs_(built, {"up": 16})
