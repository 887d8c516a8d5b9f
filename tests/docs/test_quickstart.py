"""docs/quickstart.md does what it says: its code is a script that trains, saves, and resumes on more ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from dcp_adapters.cli.main import main
from tests.docs.pages import namespace, page
from tests.ranks import run_ranks

PAGE = page("quickstart.md")


def test_what_is_tried_in_a_shell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = PAGE.run(namespace(), only=[0])
    printed = capsys.readouterr().out
    assert "torch.Size([4, 64]) torch.bfloat16" in printed
    assert "'payload': (torch.float8_e4m3fn, (4, 64)), 'scale': (torch.uint8, (4, 2))" in printed
    assert float((names["q"].dequantize() - names["weight"]).abs().max()) < 0.25


def script(where: Path) -> str:
    """train.py on this rank, in the group that is there already; what it prints."""
    began: list[tuple[str, ...]] = []
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(where), contextlib.redirect_stdout(printed):
        patch.setattr(dist, "init_process_group", lambda *args: began.append(args))
        patch.setattr(dist, "destroy_process_group", lambda: began.append(()))
        PAGE.run(namespace(), only=range(1, len(PAGE.python)))
    assert began == [("gloo",), ()]
    return printed.getvalue()


def test_it_trains_on_one_rank_and_goes_on_with_two(shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line.split() for block in PAGE.blocks if not block.language for line in block.text.splitlines()]
    assert [words[2] for words in commands if words[:1] == ["torchrun"]] == ["1", "2"]

    first, *_ = run_ranks(1, script, shared_tmp_path)
    second = run_ranks(2, script, shared_tmp_path)
    assert "step 20: loss" in first
    assert "goes on" not in first
    for rank, printed in enumerate(second):
        assert f"rank {rank} of 2 goes on behind step 20" in printed
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", first + second[0])]
    assert len(losses) == 4
    assert losses[-1] < losses[0], "it learns"
    assert {path.parent.name for path in shared_tmp_path.glob("checkpoints/*/.metadata")} == {"step-0020", "step-0040"}

    looks = [words[3:] for words in commands if words[:3] == ["python", "-m", "dcp_adapters"]]
    assert [look[0] for look in looks] == ["inspect", "verify"]
    with contextlib.chdir(shared_tmp_path):
        for look in looks:
            assert main(look) == 0, capsys.readouterr()
