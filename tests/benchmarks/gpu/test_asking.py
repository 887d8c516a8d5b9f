"""A GPU is asked one question after the other: one that dies, hangs or is out of time takes no other along."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks.gpu import asking, table
from benchmarks.gpu.question import TINY, Aim, Row, Scale, tried

GOOD = Aim(row="a", figure="share", least=0.8)
NEVER = Aim(row="c", figure="share", most=1)
AIMS = (GOOD, Aim(row="b", figure="ms", most=1.0, over="a"), NEVER)
ROWS = [Row("a", {"share": 0.9, "ms": 2.0}), Row("b", {"ms": 3.0})]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that are nothing but a time box and aims; what a process answers is a script of the test's."""
    modules = {name: types.SimpleNamespace(SECONDS=30, AIMS=AIMS) for name in ("one", "other")}
    modules["slow"] = types.SimpleNamespace(SECONDS=0.5, AIMS=())
    monkeypatch.setattr(asking, "module_of", modules.__getitem__)
    monkeypatch.setattr(asking, "GRACE", 0.5)
    monkeypatch.setattr(asking, "machine_and_versions", lambda: {"machine": {"cpu": "c"}, "versions": {"torch": "t"}})


def script(**bodies: str) -> Callable[[str, Path, float], list[str]]:
    """A command that writes ROWS and then does this, by question."""
    lines = "".join(json.dumps({"what": row.what, "figures": row.figures}) + "\n" for row in ROWS)

    def command(name: str, into: Path, box: float) -> list[str]:
        write = f"import os, sys, time; open({str(into)!r}, 'w').write({lines!r}); print('asked', flush=True)"
        return [sys.executable, "-c", f"{write}\n{bodies.get(name, '')}"]

    return command


def ask(stem: Path, *names: str, **bodies: str) -> tuple[int, dict[str, Any]]:
    status = asking.ask(names, stem, "said", script(**bodies))
    return status, json.loads(stem.with_suffix(".json").read_text())


def test_answers_are_written_with_their_aims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = ask(tmp_path / "results" / "day", "one", "other")
    assert status == asking.MISSED == 3
    assert [row["what"] for row in found["answers"]["other"]] == ["a", "b"]
    assert found["missed"] == [
        f"{name}: {aim}" for name in ("one", "other") for aim in ("b: ms / that of a", "c: share")
    ]
    assert found["command"] == "said"
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", found["commit"])
    printed = capsys.readouterr().out
    log = (tmp_path / "results" / "day.log").read_text()
    assert printed == log
    assert log.count("  asked\n") == 2
    text = (tmp_path / "results" / "day.md").read_text()
    for line in (
        "| a | 0.9 | 2 |",
        "| b | - | 3 |",
        "| one | a: share | 0.9 | at least 0.8 | met |",
        "| one | b: ms / that of a | 1.5 | at most 1 | **missed** |",
        "| one | c: share | - | at most 1 | not measured |",
    ):
        assert line in text
        assert line in printed
    assert printed.index("## one") < printed.index("## aims")  # the table is last
    assert (tmp_path / "results" / "day.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(5)", "the process ended with 5"),
        ("os.kill(os.getpid(), 11)", "the process ended with -11"),
    ],
)
def test_a_process_that_dies_leaves_its_rows_and_the_others(body: str, said: str, tmp_path: Path) -> None:
    status, found = ask(tmp_path / "day", "one", "other", one=body)
    assert status == asking.FAILED == 1
    assert [row["what"] for row in found["answers"]["one"]] == ["a", "b", "what is left of one"]
    assert found["answers"]["one"][-1]["error"] == said
    assert [row["error"] for row in found["answers"]["other"]] == ["", ""]


def test_a_process_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hang = (
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    began = time.monotonic()
    status, found = ask(tmp_path / "day", "slow", "other", slow=hang)
    assert time.monotonic() - began < 30
    assert status == 1
    assert [row["what"] for row in found["answers"]["slow"]] == ["a", "b", "what is left of slow"]
    assert found["answers"]["slow"][-1]["error"] == "stopped after 1 s"
    assert len(found["answers"]["other"]) == 2
    if child.exists():  # it had begun
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and _runs(int(child.read_text())):
            time.sleep(0.05)
        assert not _runs(int(child.read_text()))


def test_what_a_process_leaves_running_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    """It has what the first one printed to, too: the end of that would be waited for."""
    leave = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    _, found = ask(tmp_path / "day", "one", "other", one=leave)
    assert time.monotonic() - began < 25
    assert [len(rows) for rows in found["answers"].values()] == [2, 2]


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_what_is_left_of_all_bounds_each_time_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LONGEST", 0.4)
    status, found = ask(tmp_path / "day", "one")
    assert status == asking.MISSED  # what nobody measured is not met
    assert found["answers"]["one"] == [
        {"what": "what is left", "figures": {}, "error": "", "skipped": "no time was left to ask it"}
    ]


def test_all_time_boxes_fit_into_eight_minutes() -> None:
    assert asking.LONGEST <= 8 * 60


def rows_of(question: Any, seconds: float) -> list[Row]:
    found: list[Row] = []
    asking.rows_within(question, TINY, seconds, found.append)
    return found


def test_a_row_that_fails_takes_no_other_along(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(scale: Scale) -> Iterator[Row]:
        yield tried("bad", lambda: {"ms": float("x")})
        yield tried("good", lambda: {"ms": 1.23456})
        raise ValueError("not\nset up")

    bad, good, rest = rows_of(types.SimpleNamespace(rows=rows), 60)
    assert bad == Row("bad", error="ValueError: could not convert string to float: 'x'")
    assert good == Row("good", {"ms": 1.2346})
    assert rest == Row("what is left", error="ValueError: not")
    assert "Traceback" in capsys.readouterr().err
    assert table.failed({"q": [bad, good]}) == ["q: bad: ValueError: could not convert string to float: 'x'"]
    assert "**ValueError: could not convert string to float: 'x'**" in "\n".join(table.of_question([bad, good]))


def test_no_row_is_begun_when_the_time_is_over() -> None:
    begun = []

    def rows(scale: Scale) -> Iterator[Row]:
        for number in range(3):
            begun.append(number)
            yield Row(str(number))

    assert [row.what for row in rows_of(types.SimpleNamespace(rows=rows), -1)] == ["0", "what is left"]
    assert begun == [0]


def test_an_aim_is_judged_by_its_rows() -> None:
    below = Aim(row="b", figure="ms", most=1.5, over="a")
    assert (GOOD.value(ROWS), below.value(ROWS), NEVER.value(ROWS)) == (0.9, 1.5, None)
    assert GOOD.met_by(0.8)
    assert not GOOD.met_by(0.79)
    assert below.met_by(1.5)
    assert not below.met_by(1.51)
    assert "| q | c: share | 2 | at most 1 | **missed** |" in table.of_aims(
        {"q": [Row("c", {"share": 2.0})]}, {"q": AIMS}
    )


def test_a_row_that_cannot_be_asked_here_is_no_failure() -> None:
    rows = [Row("a", {"ms": 1.0}), Row("b", skipped="torchao is not installed")]
    assert table.failed({"q": rows}) == []
    assert table.missed({"q": rows}, {"q": AIMS[1:2]}) == []
    assert table.of_question(rows)[-1] == "| b | - | torchao is not installed |"


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asking.importlib.util.find_spec
    monkeypatch.setattr(asking.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    ask(tmp_path / "day", "one")
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".log"}
    assert "png" not in (tmp_path / "day.md").read_text()
    assert "no picture: matplotlib is not installed" in (tmp_path / "day.log").read_text()


def test_without_a_gpu_nothing_is_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite.main(["--gpu"]) == asking.NO_GPU == 2
    assert capsys.readouterr().err == (
        f"python -m benchmarks --gpu needs a GPU, and torch {torch.__version__} finds none; see `nvidia-smi` for the "
        "driver, and install a torch that is built for CUDA\n"
    )


def test_files_are_named_after_the_day_and_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA  H200 (SXM)")
    monkeypatch.setattr(asking, "ask", lambda *args: asked.append(args) or 0)
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    assert suite.main(["--gpu"]) == suite.main(["--gpu", "step"]) == 0
    (names, stem, said), (some, _, said_of_some) = asked
    assert (names, said) == (asking.QUESTIONS, "python -m benchmarks --gpu")
    assert (some, said_of_some) == (["step"], "python -m benchmarks --gpu step")
    assert stem.parent == tmp_path
    assert stem.name.endswith("-nvidia-h200-sxm")


def test_threads_that_make_gives_tests_are_not_those_of_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ask(tmp_path / "day", "one", one="print('threads', os.environ.get('OMP_NUM_THREADS'))")
    assert "  threads None\n" in (tmp_path / "day.log").read_text()
    assert os.environ["OMP_NUM_THREADS"] == "1"
