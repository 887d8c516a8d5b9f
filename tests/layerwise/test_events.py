"""What a run tells: events in their order on every rank, a bar on one terminal, and the report of what was done."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from layerwise import AWQ, GPTQ, Event
from tests.layerwise.small_runs import LAYERS, Case, Stop, batches, model_of, own, run, stopped, stopping
from tests.ranks import run_ranks
from tests.sampling import sampled

NAMES = [*(f"layers.{index}" for index in range(LAYERS)), ""]
STAGES = len(NAMES)
HELD = ["layer_start", "capture", "calibrate", "write", "metrics"]  # in this order, while the weights are gathered
LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "spare"]


def events_of(case: Case, **options: Any) -> list[Event]:
    told: list[Event] = []
    run(model_of(case), case, on_event=told.append, **options)
    return told


def shown(events: list[Event]) -> list[tuple[str, str, int, int]]:
    return [(event.kind, event.layer, event.index, event.count) for event in events]


def expected(saved_after: tuple[int, ...] = (), resumed: int = 0) -> list[tuple[str, str, int, int]]:
    told = []
    for index, name in enumerate(NAMES):
        kinds = ["resumed"] if index < resumed else [*HELD, *(["checkpoint"] if index in saved_after else [])]
        told += [(kind, name, index, STAGES) for kind in kinds]
    return told


def events_in_turn(case: Case, path: Path) -> list[Any]:
    """Without a checkpoint; with one; when that is finished; and when it was stopped."""
    told = [shown(events_of(case))]
    told.append(shown(events_of(case, checkpoint_dir=path / "whole", save_every=2)))
    told.append(shown(events_of(case, checkpoint_dir=path / "whole")))
    stopped(model_of(case), case, path / "stopped")
    told.append(shown(events_of(case, checkpoint_dir=path / "stopped")))
    return told


def check_events(told: list[Any]) -> None:
    assert told[0] == expected()
    assert told[1] == expected(saved_after=(1, 3))
    assert told[2] == expected(resumed=STAGES)
    assert told[3] == expected(saved_after=(1, 2, 3), resumed=1)


CASES = {"max": Case(), "gptq": Case(algorithm=GPTQ())}


@sampled("case", CASES.values(), [CASES["gptq"]], ids=CASES)
def test_events_in_their_order(tmp_path: Path, case: Case) -> None:
    check_events(events_in_turn(case, tmp_path))


def one_rank_without_data(path: Path) -> list[Any]:
    data = batches() if dist.get_rank() == 1 else []
    return [*events_in_turn(Case(), path), shown(events_of(Case(), data=data))]


def test_every_rank_is_told_the_same_whatever_data_it_has(shared_tmp_path: Path) -> None:
    first, second = run_ranks(2, one_rank_without_data, shared_tmp_path)
    assert first == second
    assert first.pop() == expected()
    check_events(first)


def test_what_events_hold(tmp_path: Path) -> None:
    for event in events_of(Case(), checkpoint_dir=tmp_path):
        if event.kind == "metrics":
            names = LINEARS if event.layer else ["lm_head"]
            prefix = f"{event.layer}." if event.layer else ""
            assert [record.name for record in event.data["records"]] == [f"{prefix}{name}.weight" for name in names]
            assert {record.layer for record in event.data["records"]} == {event.index if event.layer else None}
            assert 5 < event.data["snr_db"] < 80
        elif event.kind == "checkpoint":
            assert [*(tmp_path / event.data["directory"]).glob("*.distcp")]
        else:
            assert event.data == {}
    with pytest.raises(AttributeError):
        event.kind = "other"  # type: ignore[misc]


def test_while_a_layer_is_told_of_its_weights_are_plain() -> None:
    run_ranks(2, weights_are_gathered)


def weights_are_gathered() -> None:
    model = model_of()
    plain = model_of(shard=False)

    def look(event: Event) -> None:
        names = [f"{event.layer}.q_proj.weight", f"{event.layer}.norm1.weight"] if event.layer else ["lm_head.weight"]
        for name in names:
            param = model.get_parameter(name)
            assert type(param).__name__ == "Parameter", event
            assert param.shape == plain.get_parameter(name).shape
            changed = bool((param != plain.get_parameter(name)).any())
            assert changed == (event.kind in ("write", "metrics") and "norm" not in name), event

    run(model, on_event=look)


# -- the bar -----------------------------------------------------------------------------------------------------------


class Terminal:
    """A stream that says it is a terminal, or not."""

    def __init__(self, *, real: bool) -> None:
        self.real, self.text = real, ""

    def isatty(self) -> bool:
        return self.real

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def on_terminal(real: bool, **options: Any) -> str:
    """What appears on stderr."""
    before, sys.stderr = sys.stderr, Terminal(real=real)  # type: ignore[assignment]
    try:
        run(model_of(), **options)
    except Stop:
        pass
    finally:
        stream, sys.stderr = sys.stderr, before
    return stream.text  # type: ignore[attr-defined]


def test_a_bar_on_a_terminal_only(tmp_path: Path) -> None:
    text = on_terminal(True, checkpoint_dir=tmp_path)
    assert f"{STAGES}/{STAGES}" in text
    assert "layers.0: layer_start" in text
    assert "outside the layers: " in text
    assert text.endswith("\n")  # closed
    assert on_terminal(False) == ""
    assert on_terminal(True, progress=False) == ""
    again = on_terminal(True, checkpoint_dir=tmp_path)
    assert "outside the layers: resumed" in again
    assert f"{STAGES}/{STAGES}" in again


def test_the_bar_of_a_run_that_failed_is_closed() -> None:
    text = on_terminal(True, on_event=stopping("write", 1))
    assert f"1/{STAGES}" in text
    assert text.endswith("\n")


def test_only_the_first_rank_shows_a_bar() -> None:
    first, second = run_ranks(2, on_terminal, True)
    assert f"{STAGES}/{STAGES}" in first
    assert second == ""


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_of_a_run(tmp_path: Path) -> None:
    case = Case(algorithm=AWQ())
    told: list[Event] = []
    result = run(model_of(case), case, on_event=told.append)
    report = result.report
    names = [f"layers.{index}.{name}.weight" for index in range(LAYERS) for name in LINEARS] + ["lm_head.weight"]
    assert [record.name for record in report.records] == names
    assert set(names) <= set(result.state_dict())
    by_event = [record for event in told if event.kind == "metrics" for record in event.data["records"]]
    assert by_event == [*report.records]
    errors = {event.index: event.data["snr_db"] for event in told if event.kind == "metrics" and event.layer}
    assert report.layer_errors == errors
    assert [*errors] == [*range(LAYERS)]
    before = model_of(case, shard=False)
    for record in report.records:
        starved = record.name in result.starved
        assert record.tokens == (0 if starved else sum(batch.numel() for batch in batches()))
        assert (record.input_amax is None) == starved
        assert (record.snr_db is None) == starved
        assert starved == (".spare." in record.name)
        assert record.weight_amax > 0
    unfolded = {record.name: record.weight_amax for record in run(model_of()).report.records}
    assert all(value == float(before.get_parameter(name).detach().abs().max()) for name, value in unfolded.items())
    lines = report.table().splitlines()
    assert lines[0] == str(case.recipe)
    assert [line.split()[1] for line in lines[2:]] == names
    assert len(report.table(worst=3).splitlines()) == 5
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    assert type(report).load(report.save(tmp_path / "report.json")).to_json() == report.to_json()
    assert report.plot(tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def report_of(data: Any = None) -> dict[str, Any]:
    return run(model_of(), data=data if data is not None else own()).report.to_json()


def test_every_rank_has_the_same_report() -> None:
    first, second = run_ranks(2, report_of)
    assert first == second
    alone = report_of()
    for here, there in zip(first["records"], alone["records"], strict=True):
        for key in ("layer", "name", "tokens", "weight_amax", "input_amax", "warning"):
            assert here[key] == there[key]
        # of other rows, for each rank samples its own
        assert here["snr_db"] is None or math.isclose(here["snr_db"], there["snr_db"], abs_tol=3)


def test_a_resumed_report_says_what_came_from_the_checkpoint(tmp_path: Path) -> None:
    whole = run(model_of()).report
    stopped(model_of(), Case(stop=("checkpoint", 1)), tmp_path)
    report = run(model_of(), checkpoint_dir=tmp_path).report
    assert report.resumed == (0, 1)
    assert report.table() == f"{whole.table()}\nfrom the checkpoint of an earlier run: layers 0-1"
    assert report.to_json() == {**whole.to_json(), "resumed": [0, 1]}
