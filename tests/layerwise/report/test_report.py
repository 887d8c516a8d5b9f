"""The report of a calibration: its table, its JSON, its picture."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from layerwise.report.report import LinearReport, Report, decibels

KINDS = {"self_attn.q_proj": 22.0, "self_attn.o_proj": 18.0, "mlp.down_proj": 15.0}


def linear(layer: int | None = 0, name: str = "model.layers.0.mlp.up_proj.weight", **values) -> LinearReport:
    return LinearReport(layer=layer, name=name, **{"tokens": 1024, "weight_amax": 1.5, **values})


def example() -> Report:
    records = [
        linear(i, f"model.layers.{i}.{kind}.weight", input_amax=3.25, snr_db=snr + i / 2)
        for i in range(6)
        for kind, snr in KINDS.items()
    ]
    records.append(linear(None, "lm_head.weight", input_amax=8.0, snr_db=30.0))
    records.append(linear(5, "model.layers.5.mlp.router.weight", tokens=0, warning="no token reached it"))
    return Report(
        records=tuple(records), layer_errors={i: 12.0 + i for i in range(6)}, resumed=(0, 1, 3), title="NVFP4"
    )


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [(100.0, 1.0, 20.0), (1.0, 1.0, 0.0), (1.0, 100.0, -20.0), (1.0, 0.0, math.inf), (0.0, 1.0, -math.inf)],
)
def test_decibels(signal: float, noise: float, expected: float) -> None:
    assert decibels(signal, noise) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "q_proj"),
        ("model.layers.3.mlp.experts.gate_up_proj[12]", "gate_up_proj"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "up_proj"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_the_kind_of_a_linear(name: str, kind: str) -> None:
    assert linear(name=name).kind == kind


def test_the_table_has_a_line_for_each_linear_and_only_the_columns_that_are_used() -> None:
    lines = example().table().splitlines()
    assert lines[0] == "NVFP4"
    assert lines[1].split() == ["layer", "linear", "tokens", "weight", "amax", "input", "amax", "SNR", "dB", "warning"]
    assert lines[2].split() == ["0", "model.layers.0.self_attn.q_proj.weight", "1024", "1.5", "3.25", "22", "-"]
    assert lines[-3].split()[:4] == ["-", "lm_head.weight", "1024", "1.5"]
    assert lines[-2].endswith("no token reached it")
    assert lines[-1] == "from the checkpoint of an earlier run: layers 0-1, 3"
    assert len(lines) == 2 + len(example().records) + 1


def test_a_choice_of_zero_is_shown() -> None:
    head, line = Report(records=(linear(alpha=0.0, clip=1.0),)).table().splitlines()
    assert head.split()[-2:] == ["clip", "alpha"]
    assert line.split()[-2:] == ["1", "0"]


def test_the_worst_come_first_and_what_was_not_measured_not_at_all() -> None:
    lines = example().table(worst=2).splitlines()
    assert [line.split()[1] for line in lines[2:4]] == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    assert len(lines) == 5


def test_the_table_is_plain_text_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    assert example().table().splitlines()[2].split()[1] == "model.layers.0.self_attn.q_proj.weight"


def test_a_file_holds_all_of_it_also_numbers_that_json_has_none_for(tmp_path: Path) -> None:
    odd = (linear(snr_db=math.inf, warning="exact"), linear(snr_db=-math.inf), linear(name="inf", weight_amax=math.nan))
    report = Report(records=(*example().records, *odd), layer_errors={0: math.inf, 1: 3.5}, resumed=(0,), title="t")
    path = report.save(tmp_path / "report.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = Report.load(path)
    assert read.records[:-1] == report.records[:-1]
    assert math.isnan(read.records[-1].weight_amax)
    assert read.records[-1].name == "inf"
    assert (read.layer_errors, read.resumed, read.title) == (report.layer_errors, report.resumed, report.title)


def test_a_report_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="a report of version 2; this library reads version 1"):
        Report.from_json({**example().to_json(), "version": 2})


ODD: dict[str, tuple[Any, str]] = {  # what becomes of a file, and what is said of it
    "a cut": (lambda r: json.dumps(r)[:-1], "it is no JSON: "),
    "depth": (lambda r: "[" * 100_000, "it is no JSON: maximum recursion"),
    "a list": (lambda r: "[]", "it holds a list; give a file that Report.save wrote"),
    "no records": (lambda r: json.dumps({"version": 1}), "can not be read .KeyError: 'records'.; give a file that"),
    "a field": (lambda r: json.dumps({**r, "records": [{"nobody": 1}]}), "can not be read .TypeError: "),
    "a type": (lambda r: json.dumps({**r, "records": [{**r["records"][0], "tokens": [1]}]}), "tokens is a list"),
    "a layer": (lambda r: json.dumps({**r, "layer_errors": {"x": 1}}), "can not be read .ValueError: "),
}


@pytest.mark.parametrize("case", ODD)
def test_a_file_that_holds_no_report_is_named(case: str, tmp_path: Path) -> None:
    change, words = ODD[case]
    path = tmp_path / "report.json"
    path.write_text(change(example().to_json()))
    with pytest.raises(ValueError, match=f"{path}: .*{words}"):
        Report.load(path)


def test_the_picture_has_a_line_for_each_kind_of_linear_and_one_for_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    records = (*example().records, linear(2, "model.layers.2.mlp.up_proj.weight", snr_db=9.0, warning="damped twice"))
    Report(records=records, layer_errors={**example().layer_errors, 6: math.inf}, title="NVFP4").plot(
        tmp_path / "a.png"
    )
    axes = drawn[0].axes[0]
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}
    assert set(lines) == {"q_proj", "o_proj", "down_proj", "up_proj", "whole layer"}
    assert lines["down_proj"] == [[i, 15 + i / 2] for i in range(6)]
    assert lines["whole layer"] == [[i, 12.0 + i] for i in range(6)]
    assert axes.collections[0].get_offsets().tolist() == [[2.0, 9.0]]
    assert axes.get_title() == "NVFP4"


def test_many_experts_are_one_line_with_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    experts = [
        linear(i, f"model.layers.{i}.mlp.experts.up_proj[{expert}]", snr_db=10.0 + 2 * expert)
        for i in range(2)
        for expert in range(3)
    ]
    Report(records=experts).plot(tmp_path / "a.png")
    (line,), (band,) = drawn[0].axes[0].lines, drawn[0].axes[0].collections
    assert line.get_xydata().tolist() == [[0.0, 12.0], [1.0, 12.0]]
    low, high = band.get_paths()[0].get_extents().intervaly
    assert (low, high) == (10.0, 14.0)


def test_the_picture_is_a_file_that_its_suffix_names(tmp_path: Path) -> None:
    assert example().plot(tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    outside = Report(records=(linear(None, "lm_head.weight", snr_db=30.0), linear(0)))
    with pytest.raises(ValueError, match=r"a\.png: nothing to draw, no linear of a layer has an SNR"):
        outside.plot(tmp_path / "a.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"drawing needs matplotlib.*pip install 'qtensor-fsdp\[calibration\]'"):
        example().plot(tmp_path / "a.png")
