"""Checkpoints of compressed optimizer states: loaded into the same form and into others, verified, refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_adapters.convert.convert_checkpoint import ConversionRefused, plan_conversion
from dcp_adapters.hf.models.prefixes import weights_prefix
from dcp_adapters.records.masters import is_remainder
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.verifying.verify import verify
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantize_
from qtensor.spec.registry import format_of
from tests.dcp_adapters.cases import load, save
from tests.dcp_adapters.test_deep import copied, errors
from tests.ranks import run_ranks
from tests.recipes import MAIN, TABLE
from tests.sampling import sampled

if TYPE_CHECKING:
    from pathlib import Path

FP32 = {"masters": "fp32", "moments": "fp32"}
SMALL = {"masters": "remainder", "moments": "float8"}
HALF = {"masters": "remainder", "moments": "bfloat16"}
PAIRS = {"to small": (FP32, SMALL), "to fp32": (SMALL, FP32), "same": (SMALL, SMALL), "to bf16": (SMALL, HALF)}
MX = MXFP8BlockScaling()


class Run:
    """A quantized and a bf16 layer, and their optimizer."""

    def __init__(self, form: dict[str, str], *, mesh: Any = None, recipe: Any = MX) -> None:
        draw = torch.Generator("cpu").manual_seed(3)
        with torch.device("cpu"):
            self.net = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)).to(torch.bfloat16)
        with torch.no_grad():
            for param in self.net.parameters():
                param.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float32, device="cpu"))
        quantize_(self.net, recipe, include=("0",))
        if mesh is not None:
            fully_shard(self.net, mesh=mesh)
        self.optimizer = MasterWeightOptimizer(torch.optim.AdamW, self.net.named_parameters(), lr=0.01, **form)
        self.steps = 0

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.steps += 1
            draw = torch.Generator("cpu").manual_seed(self.steps)
            for param in self.net.parameters():
                noise = torch.randn(param.shape, generator=draw, dtype=torch.float32, device="cpu").to(param.dtype)
                sharded = isinstance(param, DTensor)
                param.grad = distribute_tensor(noise, param.device_mesh, param.placements) if sharded else noise
            self.optimizer.step()

    def state(self, *, flat: bool = False) -> dict[str, Any]:
        options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
        optim = dcp_state.get_optimizer_state_dict(self.net, self.optimizer, options=options)
        return {"model": self.net.state_dict(), "optim": optim}

    def load(self, path: Path, form: dict[str, str], *, flat: bool = False) -> None:
        options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=flat)
        with self.optimizer.expecting_states(**form):
            state = self.state(flat=flat)
            load(state, path)
            dcp_state.set_optimizer_state_dict(self.net, self.optimizer, state["optim"], options=options)

    def values(self) -> dict[str, Tensor]:
        """What the run holds, in fp32, whatever the form: weights, masters and moments."""
        found = {name: plain(param) for name, param in self.net.named_parameters()}
        self.optimizer.state_dict()  # makes masters in fp32 of remainders that were loaded
        with self.optimizer.expecting_states():
            for name, param in self.net.named_parameters():
                found |= {f"{name}.{key}": plain(value) for key, value in self.optimizer.state[param].items()}
        return found


def plain(value: Tensor) -> Tensor:
    value = value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.dequantize(torch.float32) if hasattr(value, "recipe") else value.float().clone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[Path, dict[str, Tensor]]]:
    found = {}
    for name, form in (("fp32", FP32), ("small", SMALL)):
        run = Run(form)
        run.step(3)
        for flat in (False, True):
            path = tmp_path_factory.mktemp("states") / name
            save(run.state(flat=flat), path, verify="deep")
            found[name, flat] = path, run.values()
    return found


# -- conversion on load ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_states_load_in_every_form(pair: str, flat: bool, saved: Any) -> None:
    before, after = PAIRS[pair]
    path, held = saved["fp32" if before is FP32 else "small", flat]
    run = Run(after)
    run.load(path, before, flat=flat)
    loaded = run.values()
    for name, value in held.items():
        exact = after in (FP32, before) or not name.endswith(("exp_avg", "exp_avg_sq")) or "bias" in name
        if after is HALF:
            exact = not name.endswith(("exp_avg", "exp_avg_sq"))
        near = {"rtol": 0, "atol": 0} if exact else {"rtol": 2**-3, "atol": float(value.abs().max()) * 2**-8}
        torch.testing.assert_close(loaded[name], value, msg=lambda text, name=name: f"{name}: {text}", **near)
    run.step()
    assert "master_remainder" in run.optimizer.state[run.net[0].weight] or after is FP32
    assert verify_live(run)


def verify_live(run: Run) -> bool:
    """Whether weights are what masters say: the save planner asks it."""
    from dcp_adapters.save.steps.unsound import refuse_unsound
    from dcp_adapters.torch_private import flatten_state_dict

    refuse_unsound(flatten_state_dict(run.state())[0], "deep")
    return True


def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """What dcp.load writes into is what the optimizer keeps: nothing of it may be lost on its way back."""
    run, again = Run(SMALL), Run(SMALL)
    run.step(2)
    save(run.state(), tmp_path)
    state = again.state()
    load(state, tmp_path)
    dcp_state.set_optimizer_state_dict(again.net, again.optimizer, state["optim"])
    again.steps = run.steps
    for each in (run, again):
        each.step(2)
    ours, theirs = run.values(), again.values()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_other_form_is_shown_inside_alone(saved: Any) -> None:
    run = Run(SMALL)
    run.step()
    own = {name: type(value) for name, value in run.optimizer.state[run.net[0].weight].items()}
    seed = run.optimizer.param_groups[0]["states_seed"]
    with run.optimizer.expecting_states(masters="fp32", moments="fp32"):
        assert {"master_weight", "exp_avg_sq"} <= run.optimizer.state[run.net[0].weight].keys()
        assert "states_seed" not in run.optimizer.param_groups[0]
    assert {name: type(value) for name, value in run.optimizer.state[run.net[0].weight].items()} == own
    assert run.optimizer.param_groups[0]["states_seed"] == seed
    with pytest.raises(ValueError, match="masters='int8'"), run.optimizer.expecting_states(masters="int8"):
        pass


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("on_mismatch", ["raise", "convert"])
def test_a_load_without_it_names_it(on_mismatch: str, partial: bool, saved: Any) -> None:
    for name, form in (("small", FP32), ("fp32", SMALL)):
        run = Run(form)
        options = {"on_mismatch": on_mismatch, "allow_partial_load": partial}
        with pytest.raises(CheckpointException) as error:
            load(run.state(), saved[name, False][0], **options)
        ours, theirs = ("master_weight", "master_remainder") if form is FP32 else ("master_remainder", "master_weight")
        told = str(error.value)
        assert f"0.weight.{ours}: the checkpoint holds optim.state.0.weight.{theirs} in its place; read it" in told
        assert "with optimizer.expecting_states(masters=.., moments=..)" in told
        assert "exp_avg_sq_root" in told
        assert "only the checkpoint has it" not in told


def test_remainders_are_not_loaded_beside_bytes_that_are_converted(saved: Any) -> None:
    run = Run(SMALL, recipe=NVFP4BlockScaling())
    told = r"0\.weight\.master_remainder: it says of a master what the bytes of model\.0\.weight do not"
    with pytest.raises(CheckpointException, match=told):
        load(run.state(), saved["small", False][0], on_mismatch="convert")


def test_the_command_converts_no_bytes_that_remainders_need(saved: Any) -> None:
    entries = StoredCheckpoint(saved["small", False][0]).entries
    with pytest.raises(ConversionRefused, match="these bytes would change"):
        plan_conversion(entries, NVFP4BlockScaling())
    alone = {name: entry for name, entry in entries.items() if not is_remainder(name)}
    assert plan_conversion(alone, NVFP4BlockScaling()).changes == {"model.0.weight"}  # and no moments


def test_the_model_is_found_beside_quantized_moments(saved: Any) -> None:
    source = StoredCheckpoint(saved["small", False][0])
    quantized = {name for name, entry in source.entries.items() if entry.recipe is not None}
    paths = {name: source.paths.get(name, tuple(name.split("."))) for name in source.names}
    assert weights_prefix(paths, quantized | {"model.1.weight"}) == "model."


def test_shards_load_what_whole_weights_saved_and_back(saved: Any, tmp_path: Path) -> None:
    paths = {name: str(saved[name, False][0]) for name in ("fp32", "small")}
    values = {name: saved[name, False][1] for name in ("fp32", "small")}
    run_ranks(2, _load_sharded, paths, values, str(tmp_path))
    run = Run(FP32)
    run.load(tmp_path / "small", SMALL)
    held = values["small"]
    assert all(torch.equal(value, held[name]) for name, value in run.values().items())


def _load_sharded(paths: dict[str, str], values: dict[str, dict[str, Tensor]], into: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    run = Run(FP32, mesh=mesh)
    run.load(paths["small"], SMALL)  # type: ignore[arg-type]
    assert all(torch.equal(value, values["small"][name]) for name, value in run.values().items())
    run = Run(SMALL, mesh=mesh)
    run.load(paths["fp32"], FP32)  # type: ignore[arg-type]
    whole = Run(SMALL)
    whole.load(paths["fp32"], FP32)  # type: ignore[arg-type]
    run.step()
    whole.step()
    ours, theirs = run.values(), whole.values()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run = Run(SMALL, mesh=mesh)
    run.load(paths["small"], SMALL)  # type: ignore[arg-type]
    save(run.state(), f"{into}/small", verify="deep")  # type: ignore[arg-type]


# -- verify --deep -----------------------------------------------------------------------------------------------------


def states_of(recipe: Any) -> dict[str, Any]:
    run = Run(SMALL, recipe=recipe)
    run.step(2)
    return copied(run.state())


KEPT = [each.name for each in TABLE if format_of(each.recipe).grain(each.recipe) is not None]


@sampled("name", KEPT, MAIN)
def test_remainders_fit_their_weights_and_damage_is_found(name: str, tmp_path: Path) -> None:
    state = states_of(next(each.recipe for each in TABLE if each.name == name))
    save(state, tmp_path / "good", verify="deep")
    report = verify(tmp_path / "good", level="deep")
    assert report.findings == ()
    assert report.masters == 4
    weight, remainder = state["model"]["0.weight"], state["optim"]["state"]["0.weight"]["master_remainder"]
    remainder = remainder.view(torch.int16)
    at = (3, int(remainder[3].abs().argmin()))
    remainder[at] ^= -0x8000  # the master is half a code further away: another code
    save(state, tmp_path / "bad")
    assert errors(verify(tmp_path / "bad", level="deep")) == {"model.0.weight"}
    with pytest.raises(
        CheckpointException, match=r"is not what optim\.state\.0\.weight\.master_remainder requantizes to"
    ):
        save(state, tmp_path / "refused", verify="deep")
    remainder[at] ^= -0x8000
    # a row of numbers of bf16, half of which are odd: half a step below these is their neighbour's
    state["optim"]["state"]["1.weight"]["master_remainder"].view(torch.int16)[2] = -0x8000
    weight.payload.view(torch.uint8).zero_()  # the scales are others then
    save(state, tmp_path / "more")
    assert errors(verify(tmp_path / "more", level="deep")) == {"model.0.weight", "model.1.weight"}


def test_roots_and_the_kinds_of_entries_are_judged(tmp_path: Path) -> None:
    state = states_of(MX)
    own = state["optim"]["state"]["0.weight"]
    own["exp_avg_sq_root"].payload.view(torch.uint8)[0, 0] = 0x80 | 0x38  # -1
    save(state, tmp_path / "root")
    (finding,) = verify(tmp_path / "root", level="deep").errors
    assert finding.entry == "optim.state.0.weight.exp_avg_sq_root"
    assert "1 of its elements are negative" in finding.message
    state = states_of(MX)
    own = state["optim"]["state"]["0.weight"]
    own["exp_avg_sq_root"] = state["optim"]["state"]["1.weight"]["exp_avg_sq_root"]
    state["optim"]["state"]["1.weight"]["master_remainder"] = own["master_remainder"].to(torch.int32)
    save(state, tmp_path / "shapes")
    report = verify(tmp_path / "shapes", level="deep")
    assert "its shape is (32, 64), that of optim.state.0.weight.master_remainder is (64, 128)" in str(report.errors[0])
    told = "they are neither fp32 masters nor torch.float16 remainders"
    assert any(told in str(finding) for finding in report.findings)
