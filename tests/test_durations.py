"""What a run of the tests says of their time, and the table that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations
from tests.durations import KNOWN, PAGE, Durations, main, page


def record(path: Path, args: list[str], marks: str = "not full", keyword: str = "") -> dict[str, Any]:
    """Of a run of two tests in one file."""
    plugin = Durations(path)
    for when, seconds in (("setup", 1.0), ("call", 2.0), ("teardown", 0.5), ("call", 0.5)):
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid="tests/a.py::test", when=when, duration=seconds))  # type: ignore[arg-type]
    option = SimpleNamespace(markexpr=marks, keyword=keyword)
    config = SimpleNamespace(args=args, option=option, getini=lambda _: ["tests"])
    plugin.pytest_sessionfinish(SimpleNamespace(config=config))  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_page_holds_the_runs() -> None:
    text = PAGE.read_text()
    assert page(text, json.loads(KNOWN.read_text())) == text


def test_a_run_counts_tests_and_the_seconds_of_files(tmp_path: Path) -> None:
    found = record(tmp_path / "build" / "run.json", ["tests"])
    assert (found["tests"], found["files"], found["whole"]) == (2, {"tests/a.py": 4.0}, True)


@pytest.mark.parametrize(("args", "keyword"), [(["tests/qtensor"], ""), (["tests"], "scale")])
def test_a_run_of_chosen_tests_is_refused(tmp_path: Path, args: list[str], keyword: str) -> None:
    record(tmp_path / "run.json", args, keyword=keyword)
    with pytest.raises(SystemExit, match="a run of chosen tests, which tells nothing of the whole"):
        main([str(tmp_path / "run.json")])


def test_each_command_has_a_row_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("KNOWN", "{}"), ("PAGE", f"before {durations.BEGIN} {durations.END} behind")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(durations, name, tmp_path / name)
    for marks in ("not full", "full"):
        record(tmp_path / "run.json", ["tests"], marks)
        main([str(tmp_path / "run.json")])
    made = (tmp_path / "PAGE").read_text()
    assert "| `make test`, " in made
    assert "| `make test-all`, " in made
    assert made.startswith("before ")
    assert made.endswith(" behind")
