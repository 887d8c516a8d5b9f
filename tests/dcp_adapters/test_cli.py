"""The command line: exit status, messages, what is printed for people and for programs."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_adapters.cli.main import COMMANDS, main
from dcp_adapters.plain.tables import table
from dcp_adapters.plain.words import in_natural_order
from dcp_adapters.records.recipe_names import find_target, recipe_label, short_names
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
)
from tests.dcp_adapters.cases import alone, models, save, values
from tests.ranks import run_ranks

REPO = Path(__file__).resolve().parents[2]
ERROR = "python -m dcp_adapters: error: "


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    state = {
        "model": {
            "a.weight": quantize(values((64, 64), 0), MXFP8BlockScaling()),
            "b.weight": quantize(values((32, 64), 1), NVFP4BlockScaling()),
            "[bold]norm[/bold]": values((64,), 2),
        },
        "step": 3,
    }
    save(state, tmp_path / "q")
    return str(tmp_path / "q")


@pytest.fixture
def dense(tmp_path: Path) -> str:
    with alone():
        dcp.save({"w": values((64, 64), 0), "bias": values((64,), 1)}, checkpoint_id=tmp_path / "dense")
    return str(tmp_path / "dense")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with status 2 and prints nothing else."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(ERROR)
    assert err.endswith("\n")
    return err.removeprefix(ERROR).removesuffix("\n")


def succeeds(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


# -- bad usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "report", "verify", "diff", "convert"])
def test_what_is_no_checkpoint_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"diff": [str(tmp_path)], "convert": [str(tmp_path / "b"), "--to", "mxfp8"]}.get(command, [])
    assert fails(capsys, command, str(tmp_path / "a"), *extra) == f"{tmp_path}/a: no such directory"
    assert fails(capsys, command, str(tmp_path), *extra) == (
        f"{tmp_path}: no .metadata, so this is no checkpoint or one whose saving never finished"
    )


@pytest.mark.parametrize("command", ["inspect", "report", "diff", "convert"])
def test_an_unreadable_description_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    extra = {"diff": [str(tmp_path)], "convert": [str(tmp_path / "b"), "--to", "mxfp8"]}.get(command, [])
    message = fails(capsys, command, str(tmp_path), *extra)
    assert message.startswith(str(tmp_path))
    assert ".metadata" in message
    assert "\n" not in message


def test_unreadable_data_is_refused(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{checkpoint}/__0_0.distcp").unlink()
    message = fails(capsys, "diff", checkpoint, checkpoint)
    assert message.startswith(f"{checkpoint}: ")
    assert "can not be read: FileNotFoundError: " in message
    assert "__0_0.distcp" in message


def test_usage_errors_are_two_lines(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys) == "the following arguments are required: COMMAND\n(see python -m dcp_adapters --help)"
    assert fails(capsys, "convert", checkpoint, "b") == (
        "the following arguments are required: --to\n(see python -m dcp_adapters convert --help)"
    )
    assert "invalid choice: 'exort'" in fails(capsys, "exort", checkpoint)


def test_unknown_recipes_and_options_are_refused(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    def convert(*arguments: str) -> str:
        return fails(capsys, "convert", checkpoint, f"{checkpoint}-b", "--to", *arguments)

    assert convert("int3") == (
        "unknown recipe 'int3'; this version knows float8-block, float8-block-row, int4-32, int4-64, int4-128, mxfp4, "
        "mxfp4-floor, mxfp8, mxfp8-square, nf4, nf4-32, nf4-128, nvfp4, nvfp4-square, nvfp4-4over6, float8-row, "
        "float8-tensor, float8-delayed, int8-row, Float8BlockScaling, Int4GroupScaling, MXFP4BlockScaling, "
        "MXFP8BlockScaling, NF4BlockScaling, NVFP4BlockScaling, Float8CurrentScaling, Float8DelayedScaling, "
        "Int8RowScaling, bfloat16, float16, float32"
    )
    assert convert("mxfp8", "--option", "block=square") == (
        "MXFP8BlockScaling has no option 'block'; it has element, blocks, scale_rounding"
    )
    assert convert("mxfp8", "--option", "blocks=round") == (
        "MXFP8BlockScaling: blocks='round' is not one of 'row', 'square'"
    )
    assert convert("float8-row", "--option", "power_of_two=yes") == (
        "Float8CurrentScaling: power_of_two='yes' is not one of False, True"
    )
    assert convert("float8-delayed", "--option", "margin=much") == (
        "Float8DelayedScaling: margin='much' is not an integer"
    )
    assert convert("mxfp8", "--option", "blocks") == ("--option blocks: expected KEY=VALUE, for example blocks=square")
    assert convert("bfloat16", "--option", "blocks=row") == "bfloat16 is a dtype and has no options, found blocks"
    assert not Path(f"{checkpoint}-b").exists()


def test_what_can_not_be_converted_is_refused(checkpoint: str, dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "convert", dense, f"{dense}-b", "--to", "mxfp8", "--include", "*")
    assert message.endswith("leave them out with --exclude:\n  bias: shape (64,), expected 2 dims or more")
    assert "nothing is overwritten" in fails(capsys, "convert", checkpoint, dense, "--to", "mxfp8")


def test_options_have_the_types_of_the_fields() -> None:
    options = {"power_of_two": "true", "granularity": "tensor"}
    assert find_target("float8-row", options) == Float8CurrentScaling(power_of_two=True, granularity="tensor")
    assert find_target("Float8DelayedScaling", {"margin": "2"}) == Float8DelayedScaling(margin=2)
    assert find_target("nvfp4-square") == NVFP4BlockScaling(blocks="square")
    assert find_target("bfloat16") == torch.bfloat16
    assert [recipe_label(recipe) for recipe in short_names().values()] == list(short_names())
    assert recipe_label(MXFP8BlockScaling(element="e5m2", activations="dynamic")) == (
        "MXFP8BlockScaling(element='e5m2', blocks='row', scale_rounding='up')"
    )


def test_names_are_sorted_as_people_count() -> None:
    names = ["l.2.w", "l.10.w", "l.2.b", "l", "10", "9", "l.x", ""]
    assert in_natural_order(names) == ["", "9", "10", "l", "l.2.b", "l.2.w", "l.10.w", "l.x"]
    huge = "9" * 5000  # more digits than Python makes a number of
    assert in_natural_order([huge, "l.0", "l.", "l.07", "l.8"]) == [huge, "l.", "l.0", "l.07", "l.8"]


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_as_json_is_stable(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(succeeds(capsys, "inspect", checkpoint, "--json"))
    blob = found["bytes_entries"].pop()
    assert (blob["name"], blob["bytes"] > 0, found.pop("bytes_entries")) == ("step", True, [])
    assert found.pop("checksums") == StoredCheckpoint(checkpoint).has_checksums
    mxfp8 = {"type": "MXFP8BlockScaling", "element": "e4m3", "blocks": "row", "scale_rounding": "up"}
    nbytes = {"a": 64 * 64 + 64 * 2, "b": 32 * 32 + 32 * 4 + 4, "norm": 128}
    assert found == {
        "format": "dcp_adapters.inspect/1",
        "checkpoint": checkpoint,
        "format_version": 1,
        "world_size_at_least": 1,
        "files": 1,
        "tensors": [
            {"name": "model.[bold]norm[/bold]", "kind": "bfloat16", "recipe": None, "dtype": "bfloat16",
             "shape": [64], "parts": [], "bytes": nbytes["norm"], "chunks": 1},
            {"name": "model.a.weight", "kind": "mxfp8", "recipe": mxfp8, "dtype": "bfloat16", "shape": [64, 64],
             "parts": ["payload", "scale"], "bytes": nbytes["a"], "chunks": 1},
            {"name": "model.b.weight", "kind": "nvfp4", "recipe": {"type": "NVFP4BlockScaling", "blocks": "row"},
             "dtype": "bfloat16", "shape": [32, 64], "parts": ["payload", "scale", "global_scale"],
             "bytes": nbytes["b"], "chunks": 1},
        ],
        "totals": [
            {"kind": "mxfp8", "tensors": 1, "parameters": 4096, "bytes": nbytes["a"], "bytes_per_parameter": 1.03125},
            {"kind": "nvfp4", "tensors": 1, "parameters": 2048, "bytes": nbytes["b"],
             "bytes_per_parameter": nbytes["b"] / 2048},
            {"kind": "bfloat16", "tensors": 1, "parameters": 64, "bytes": 128, "bytes_per_parameter": 2.0},
        ],
        "total": {"kind": "total", "tensors": 3, "parameters": 6208, "bytes": sum(nbytes.values()),
                  "bytes_per_parameter": sum(nbytes.values()) / 6208},
    }  # fmt: skip


@pytest.mark.parametrize("rich", [True, False])
def test_inspect_prints_a_table_with_and_without_rich(
    rich: bool, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")
    lines = [line.split() for line in succeeds(capsys, "inspect", checkpoint).splitlines()]
    assert lines[0][0] == f"{checkpoint}:"
    assert " ".join(lines[0][1:]).startswith("format version 1, checksums: ")
    assert " ".join(lines[0]).endswith("world size: at least 1, files: 1")
    assert ["model.a.weight", "mxfp8", "[64,", "64]", "payload", "scale", "1", "4.12", "KiB"] in lines
    assert ["model.[bold]norm[/bold]", "bfloat16", "[64]", "1", "128", "B"] in lines
    assert ["mxfp8", "1", "4,096", "4.12", "KiB", "1.031"] in lines
    assert ["total", "3", "6,208", "5.38", "KiB", "0.8872"] in lines


def test_inspect_of_some_names(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(succeeds(capsys, "inspect", checkpoint, "--json", "--match", "*.b.*", "--match", "st?p"))
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.b.weight"]
    assert [blob["name"] for blob in found["bytes_entries"]] == ["step"]
    assert found["total"]["parameters"] == 2048


def test_inspect_of_a_checkpoint_without_a_manifest(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(succeeds(capsys, "inspect", dense, "--json"))
    assert (found["format_version"], found["checksums"]) == (None, False)
    assert [tensor["kind"] for tensor in found["tensors"]] == ["bfloat16", "bfloat16"]
    assert "no quantized tensors (not saved with QuantizedSavePlanner)" in succeeds(capsys, "inspect", dense)


def save_models(path: Path) -> None:
    save(models(names=("mxfp8",)), path)


def test_inspect_says_how_many_ranks_wrote(shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, save_models, shared_tmp_path / "2")
    found = json.loads(succeeds(capsys, "inspect", str(shared_tmp_path / "2"), "--json"))
    assert (found["world_size_at_least"], found["files"]) == (2, 2)
    assert {tensor["name"]: tensor["chunks"] for tensor in found["tensors"]}["mxfp8.layers.0.weight"] == 2


ESCAPE = "\x1b["


def inspected_on_a_terminal(checkpoint: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "200", **environment}.items():
            patched.setenv(name, value)
        patched.setattr(sys, "stdout", terminal)
        assert main(["inspect", checkpoint]) == 0
    return terminal.getvalue()


def test_inspect_has_colours_on_a_terminal_alone(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    plain = succeeds(capsys, "inspect", checkpoint)
    assert ESCAPE not in plain
    coloured = inspected_on_a_terminal(checkpoint, monkeypatch)
    assert "\x1b[36mmxfp8" in coloured
    assert "\x1b[36mbfloat16" not in coloured
    assert "\x1b[1mtensor" in coloured
    shown = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.split() for line in shown.splitlines()] == [line.split() for line in plain.splitlines()]
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        without = inspected_on_a_terminal(checkpoint, monkeypatch, **environment)
        assert without == plain
    monkeypatch.setenv("FORCE_COLOR", "1")  # a pipe stays plain: who reads it may be a program
    assert succeeds(capsys, "inspect", checkpoint) == plain
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert ESCAPE not in inspected_on_a_terminal(checkpoint, monkeypatch)


@pytest.mark.parametrize("rich", [True, False])
def test_a_name_does_not_steer_the_terminal(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    text = table(("name",), [["a\x1b[2Jb\nc\u202ed\x9b0m"], ["z\u00fcrich \u6771"]])
    assert [line.rstrip() for line in text.splitlines()] == [
        "name",
        "a\ufffd[2Jb\ufffdc\ufffdd\ufffd0m",
        "z\u00fcrich \u6771",
    ]


# -- report ------------------------------------------------------------------------------------------------------------


def test_report_writes_a_page(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"model": {"a.weight": values((64, 64), 0), "b.weight": values((32, 64), 1)}}, tmp_path / "right")
    target = tmp_path / "page.html"
    out = succeeds(capsys, "report", checkpoint, "--against", str(tmp_path / "right"), "-o", str(target))
    assert out == f"{target}: 3 tensors\n"
    text = target.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "lowest SNR" in text
    monkeypatch.chdir(tmp_path)
    assert succeeds(capsys, "report", checkpoint) == "q-report.html: 3 tensors\n"
    assert "Not measured" in (tmp_path / "q-report.html").read_text(encoding="utf-8")


def test_report_as_json_writes_a_page_only_where_asked(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    found = json.loads(succeeds(capsys, "report", checkpoint, "--against", checkpoint, "--json"))
    assert (found["format"], found["checkpoint"], found["against"]) == (
        "dcp_adapters.report/1", checkpoint, checkpoint,
    )  # fmt: skip
    assert [tensor["max_abs"] for tensor in found["tensors"]] == [0.0, 0.0, 0.0]
    assert set(tmp_path.iterdir()) == before
    json.loads(succeeds(capsys, "report", checkpoint, "--json", "-o", "page.html"))
    assert set(tmp_path.iterdir()) == {*before, tmp_path / "page.html"}


def test_report_of_some_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"a.weight": values((64, 64), 0), "b.weight": values((32, 64), 1)}
    save({"model": weights, "optim": {"a.exp_avg": values((64, 64), 2)}}, tmp_path / "run")
    save({"model": weights, "optim": {"b.exp_avg": values((64, 64), 2)}}, tmp_path / "right")
    command = ("report", str(tmp_path / "run"), "--against", str(tmp_path / "right"), "--json")
    found = json.loads(succeeds(capsys, *command, "--match", "model.*"))
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.a.weight", "model.b.weight"]
    assert found["only_in_against"] == 0
    assert json.loads(succeeds(capsys, *command))["only_in_against"] == 1
    assert fails(capsys, *command, "--match", "x.*") == "--match x.* matches no tensor; see the names with inspect"
    assert "have no tensor of one name" in fails(capsys, *command, "--match", "optim.*")


def test_report_refuses_before_it_measures(
    checkpoint: str, dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredCheckpoint, "read", None)  # nothing is read
    for target in (tmp_path / "no" / "page.html", tmp_path):
        message = fails(capsys, "report", checkpoint, "-o", str(target))
        assert message == f"{target}: expected a file in a directory that exists"
    message = fails(capsys, "report", checkpoint, "--against", dense, "-o", str(tmp_path / "page.html"))
    assert message.startswith(f"{checkpoint} and {dense} have no tensor of one name, so nothing can be compared: ")
    assert fails(capsys, "report", checkpoint, "--against", "nowhere") == "nowhere: no such directory"
    assert not (tmp_path / "page.html").exists()


def test_a_page_without_jinja2_names_the_extra(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert json.loads(succeeds(capsys, "report", checkpoint, "--json"))["checkpoint"] == checkpoint
    monkeypatch.setattr(StoredCheckpoint, "read", None)  # nothing is read
    message = fails(capsys, "report", checkpoint, "-o", str(tmp_path / "page.html"))
    assert message == "a page is made by jinja2, which is not installed: pip install 'qtensor[report]'"


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_tells_whole_from_damaged(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert succeeds(capsys, "verify", checkpoint).startswith("no errors (")
    whole = json.loads(succeeds(capsys, "verify", checkpoint, "--json"))
    assert (whole["format"], whole["findings"]) == ("dcp_adapters.verify/1", [])
    assert whole["chunks"] > 0
    os.truncate(f"{checkpoint}/__0_0.distcp", 2000)
    damaged = json.loads(succeeds(capsys, "verify", checkpoint, "--json", status=1))
    assert any(f["severity"] == "error" and f["file"] == "__0_0.distcp" for f in damaged["findings"])
    text = succeeds(capsys, "verify", checkpoint, status=1)
    assert "__0_0.distcp" in text
    errors = sum(f["severity"] == "error" for f in damaged["findings"])
    assert f"{errors} errors, {len(damaged['findings']) - errors} warnings (" in text


# -- diff and convert --------------------------------------------------------------------------------------------------


def test_diff_status(checkpoint: str, dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert succeeds(capsys, "diff", checkpoint, checkpoint) == "no differences (4 entries compared)\n"
    text = succeeds(capsys, "diff", checkpoint, dense, status=1)
    assert ["model.a.weight", "only", "in", "a", "mxfp8", "as", "bfloat16", "[64,", "64]"] in [
        line.split() for line in text.splitlines()
    ]
    assert text.endswith("6 of 6 entries differ\n")
    found = json.loads(succeeds(capsys, "diff", checkpoint, checkpoint, "--json"))
    assert found == {
        "format": "dcp_adapters.diff/1",
        "a": checkpoint,
        "b": checkpoint,
        "compared": 4,
        "differences": [],
    }


def test_convert_and_diff(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"{checkpoint}-b"
    arguments = ("--to", "mxfp8", "--option", "blocks=square", "--exclude", "*.b.*")
    head, rounded, _, summary = succeeds(capsys, "convert", checkpoint, out, *arguments).splitlines()
    assert head.split() == ["rounded", "from", "max", "|B-A|", "|B-A|/|A|", "SNR", "dB"]
    assert rounded.split()[:2] == ["model.a.weight", "mxfp8"]
    assert summary == f"{out}: 1 tensors converted to mxfp8-square (0 exactly, 1 rounded), 3 entries copied"
    (difference,) = json.loads(succeeds(capsys, "diff", checkpoint, out, "--json", status=1))["differences"]
    assert (difference["name"], difference["kind"]) == ("model.a.weight", "recipe")
    assert (difference["a"], difference["b"]) == ("mxfp8 as bfloat16 [64, 64]", "mxfp8-square as bfloat16 [64, 64]")
    assert difference["snr_db"] > 10
    assert rounded.split()[2:] == [
        f"{difference['max_abs']:.3g}", f"{difference['relative']:.3g}", f"{difference['snr_db']:.1f}"
    ]  # fmt: skip
    assert StoredCheckpoint(out).entries["model.a.weight"].recipe == MXFP8BlockScaling(blocks="square")


def test_convert_tells_what_was_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = values((64, 64), 0)
    wide = quantize(x, MXFP4BlockScaling())
    wide.scale[0, 0] -= 40
    save({"fits": quantize(x, MXFP4BlockScaling()), "wide": wide, "dense": x}, tmp_path / "a")
    found = json.loads(succeeds(capsys, "convert", f"{tmp_path}/a", f"{tmp_path}/b", "--to", "nvfp4", "--json"))
    fits, rounded = found.pop("tensors")
    assert found == {
        "format": "dcp_adapters.convert/1",
        "source": f"{tmp_path}/a",
        "destination": f"{tmp_path}/b",
        "to": "nvfp4",
        "copied": 1,
    }
    nothing = {"exact": True, "max_abs": 0.0, "relative": 0.0, "snr_db": None, "not_finite": 0}
    assert fits == {"name": "fits", "from": "mxfp4", **nothing}
    assert (rounded["name"], rounded["exact"]) == ("wide", False)
    (difference,) = (
        each
        for each in json.loads(succeeds(capsys, "diff", f"{tmp_path}/a", f"{tmp_path}/b", "--json", status=1))[
            "differences"
        ]
        if each["name"] == "wide"
    )
    assert {key: rounded[key] for key in nothing if key != "exact"} == {
        key: difference[key] for key in nothing if key != "exact"
    }
    text = succeeds(capsys, "convert", f"{tmp_path}/a", f"{tmp_path}/c", "--to", "float8-block-row")
    assert text.splitlines()[-1].endswith(
        "2 tensors converted to float8-block-row (1 exactly, 1 rounded), 1 entries copied"
    )


def test_an_exclude_that_matches_nothing_is_told(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", checkpoint, f"{checkpoint}-b", "--to", "float16", "--exclude", "x", "y", "*.a.*"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"python -m dcp_adapters: warning: --exclude {pattern} matches no tensor" for pattern in ("x", "y")
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_is_for_terminals(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bar(*arguments: str) -> str:
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            assert main(arguments) == 0
        return terminal.getvalue()

    assert "converting: 100%" in bar("convert", checkpoint, f"{checkpoint}-b", "--to", "float16")
    assert "comparing: 100%" in bar("diff", checkpoint, checkpoint)
    assert "measuring: 100%" in bar("report", checkpoint, "-o", f"{checkpoint}.html")
    assert "verifying: " in bar("verify", checkpoint)
    assert bar("diff", checkpoint, checkpoint, "--no-progress") == ""


# -- the program -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_has_examples(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n  python -m dcp_adapters " in text
    assert all(len(line) <= 120 for line in text.splitlines())


ONE_COMMAND_ALONE = """
import sys
from dcp_adapters.cli.main import main

def helped(*arguments):
    try:
        main([*arguments, "--help"])
    except SystemExit:
        return {name.removeprefix("dcp_adapters.") for name in sys.modules if name.startswith("dcp_adapters.")}

shared = {"cli", "cli.main", "cli.printing"}
loaded = helped()
assert {name for name in loaded if name.startswith("cli")} == shared, loaded
loaded = helped("inspect")
assert {name for name in loaded if name.startswith("cli")} == {*shared, "cli.arguments", "cli.inspect"}, loaded
assert not {name for name in loaded if name.startswith(("convert", "delta.files", "digests", "gguf", "hf.exporting"))}
"""


def test_a_command_imports_nothing_of_the_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_COMMAND_ALONE], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_argument_may_be_named_like_a_command(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "inspect", "delta") == "delta: no such directory"
    assert succeeds(capsys, "inspect", checkpoint, "--match", "convert")


def test_an_interrupt_is_one_line(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StoredCheckpoint, "read", interrupt)
    assert main(["diff", checkpoint, checkpoint]) == 2
    assert capsys.readouterr().err == "python -m dcp_adapters: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_traceback(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        assert main(["inspect", checkpoint]) == 2
        pipe.write("what python flushes at its end goes nowhere\n")


def test_the_module_runs_as_a_program(checkpoint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dcp_adapters", "convert", checkpoint, f"{checkpoint}-b", "--to", "nvfp4"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = f"{checkpoint}-b: 1 tensors converted to nvfp4 (0 exactly, 1 rounded), 3 entries copied"
    assert done.stdout.splitlines()[-1] == summary


def test_a_text_that_is_no_path_is_refused(capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for bad, why in (("a\0b", "it holds a NUL"), ("a\ud800b", "surrogates not allowed")):
        for command in (
            *(["inspect", bad], ["verify", bad], ["digest", checkpoint, bad], ["diff", bad, checkpoint]),
            *(["report", checkpoint, "-o", bad], ["report", checkpoint, "--against", bad]),
            *(["convert", checkpoint, bad, "--to", "bfloat16"], ["delta", checkpoint, checkpoint, bad]),
            *(["export", checkpoint, out, "--config", bad], ["export", checkpoint, out, "--rest", bad]),
            *(["export", checkpoint, out, "--layout", "gguf", "--like", bad], ["apply", checkpoint, bad, out]),
        ):
            assert fails(capsys, *command) == f"{bad!r} is no path and no name: {why}"
    assert not Path(out).exists()


def test_a_directory_whose_name_is_no_text(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linux has names of any bytes; stdout takes text alone."""
    name = os.fsdecode(bytes(tmp_path) + b"/\xff")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    for command in (["convert", checkpoint, name, "--to", "bfloat16"], ["inspect", name], ["verify", name]):
        assert main(command) == 0, capsys.readouterr().err
