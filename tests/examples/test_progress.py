"""How far a run of an example is: what a terminal, a pipe and the file get."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.progress import Log

MESSAGES = ["the weights are read", "held-out loss 2.0; see report.json"]
STEPS = ["step 2/3: loss 1.5", "step 3/3: loss 1.5"]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_messages_are_shown_and_steps_by_a_bar_or_lines(
    terminal: bool, shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    log = Log(tmp_path / "log.txt", shown=shown)
    log(MESSAGES[0])
    for _ in log.steps(range(1, 3)):
        log.step("loss 1.5")
    log(MESSAGES[1])
    out, err = capsys.readouterr()
    said = [line.partition(" s  ")[2] for line in out.splitlines()]
    if not shown:
        assert (said, err, (tmp_path / "log.txt").exists()) == ([], "", False)
        return
    assert [line.partition(" s  ")[2] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        MESSAGES[0],
        *STEPS,
        MESSAGES[1],
    ]
    assert said == (MESSAGES if terminal else [MESSAGES[0], *STEPS, MESSAGES[1]])
    assert ("loss 1.5" in err) is terminal
