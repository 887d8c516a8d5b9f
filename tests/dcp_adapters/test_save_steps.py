"""The steps of a save: one for each option that is on, in one order; none for an option that is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_adapters import QuantizedSavePlanner
from dcp_adapters.save.steps.step import SaveStep
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, save, values

ALL = ["ItemDigests", "SinceBase", "DeepVerify", "ChecksumTable", "Overwrite", "PlanCache"]


def steps(path: Path, **options: Any) -> list[str]:
    planner = QuantizedSavePlanner(**options)
    storage = type("Storage", (), {"checkpoint_id": path})()
    planner.set_up_planner({"w": quantize(values((32, 64), 0), RECIPES["mxfp8"])}, storage, is_coordinator=True)
    return [type(step).__name__ for step in planner.steps]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["ChecksumTable", "Overwrite"]),
        ({"checksums": False}, ["Overwrite"]),
        ({"checksums": False, "overwrite": "delete_first"}, ["Overwrite"]),
        ({"digest": True}, ["ItemDigests", "ChecksumTable", "Overwrite"]),
        ({"enable_plan_caching": True}, ["ChecksumTable", "Overwrite", "PlanCache"]),
    ],
)
def test_an_option_that_is_off_has_no_step(options: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert steps(tmp_path, **options) == expected


def test_all_options_together_have_their_order(tmp_path: Path) -> None:
    state = {"w": quantize(values((32, 64), 0), RECIPES["mxfp8"])}
    save(state, tmp_path / "base")
    options = {"digest": True, "delta_to": tmp_path / "base", "enable_plan_caching": True}
    assert steps(tmp_path / "new", **options) == [name for name in ALL if name != "DeepVerify"]


def test_a_step_has_a_part_in_the_stages_that_it_defines_and_in_those_of_its_base() -> None:
    class One(SaveStep):
        def commit(self, files: set[str]) -> None:
            """Nothing."""

    class Two(One):
        def agree(self, save: Any) -> None:
            """Nothing."""

    stages = {"local_plan", "receive", "agree", "planned", "finish_plan", "resolve", "commit"}
    assert One.stages & stages == {"commit"}
    assert Two.stages & stages == {"commit", "agree"}
    assert SaveStep.stages == frozenset()


def test_each_save_has_steps_of_its_own(tmp_path: Path) -> None:
    planner = QuantizedSavePlanner()
    held = []
    for _ in range(2):
        planner.set_up_planner({"b": torch.ones(3)})
        held.append(planner.steps)
    assert not {id(step) for step in held[0]} & {id(step) for step in held[1]}
