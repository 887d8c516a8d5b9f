"""Stopped runs go on behind their last window, on any number of ranks, to the very bytes of an uninterrupted run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from layerwise import GPTQ, Event
from layerwise.resume.progress import BACKUP, PROGRESS, _record_digest
from tests.layerwise.killed_runs import at_event
from tests.layerwise.small_runs import (
    CASES,
    LAYERS,
    Case,
    Found,
    Layer,
    Stop,
    found,
    model_of,
    run,
    stopped,
    stopping,
)
from tests.ranks import RankFailure, run_ranks, run_ranks_each, under_torchrun
from tests.sampling import sampled

if TYPE_CHECKING:
    from torch import nn

REPO = Path(__file__).resolve().parent.parent.parent
STAGES = LAYERS + 1  # the head is one more
ON_THREE = ("max, static", "smoothquant")
ON_ONE = ("max, quantized storage", "mse", "awq", "gptq", "awq, then gptq")


def saved(case: Case) -> int:
    """How many layers a run that stopped where the case says has saved, one a window."""
    kind, index = case.stop
    return index + (kind == "checkpoint")


# -- on any number of ranks --------------------------------------------------------------------------------------------


def whole_and_stopped(name: str, base: Path) -> Found:
    """An uninterrupted run without FSDP; and another that leaves something for others."""
    case = CASES[name]
    stopped(model_of(case, shard=False), case, base / "of one" / name)
    model = model_of(case, shard=False)
    return found(run(model, case), model)


def resumed(name: str, path: Path) -> Found:
    """The run in `path` continued on these ranks."""
    model = model_of(CASES[name])
    return found(run(model, CASES[name], checkpoint_dir=path / name), model)


def resumed_then_stopped(name: str, base: Path) -> Found:
    """What one process has left goes on, to an end; and these ranks leave something for others."""
    here = resumed(name, base / "of one")
    if name in ON_ONE:
        assert_returns_at_once(CASES[name], model_of(CASES[name]), base / "of one" / name, here)
    for ranks in [1] * (name in ON_ONE) + [3] * (name in ON_THREE):
        stopped(model_of(CASES[name]), CASES[name], base / f"of two, for {ranks}" / name)
    return here


def resumed_and_finished(name: str, base: Path) -> Found:
    """What two ranks have left goes on; what one began and two finished is there for three, in either model."""
    case, finished = CASES[name], base / "of one" / name
    model = model_of(case)
    here = found(run(model, case, checkpoint_dir=base / "of two, for 3" / name), model)
    at_once = assert_returns_at_once(case, model_of(case), finished, here)
    assert assert_returns_at_once(case, model, finished, here).records == at_once.records
    return here


def assert_returns_at_once(case: Case, model: nn.Module, path: Path, expected: Found) -> Found:
    """A finished run does nothing but to put its result into the model."""
    Layer.calls = 0
    result = run(model, case, checkpoint_dir=path)
    assert Layer.calls == 0
    again = found(result, model)
    assert again.same() == expected.same()
    assert again.resumed == (*range(STAGES),)
    return again


@pytest.mark.full
def test_every_algorithm_goes_on_to_the_same_bytes_on_any_number_of_ranks(shared_tmp_path: Path) -> None:
    one = run_ranks_each(1, CASES, whole_and_stopped, shared_tmp_path)[0]
    whole = dict(zip(CASES, one, strict=True))
    ranks = {
        2: run_ranks_each(2, CASES, resumed_then_stopped, shared_tmp_path),
        3: run_ranks_each(3, ON_THREE, resumed_and_finished, shared_tmp_path),
        1: run_ranks_each(1, ON_ONE, resumed, shared_tmp_path / "of two, for 1"),
    }
    names = {1: ON_ONE, 2: CASES, 3: ON_THREE}
    for count, told in ranks.items():
        for own in told:
            for name, here in zip(names[count], own, strict=True):
                assert here.same() == whole[name].same(), f"{name} on {count} ranks"
                assert here.resumed == (*range(saved(CASES[name])),), f"{name} on {count} ranks"


def on_all_killed(path: Path) -> None:
    """At an event of the third layer, when the first two are saved."""
    run(model_of(), checkpoint_dir=path, save_every=2, on_event=at_event("metrics", 2))


def resumed_plainly(path: Path) -> Found:
    model = model_of()
    return found(run(model, checkpoint_dir=path, save_every=2), model)


@pytest.mark.skipif(under_torchrun(), reason="kills its ranks")
def test_ranks_that_were_killed_are_continued_by_more(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="killed by SIGKILL"):
        run_ranks(2, on_all_killed, tmp_path)
    model = model_of()
    whole = found(run(model), model)
    for here in run_ranks(3, resumed_plainly, tmp_path):
        assert here.same() == whole.same()
        assert here.resumed == (0, 1)


# -- in a single process -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.layerwise.killed_runs", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["point"] for one in told if not one["same"]] == []
    assert [one["resumed"] for one in told[:6]] == [0, 0, 1, 2, LAYERS, STAGES]
    assert all(one["killed"] for one in told[:6])
    steps = [one for one in told if isinstance(one["point"], int) and one["killed"]]
    assert len({one["resumed"] for one in steps}) >= 3  # so the kills were spread over the run


@sampled(("save_every", "found_first"), [(1, 3), (2, 2), (STAGES + 5, 0)], [(2, 2)])
def test_a_window_that_was_not_finished_is_calibrated_again(tmp_path: Path, save_every: int, found_first: int) -> None:
    case = Case(algorithm=GPTQ(), stop=("metrics", LAYERS))
    model = model_of(case)
    whole = found(run(model, case), model)
    stopped(model_of(case), case, tmp_path, save_every=save_every)
    told: list[Event] = []
    model = model_of(case)
    here = found(run(model, case, checkpoint_dir=tmp_path, save_every=save_every, on_event=told.append), model)
    assert here.same() == whole.same()
    assert here.records == whole.records
    assert here.resumed == (*range(found_first),)
    assert [event.index for event in told if event.kind == "resumed"] == [*range(found_first)]
    assert {event.index for event in told if event.kind == "calibrate"} == {*range(found_first, STAGES)}
    saved_at = [event.index for event in told if event.kind == "checkpoint"]
    assert saved_at == [*range(found_first + save_every - 1, LAYERS, save_every), LAYERS]


def test_another_save_every_continues_the_same_run(tmp_path: Path) -> None:
    case = Case(stop=("metrics", 2))
    stopped(model_of(), case, tmp_path, save_every=2)
    model = model_of()
    here = found(run(model, checkpoint_dir=tmp_path, save_every=1), model)
    whole = found(run(model := model_of()), model)
    assert here.same() == whole.same()
    assert here.resumed == (0, 1)


def test_a_run_stopped_again_and_again_comes_to_its_end(tmp_path: Path) -> None:
    case = CASES["smoothquant"]
    for index in (0, 1, 1):
        stopped(model_of(case), dataclasses.replace(case, stop=("write", index)), tmp_path)
    model = model_of(case)
    here = found(run(model, case, checkpoint_dir=tmp_path), model)
    whole = found(run(model := model_of(case), case), model)
    assert here.same() == whole.same()
    assert here.records == whole.records
    assert here.starved == tuple(f"layers.{index}.spare.weight" for index in range(LAYERS))


@pytest.mark.parametrize("name", ["max, static", "local_hessian", "smoothquant", "awq"])
def test_what_a_checkpoint_holds(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = model_of(case)
    result = run(model, case, checkpoint_dir=tmp_path)
    held: dict[str, int] = {}
    for window in tmp_path.rglob(".metadata"):
        for entry, kept in FileSystemReader(window.parent).read_metadata().state_dict_metadata.items():
            if hasattr(kept, "size"):
                held[entry] = kept.size.numel()
    weights = {entry: value for entry, value in result.state_dict().items() if "input_scale" not in entry}
    quantized = {entry: value for entry, value in weights.items() if hasattr(value, "parts")}
    assert len(quantized) == 6 * LAYERS + 1
    for entry, value in quantized.items():
        assert any(other.startswith(f"{entry}.") for other in held), entry
        if case.algorithm.writes_weights:
            assert held[f"{entry}.payload"] == value.parts()["payload"].numel()
    if case.algorithm.writes_weights:
        assert {*weights} - {*quantized} <= {*held}
    else:  # scales only, one for a row of 16 elements or more
        assert not [entry for entry in held if "payload" in entry]
        scales = [numel for entry, numel in held.items() if entry.startswith((*quantized,))]
        assert sum(scales) <= sum(value.numel() for value in quantized.values()) / 16 + len(quantized)


FORGED: dict[str, tuple[Any, str]] = {  # what becomes of the second window's record, and what is said of it
    "no list": (lambda window: window.update(extra=None), "the notes are None, expected a list of 1"),
    "two notes": (lambda window: window["extra"].append({}), "the notes are a list, expected a list of 1"),
    "too many layers": (lambda window: window.update(last=9), "9 is not what .*: there are 4 stages"),
    "a number": (lambda window: window.update(extra=[7]), "its note is 7, expected dense, input_amax, gathered"),
    "a key": (lambda window: window["extra"][0].pop("pairs"), "its note is a dict, expected dense"),
    "dense": (lambda window: window["extra"][0].update(dense=["w"]), "dense is a list, expected names of its param"),
    "amax": (lambda window: window["extra"][0].update(input_amax={}), "input_amax is a dict, expected a number or n"),
    "dtype": (
        lambda window: window["extra"][0]["gathered"].update({"layers.1.spare.weight": "Tensor"}),
        "gathered is a dict, expected a dtype for each of layers.1",
    ),
    "records": (lambda window: window["extra"][0].update(records=[{"x": 1}]), "linears can not be read .TypeError"),
    "no records": (lambda window: window["extra"][0].update(records=5), "linears can not be read .TypeError"),
    "a record": (lambda window: window["extra"][0]["records"][0].update(tokens="many"), "can not be read .ValueError"),
    "snr": (lambda window: window["extra"][0].update(output_snr=[]), "output_snr is a list, expected a number or none"),
    "pairs": (lambda window: window["extra"][0].update(pairs=[[["x"], "y"]]), "pairs are a list, expected lists of"),
}


def test_forged_notes_are_refused_by_name_and_nothing_is_changed(tmp_path: Path) -> None:
    """Their digest fits, so they are no damage; a run would end in the middle with a KeyError."""
    case = CASES["smoothquant"]
    stopped(model_of(case), case, tmp_path)
    sound = (tmp_path / PROGRESS).read_text()
    model = model_of(case)
    for change, words in FORGED.values():
        record = json.loads(sound)["progress"]
        change(record["windows"][1])
        text = json.dumps({"version": 1, "digest": _record_digest(1, record), "progress": record})
        for name in (PROGRESS, BACKUP):
            (tmp_path / name).write_text(text)
        told = rf"{PROGRESS}: what it notes of layers 1\.\..*{words}.*\. Nothing has been changed; give an empty"
        with pytest.raises(ValueError, match=told):
            run(model, case, checkpoint_dir=tmp_path)
        assert (tmp_path / PROGRESS).read_text() == text
    (tmp_path / PROGRESS).write_text(sound)
    assert found(run(model, case, checkpoint_dir=tmp_path), model).resumed == (0, 1)


def test_nothing_is_written_without_a_checkpoint_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stop):
        run(model_of(), on_event=stopping("write", 1))
    assert run(model_of()).report.resumed == ()
    assert [*tmp_path.iterdir()] == []
