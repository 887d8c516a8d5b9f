"""What else reads checkpoints and models with compressed states: each gives the right bytes, or refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dcp_adapters import WeightStream, digest, export_hf, import_hf, remove_checkpoints
from dcp_adapters.cli.main import main
from dcp_adapters.delta import apply_deltas
from dcp_adapters.stored.verifying.verify import verify
from tests.dcp_adapters.cases import load, save
from tests.dcp_adapters.streams.cases import files, streamed
from tests.dcp_adapters.test_states_of_other_forms import FP32, HALF, SMALL, Run
from tests.ranks import run_ranks

FORMS = {"small": SMALL, "half": HALF, "moments alone": FP32 | {"moments": "float8"}}


class Saved:
    """A run at two steps: saved whole, and the second as a delta to the first, too."""

    def __init__(self, folder: Path, form: dict[str, str], *, flat: bool) -> None:
        self.form, self.flat, self.run = form, flat, Run(form)
        self.first, self.second, self.delta = (folder / name for name in ("first", "second", "delta"))
        self.run.step(2)
        save(self.run.state(flat=flat), self.first, digest=True)
        self.run.step()
        save(self.run.state(flat=flat), self.second, digest=True)
        save(self.run.state(flat=flat), self.delta, digest=True, delta_to=self.first)
        self.held = self.run.values()


@pytest.fixture(scope="module", params=[(name, flat) for name in FORMS for flat in (False, True)], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    name, flat = request.param
    return Saved(tmp_path_factory.mktemp("states"), FORMS[name], flat=flat)


def resumed(path: Path, form: dict[str, str], *, flat: bool, **options: Any) -> Run:
    run = Run(form)
    run.step()
    state = run.state(flat=flat)
    load(state, path, **options)
    told = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp_state.set_optimizer_state_dict(run.net, run.optimizer, state["optim"], options=told)
    return run


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), what
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)], what


def told(capsys: pytest.CaptureFixture[str], *command: str | Path, status: int = 0) -> str:
    found = main([str(word) for word in command])
    out, err = capsys.readouterr()
    assert found == status, out + err
    return out + err


# -- deltas ------------------------------------------------------------------------------------------------------------


def test_a_delta_checkpoint_is_verified_and_trained_on(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (saved.first, saved.second, saved.delta):
        assert "no errors" in told(capsys, "verify", "--deep", path)
    assert "no differences" in told(capsys, "diff", saved.second, saved.delta)
    runs = [resumed(path, saved.form, flat=saved.flat) for path in (saved.second, saved.delta)]
    for run in runs:
        assert_same(run.values(), saved.held, "loaded")
        run.steps = 3
        run.step(2)
    assert_same(runs[1].values(), runs[0].values(), "trained on")


def test_a_delta_file_leads_from_step_to_step(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "delta", saved.first, saved.second, tmp_path / "one.delta")
    told(capsys, "apply", saved.first, tmp_path / "one.delta", tmp_path / "out")
    assert "no differences" in told(capsys, "diff", saved.second, tmp_path / "out")
    assert "no errors" in told(capsys, "verify", "--deep", tmp_path / "out")
    assert_same(resumed(tmp_path / "out", saved.form, flat=saved.flat).values(), saved.held, "applied")


def _deltas_of_ranks(folder: Path) -> None:
    run = Run(SMALL, mesh=init_device_mesh("cpu", (2,)))
    run.step(2)
    save(run.state(), folder / "full")
    run.step()
    save(run.state(), folder / "delta", delta_to=folder / "full", verify="deep")


def test_ranks_save_deltas_that_one_process_trains_on(shared_tmp_path: Path) -> None:
    run_ranks(2, _deltas_of_ranks, shared_tmp_path)
    whole = Run(SMALL)
    whole.step(3)
    held = whole.values()
    again = resumed(shared_tmp_path / "delta", SMALL, flat=False)
    assert_same(again.values(), held, "loaded")
    assert verify(shared_tmp_path / "delta", level="deep").findings == ()
    again.steps = whole.steps
    for run in (whole, again):
        run.step()
    assert_same(again.values(), whole.values(), "trained on")
    remove_checkpoints(shared_tmp_path, keep=["delta"])  # not its base
    assert_same(resumed(shared_tmp_path / "delta", SMALL, flat=False).values(), held, "others were removed")


# -- digests, exports, streams: the model alone ------------------------------------------------------------------------


def test_the_model_is_digested_exported_and_streamed_without_its_states(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved.run
    expected = digest(run.net)
    for path in (saved.second, saved.delta):
        assert told(capsys, "digest", path).split()[0] == expected
    assert digest(run.state(flat=saved.flat)) == expected
    told(capsys, "export", saved.second, tmp_path / "stored")
    export_hf(run.state(flat=saved.flat), tmp_path / "state", progress=False)
    export_hf(run.net, tmp_path / "model", progress=False)
    wanted = files(tmp_path / "model")
    assert wanted.keys() == {"0.weight", "0.weight_scale", "0.bias", "1.weight", "1.bias"}
    found = [files(tmp_path / name) for name in ("stored", "state")]
    found += [streamed(WeightStream(state)) for state in (run.net, run.state(flat=saved.flat))]
    for own in found:
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[name].view(torch.uint8), value.view(torch.uint8)) for name, value in wanted.items())


def test_a_model_that_is_read_anew_is_where_masters_start(tmp_path: Path) -> None:
    """An import is a write of others: remainders of the bytes before mean nothing any more."""
    source, run = Run(SMALL), Run(SMALL)
    source.step(2)
    export_hf(source.net, tmp_path / "out", progress=False)
    run.step(3)
    import_hf(tmp_path / "out", run.net, progress=False)
    assert not run.optimizer.state_dict()["state"][0]["master_remainder"].any()
    assert digest(run.net) == digest(source.net)


def test_a_stream_of_changes_follows_a_training(saved: Saved) -> None:
    run = Run(saved.form)
    run.step()
    stream = WeightStream(run.net, keep_last=True)
    before = streamed(stream)
    run.step()
    delta = stream.since(stream.version)
    assert delta is not None
    after = streamed(WeightStream(run.net))
    assert apply_deltas(before, [delta]) == 1
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), one.view(torch.uint8)) for name, one in after.items())


# -- convert -----------------------------------------------------------------------------------------------------------


def test_moments_that_were_converted_on_disk_are_read_as_what_they_stand_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = Saved(tmp_path, SMALL, flat=False)
    # bf16 holds the elements of MXFP8, and MXFP8 these again
    told(capsys, "convert", saved.second, tmp_path / "wide", "--to", "bfloat16", "--include", "*exp_avg*")
    assert_same(
        resumed(tmp_path / "wide", SMALL, flat=False, on_mismatch="convert").values(), saved.held, "converted twice"
    )
    assert "no errors" in told(capsys, "verify", "--deep", tmp_path / "wide")


@pytest.mark.parametrize("include", ["optim.state.*.weight.master_remainder", "*.master_*", "optim.*"])
def test_convert_takes_no_remainder_for_numbers(
    include: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = Saved(tmp_path, SMALL, flat=False)
    out = tmp_path / "out"
    said = told(capsys, "convert", saved.second, out, "--to", "mxfp8", "--include", include, status=2)
    assert "optim.state.1.weight.master_remainder: its bits are those of an integer" in said
    assert not out.exists()


@pytest.mark.parametrize("to", ["nvfp4", "bfloat16"])
def test_convert_refuses_bytes_that_remainders_need_and_copies_the_rest(
    to: str, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if saved.form["masters"] == "remainder":
        said = told(capsys, "convert", saved.second, tmp_path / "out", "--to", to, status=2)
        assert "optim.state.0.weight.master_remainder: masters are kept as what the bytes of their weights" in said
        assert not (tmp_path / "out").exists()
        return
    told(capsys, "convert", saved.second, tmp_path / "out", "--to", to)
    assert "0 errors" in told(capsys, "verify", "--deep", tmp_path / "out")
    differences = told(capsys, "diff", saved.second, tmp_path / "out", status=1)
    assert "1 of " in differences
    assert "model.0.weight" in differences
