"""The suite of benchmarks: every question has its shape and its budget, and one that fails takes no others along."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks.report import at_least, at_most, table_of_targets, with_spread
from benchmarks.timing import two_threads

LONGEST = 28 * 60
MISSED = "| slow | time / bf16 | 1.5 | at most 1.15 | **no** | all of it \\| in one op |"


@pytest.mark.parametrize("name", suite.QUESTIONS)
def test_every_question_has_its_shape(name: str) -> None:
    question = importlib.import_module(f"benchmarks.{name}")
    shape = {of: list(inspect.signature(getattr(question, of)).parameters) for of in ("run", "markdown", "draw")}
    asked = (suite.QUESTIONS)[name]
    assert shape["run"] == (["full"] if asked.full else [])
    assert [len(shape["markdown"]), len(shape["draw"])] == [1, 2]
    assert asked.budget > 0


def test_all_questions_together_take_less_than_25_minutes() -> None:
    assert sum(question.budget for question in suite.QUESTIONS.values()) < LONGEST


def answer(**figures: Any) -> types.SimpleNamespace:
    """A question with these figures."""
    return types.SimpleNamespace(
        run=lambda: figures,
        markdown=lambda results: f"it is {results['ratio']['ratio']}",
        draw=lambda results, path: path.write_bytes(b"picture"),
    )


def failing(at: str) -> types.SimpleNamespace:
    """A question whose run, Markdown or picture raises."""

    def raises(*_: object) -> None:
        raise ValueError(f"no {at}\nand no way around it")

    question = answer(ratio={"ratio": 2.0, "min": 1.0, "max": 3.0})
    setattr(question, at, raises)
    return question


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of them in place of the real ones; three fail."""
    missed = at_most(1.5, 1.15, "all of it | in one op")
    fakes = {
        "broken": failing("run"),
        "mute": failing("markdown"),
        "blind": failing("draw"),
        "unwritable": answer(ratio={"ratio": torch.ones(1)}),
        "slow": answer(ratio={"ratio": 1.5, "min": 1.0, "max": 2.0}, targets={"time / bf16": missed}),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", fake)
    monkeypatch.setattr(suite, "QUESTIONS", {name: suite.Question(7) for name in fakes})


@pytest.mark.usefixtures("questions")
def test_a_question_that_raises_is_recorded_and_loses_no_others(tmp_path: Path) -> None:
    stem = tmp_path / "results" / "day-machine-cpu"
    assert suite.ask_all(list(suite.QUESTIONS), stem, "python -m benchmarks") == 1
    results = json.loads(stem.with_suffix(".json").read_text())
    assert results["broken"] == {"error": "ValueError: no run\nand no way around it"}
    assert results["mute"]["error"].startswith("ValueError: no markdown")
    assert results["blind"]["error"].startswith("ValueError: no draw")
    assert results["blind"]["ratio"]["ratio"] == 2.0
    assert results["unwritable"] == {"error": "TypeError: Object of type Tensor is not JSON serializable"}
    assert results["slow"]["ratio"]["ratio"] == 1.5
    assert {name: time["budget"] for name, time in results["time"].items()} == dict.fromkeys(suite.QUESTIONS, 7)
    assert results["command"] == "python -m benchmarks"
    assert results["versions"]["torch"].startswith(torch.__version__.split("+")[0])

    text = stem.with_suffix(".md").read_text()
    (picture,) = stem.parent.glob("*-slow.png")
    assert f"## slow\n\nit is 1.5\n\n![slow]({picture.name})" in text
    assert "## blind\n\nIt failed:\n\n    ValueError: no draw\n    and no way around it\n\nit is 2.0\n" in text
    assert "python -m benchmarks" in text
    assert MISSED in text
    assert "| broken | an answer | - | - | **no** | ValueError: no run |" in text


@pytest.mark.usefixtures("questions")
def test_the_status_tells_whether_all_were_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    assert suite.main(["slow"]) == 0
    assert [path.name.split("cpu")[1] for path in tmp_path.glob("*.json")] == ["-slow.json"]
    assert suite.main(["slow", "broken"]) == 1


def test_a_question_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(["numerics", "weather"])
    assert "no question weather; there are numerics, linear" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        suite.main(["--gpu", "numerics"])
    assert "no question numerics; there are gpu_tests, kernels" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        suite.main(["--gpu", "--full"])
    assert "a GPU's questions have no longer version; leave out --full" in capsys.readouterr().err


def test_a_longer_run_is_asked_for_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    quick, both = answer(ratio={"ratio": 1.0}), answer(ratio={"ratio": 1.0})
    both.run = lambda *, full=False: asked.append(full) or {"ratio": {"ratio": 1.0}}
    monkeypatch.setitem(sys.modules, "benchmarks.quick", quick)
    monkeypatch.setitem(sys.modules, "benchmarks.both", both)
    monkeypatch.setattr(suite, "QUESTIONS", {"quick": suite.Question(1), "both": suite.Question(1, full=True)})
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    assert suite.main(["quick", "both"]) == 0
    assert suite.main(["quick", "both", "--full"]) == 0
    assert asked == [False, True]
    assert sorted(path.name.split("cpu")[1] for path in tmp_path.glob("*.md")) == [
        "-quick-both-full.md",
        "-quick-both.md",
    ]


@pytest.mark.usefixtures("questions")
def test_the_number_of_threads_is_as_before_after_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()

    def run() -> dict[str, Any]:
        torch.set_num_threads(before + 1)
        return {"ratio": {"ratio": torch.get_num_threads()}}

    fake = answer()
    fake.run = run
    monkeypatch.setitem(sys.modules, "benchmarks.slow", fake)
    assert suite.ask_all(["slow"], tmp_path / "x", "") == 0
    assert torch.get_num_threads() == before
    with two_threads():
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_targets_say_which_way_is_better() -> None:
    assert at_least(4.0, 4) == {"value": 4.0, "target": "at least 4", "met": True, "why": ""}
    assert at_least(3.9, 4, "noise") == {"value": 3.9, "target": "at least 4", "met": False, "why": "noise"}
    assert at_most(8.0, 8, "noise") == {"value": 8.0, "target": "at most 8", "met": True, "why": ""}
    assert not at_most(8.1, 8)["met"]
    rows = table_of_targets({"q": {"targets": {"a": at_most(1 / 3, 1)}}, "other": {}}, ["q", "other"])
    assert rows[2:] == ["| q | a | 0.333 | at most 1 | yes |  |"]
    assert with_spread({"ratio": 1.0, "min": 0.5, "max": 2.25}) == "1.00 (0.50 - 2.25)"
    assert with_spread(None) == "-"
