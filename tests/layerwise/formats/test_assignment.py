"""An assignment chooses anew, is saved and read, and refuses what it cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from layerwise import Assignment
from layerwise.formats.assignment import all_recipes, assign, recipe_of
from layerwise.formats.candidates import Candidate, LinearGroup
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

NVFP4, MXFP8 = NVFP4BlockScaling(), MXFP8BlockScaling(activations="dynamic")


def group(name: str, error: float) -> LinearGroup:
    """100 elements in NVFP4, MXFP8 or dense."""
    options = (Candidate(NVFP4, 450, error), Candidate(MXFP8, 825, error / 100), Candidate(None, 1600, 0.0))
    return LinearGroup((f"{name}.q_proj.weight", f"{name}.k_proj.weight"), 100, options)


GROUPS = tuple(group(f"layers.{number}", error) for number, error in enumerate((0.1, 0.5, 1 / 3, 0.2)))


def test_a_budget_is_spent_where_errors_are_largest() -> None:
    found = assign(GROUPS, 5.5)  # 400 more bits than all in NVFP4: one step of 375
    assert {name: recipe for name, recipe in found.recipes.items() if recipe != NVFP4} == dict.fromkeys(
        GROUPS[1].names, MXFP8
    )
    assert (found.bits, found.bits_per_weight) == (4 * 450 + 375, (4 * 450 + 375) / 400)
    assert found.error == math.fsum((0.1, 0.005, 1 / 3, 0.2))
    assert found.bound is not None
    assert found.bound <= found.error
    assert found.at(16) == assign(GROUPS, 16)
    assert {*found.at(16).recipes.values()} == {None}
    assert found.at(4.5).bits_per_weight == 4.5
    assert str(found) == f"6 weights {NVFP4}, 2 weights {MXFP8}"


def test_budgets_that_do_not_fit() -> None:
    for budget in (4.4999, 1):
        with pytest.raises(
            ValueError, match=rf"bits_per_weight={budget} is less than .*, scales included; give 4.5 or"
        ):
            assign(GROUPS, budget)
    for nothing in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a positive number"):
            assign(GROUPS, nothing)
    for kind in ("5", True, None):
        with pytest.raises(TypeError, match=r"expected a number, such as 5\.0"):
            assign(GROUPS, kind)  # type: ignore[arg-type]
    for huge in (10**400, 2**1024, -(10**5000)):
        with pytest.raises(ValueError, match=r"^search_formats: bits_per_weight=.*; expected a positive number"):
            assign(GROUPS, huge)
    found = assign(GROUPS, 5.5)
    assert found.at(10**308) == found.at(16), "more than the largest candidates take"
    for budget, words in ((10**400, "expected a positive number"), (float("nan"), "expected a"), (1, "is less than")):
        with pytest.raises(ValueError, match=rf"^Assignment\.at: bits_per_weight=.*{words}"):
            found.at(budget)
    with pytest.raises(TypeError, match=r"^Assignment\.at: bits_per_weight='5'; expected a number"):
        found.at("5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Assignment\.at chooses among what search_formats has measured"):
        Assignment({}).at(5)


def test_it_is_read_as_it_was_saved(tmp_path: Path) -> None:
    for assignment in (assign(GROUPS, 8.0), Assignment({"a.weight": MXFP8, "b.weight": None})):
        again = Assignment.load(assignment.save(tmp_path / "assignment.json"))
        assert again == assignment
        assert [*again.recipes] == [*assignment.recipes]
        assert {recipe.activations for recipe in all_recipes(again)} <= {None, "dynamic"}
    assert again.recipes["a.weight"] == MXFP8 != MXFP8BlockScaling(), "with what no checkpoint stores"


def test_it_keeps_gradients_and_reads_files_from_before_they_existed(tmp_path: Path) -> None:
    recipe = MXFP8BlockScaling(activations="dynamic", gradients="e4m3")
    path = Assignment({"a.weight": recipe, "b.weight": MXFP8}).save(tmp_path / "assignment.json")
    assert Assignment.load(path).recipes == {"a.weight": recipe, "b.weight": MXFP8}
    assert [("gradients" in one) for one in json.loads(path.read_text())["recipes"]] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("groups"),
        lambda record: record.update(version=2),
        lambda record: record["recipes"][0].update(type="Unknown"),
        lambda record: record["weights"].update({"a.weight": 9}),
        lambda record: record["groups"][0].update(candidates=[[0, 1]]),
    ],
)
def test_a_file_that_is_no_assignment(change: Any, tmp_path: Path) -> None:
    path = assign(GROUPS, 8.0).save(tmp_path / "assignment.json")
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"assignment\.json can not be read .*; give a file that Assignment"):
        Assignment.load(path)
    path.write_text("[1")
    with pytest.raises(ValueError, match=r"assignment\.json can not be read"):
        Assignment.load(path)


def test_what_it_says_of_each_weight() -> None:
    assignment = Assignment({"a.weight": NVFP4, "b.weight": None, "experts.up": MXFP8, "c.weight": NVFP4})
    assert recipe_of(assignment, "experts.up[3]") == MXFP8
    assert recipe_of(NVFP4, "anything") == NVFP4
    assert assignment.modules() == {NVFP4: ["a", "c"]}
    assert all_recipes(assignment) == [NVFP4, MXFP8]
    with pytest.raises(TypeError, match=r"expected names of weights, each with a recipe or None, got 'a': 'nvfp4'"):
        Assignment({"a": "nvfp4"})  # type: ignore[dict-item]


def test_its_table() -> None:
    text = assign(GROUPS, 5.5).table()
    lines = text.splitlines()
    assert [*lines[0].split()] == ["weights", "format", "bits", "error", "dB"]
    assert len(lines) == 5
    assert "layers.1.q_proj.weight and 1 more" in lines[2]
    assert lines[2].split()[-2:] == ["8.250", "-23.0"]
    assert lines[1].split()[-2:] == ["4.500", "-10.0"]
    assert "dense" in assign(GROUPS, 16).table()


def test_recipes_of_the_fingerprint() -> None:
    """Two assignments decide the same bytes where their recipes do, whatever they were chosen from."""
    found = assign(GROUPS, 5.5)
    assert Assignment(found.recipes).to_json() == found.to_json()
    assert found.to_json() != found.at(8).to_json()
    row = Assignment({"a.weight": Float8CurrentScaling()})
    assert row.to_json() == {"a.weight": Float8CurrentScaling().to_json(), "type": "Assignment"}
