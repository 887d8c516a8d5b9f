"""The keys of a search: a recipe for each weight, chosen and calibrated by one command, resumed, and refused early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

import torch
from transformers import AutoModelForCausalLM

from dcp_adapters import import_hf
from layerwise import Assignment, Max, calibrate, search_formats
from layerwise.command import main as command_main
from layerwise.command.config import DataKeys
from layerwise.command.data import batches_of, read_samples
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling
from tests.layerwise.command.runs import BATCH, command, files_of, save_model, write_config
from tests.layerwise.command.test_checks import refusal
from tests.layerwise.models import fingerprints
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("alone")
SEARCH: dict[str, Any] = {"search": ["nvfp4", "mxfp8", None], "bits_per_weight": 7.5}
CHANGED: dict[str, Any] = {"algorithm": "Max", "calibration": {"inputs": "dynamic"}, "output": {"report": []}}


def searching(directory: Path, name: str = "config", **keys: Any) -> Path:
    """A config of a search, which writes its choice beside its output."""
    recipe = {**SEARCH, "assignment": str(directory / f"{name}-choice.json"), **keys}
    return write_config(directory, name, recipe=recipe, **CHANGED)


def _searched_on_ranks(path: Path) -> tuple[int, str]:
    return command(path)


def test_each_weight_gets_the_recipe_that_search_formats_chooses(tmp_path: Path, shared_tmp_path: Path) -> None:
    save_model(tmp_path)
    status, told = command(searching(tmp_path))
    assert status == 0, told
    assert "to 7.5 bits each of NVFP4BlockScaling" in told
    assert "chosen, 7." in told
    found = Assignment.load(tmp_path / "config-choice.json")

    keys = DataKeys(path=tmp_path / "ids.npy", samples=6, sequence_length=16, batch_size=BATCH)
    samples = read_samples(keys, tmp_path / "model", 96)
    data = batches_of(samples, BATCH, 0, 1, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    recipes = [NVFP4BlockScaling(), MXFP8BlockScaling(), None]
    options: dict[str, Any] = {"exclude": ["lm_head"], "progress": False}
    expected = search_formats(model, data, recipes=recipes, bits_per_weight=7.5, **options)
    assert found.recipes == expected.recipes
    assert len(set(found.recipes.values())) > 1
    result = calibrate(model, data, recipe=expected, algorithm=Max(), **options)
    exported = import_hf(tmp_path / "config-out")
    values = {name: value for name, value in result.state_dict().items() if value.ndim == 2}
    assert fingerprints({name: exported[name] for name in values}) == fingerprints(values)

    other = shared_tmp_path / "ranks"
    shutil.copytree(tmp_path / "model", other / "model")
    shutil.copy(tmp_path / "ids.npy", other)
    assert [status for status, _ in run_ranks(2, _searched_on_ranks, searching(other))] == [0, 0]
    assert files_of(other / "config-out") == files_of(tmp_path / "config-out")


def test_a_search_that_was_finished_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    config = searching(tmp_path)

    def stop(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(command_main, "calibrate", stop)
        status, told = command(config)
    assert (status, "no memory left" in told) == (1, True)
    assert not (tmp_path / "config-choice.json").exists()
    state = tmp_path / "config-state" / "search"
    measured = {path: path.stat().st_mtime_ns for path in state.rglob("layers-*/*")}
    assert measured
    assert command(config)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in state.rglob("layers-*/*")} == measured
    status, told = command(config)
    assert (status, "finished already" in told) == (0, True)
    (tmp_path / "config-choice.json").unlink()
    assert command(config)[0] == 0
    assert (tmp_path / "config-choice.json").exists()


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ({**SEARCH, "bits": 3}, "recipe.bits: unknown key; "),
        ({"search": ["nvfp4"]}, "recipe.bits_per_weight: missing; expected a number"),
        ({**SEARCH, "search": "nvfp4"}, "recipe.search: expected a list of recipes, or null among them, got 'nvfp4'"),
        ({**SEARCH, "search": ["nvfp5"]}, "recipe.search[0].name: unknown recipe 'nvfp5'; did you mean 'nvfp4'?"),
        ({**SEARCH, "search": ["nvfp4", "nvfp4"]}, "recipe.search: recipes has NVFP4BlockScaling"),
        ({**SEARCH, "search": [None]}, "recipe.search: recipes has no recipe"),
        ({**SEARCH, "compare": "most"}, "recipe.compare: expected one of relative, absolute, got 'most'"),
        ({**SEARCH, "bits_per_weight": 3.0}, "recipe.bits_per_weight: bits_per_weight=3.0 is less than the cheapest"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, recipe: dict[str, Any], line: str) -> None:
    save_model(tmp_path)
    found = refusal(tmp_path, recipe=recipe, **CHANGED)
    assert any(one.startswith(line) for one in found), found


def test_a_layout_that_can_not_mix_them_is_refused_before_the_search(tmp_path: Path) -> None:
    save_model(tmp_path)
    (line,) = refusal(tmp_path, recipe=SEARCH, **{**CHANGED, "output": {"report": [], "layout": "mxfp4"}})
    assert line.startswith("output: ")


def test_a_choice_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    save_model(tmp_path)
    choice = tmp_path / "choice.json"
    choice.write_text(json.dumps({}))
    (line,) = refusal(tmp_path, recipe={**SEARCH, "assignment": str(choice)}, **CHANGED)
    assert line.startswith("recipe.assignment: ")
    assert choice.read_text() == "{}"
