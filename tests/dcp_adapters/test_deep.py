"""`verify --deep` and the planner's verify="deep" find payloads, scales, histories and masters of different steps."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_adapters import QuantizedSavePlanner, export_hf
from dcp_adapters.cli.main import main
from dcp_adapters.hf.reading.delayed import history_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.masters import NAMELESS, OTHER_SHAPE, Masters
from dcp_adapters.records.soundness import BOTH, FRESH, WRITTEN
from dcp_adapters.save.steps.unsound import _cut_dims, refuse_mixtures, refuse_unsound
from dcp_adapters.stored.verifying.deep import CONVERTED
from dcp_adapters.stored.verifying.verify import verify
from fsdp_hooks.torch_private import make_wrapper
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    LowRankUpdate,
    MasterWeightOptimizer,
    QuantizedTensor,
    merge_,
    quantize,
    stochastic_rounding,
)
from tests.dcp_adapters.cases import RECIPES, Layer, save, values
from tests.ranks import run_ranks, run_ranks_catching
from tests.recipes import MAIN, TABLE
from tests.sampling import sampled

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.tensor.placement_types import Placement

    from dcp_adapters.stored.verifying.findings import Report

COLUMNS = 128  # every recipe's block fits
ROWS = {each.name: 160 if each.square else 72 for each in TABLE}


class Run:
    """A model with a weight of each recipe, and its optimizer; `state` is what a training would save."""

    def __init__(self) -> None:
        self.net = nn.ModuleDict(
            {each.name: Layer(ROWS[each.name], each.recipe, 7 * i, COLUMNS) for i, each in enumerate(TABLE)}
        )
        self.optimizer = MasterWeightOptimizer(torch.optim.SGD, self.net.parameters(), lr=1.0)
        self.draw = torch.Generator("cpu").manual_seed(5)

    def step(self) -> None:
        for param in self.net.parameters():
            noise = torch.randn(param.shape, generator=self.draw, dtype=torch.float32, device="cpu")
            param.grad = (noise * 0.3).to(param.dtype)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        optimizer = dcp_state.get_optimizer_state_dict(self.net, self.optimizer)
        return {"model": copied(self.net.state_dict()), "optim": copied(optimizer)}


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def mixed(new: dict[str, Any], old: dict[str, Any], part: str) -> set[str]:
    """Put a part of the older state into the newer; returns the weights that it changed."""
    changed = set()
    for name, weight in new["model"].items():
        if isinstance(weight, QuantizedTensor) and part in weight.parts():
            ours, theirs = getattr(weight, part), getattr(old["model"][name], part)
            if not torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
                ours.copy_(theirs)
                changed.add(f"model.{name}")
    return changed


def errors(report: Report) -> set[str]:
    return {finding.entry for finding in report.errors}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    run, found = Run(), []
    found.append(run.state())
    for _ in range(2):
        run.step()
        found.append(run.state())
    return found


# -- sound checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["deep", "own_scales"])
def test_what_a_training_saves_has_no_findings(level: Any, steps: list[dict[str, Any]], tmp_path: Path) -> None:
    for number, state in enumerate(steps):
        save(state, tmp_path / str(number), verify=level)
        report = verify(tmp_path / str(number), level=level)
        assert report.findings == (), number
        assert report.judged == len(TABLE)
        assert report.masters == 2 * len(TABLE)  # of weights and biases


def test_bytes_that_no_quantizer_makes_are_no_errors_unless_asked(tmp_path: Path) -> None:
    """A searched scale, a scale kept by an exact conversion: warnings, and errors for those who know better."""
    q = quantize(values((64, 128), 1), RECIPES["mxfp8"])
    searched = quantize(values((64, 128), 2), RECIPES["mxfp8"])
    searched.scale.add_(1)  # the values are in the lower half of the element, as a search may leave them
    searched.payload.copy_((searched.payload.float() / 2).to(torch.float8_e4m3fn))
    kept = quantize(values((64, 128), 3), Float8CurrentScaling())
    with torch.no_grad():
        kept.copy_(quantize(values((64, 128), 3), Float8CurrentScaling(granularity="tensor")))
    state = {"q": q, "searched": searched, "kept": kept}
    save(state, tmp_path / "c", verify="deep")
    report = verify(tmp_path / "c", level="deep")
    assert report.ok
    assert {finding.entry for finding in report.findings} == {"searched.scale", "kept.scale"}
    assert errors(verify(tmp_path / "c", level="own_scales")) == {"searched.scale", "kept.scale"}
    told = r"searched\.scale: \d+ of 256 scales are not those that their values ask for"
    with pytest.raises(CheckpointException, match=told):
        save(state, tmp_path / "d", verify="own_scales")
    assert not (tmp_path / "d" / ".metadata").exists()


FACTORS = {"a": (2, COLUMNS), "b": (160, 2)}


def rewritten(recipe: Any) -> dict[str, QuantizedTensor]:
    """A trained weight, written in the ways that the library has besides a step of the optimizer that holds masters."""
    weights: dict[str, nn.Parameter] = {}
    draw = torch.Generator("cpu").manual_seed(9)

    def weight(name: str) -> nn.Parameter:
        weights[name] = nn.Parameter(quantize(values((160, COLUMNS), len(weights)), recipe))
        stepped(weights[name])
        return weights[name]

    def stepped(param: nn.Parameter, count: int = 2) -> None:
        optimizer = MasterWeightOptimizer(torch.optim.SGD, [param], lr=0.1)
        for _ in range(count):
            param.grad = torch.randn(param.shape, generator=draw, dtype=torch.float32, device="cpu").to(param.dtype)
            optimizer.step()

    with torch.no_grad():
        weight("copied").copy_(values((160, COLUMNS), 50))
        weight("converted").copy_(quantize(values((160, COLUMNS), 51), Float8CurrentScaling()))
        weight("zeroed").zero_()
        with stochastic_rounding(draw):
            weight("stochastic").mul_(3.0)
            weight("small").mul_(0.01)
        factors = {name: torch.ones(shape, dtype=torch.float32, device="cpu") for name, shape in FACTORS.items()}
        merge_([("merged", weight("merged"))], {"merged": LowRankUpdate(**factors)})
    for name in ("zeroed", "stochastic"):
        weights[f"{name} and trained"] = nn.Parameter(weights[name].detach().clone())
        stepped(weights[f"{name} and trained"], 3)
    weight("plain")
    plain = torch.optim.SGD([weights["plain"]], lr=0.1)
    weights["plain"].grad = torch.ones(160, COLUMNS, dtype=torch.bfloat16, device="cpu")
    plain.step()
    return {name: param.detach() for name, param in weights.items()}  # type: ignore[misc]


@sampled("name", [each.name for each in TABLE], MAIN)
def test_no_way_to_write_is_a_fault(name: str, tmp_path: Path) -> None:
    recipe = next(each.recipe for each in TABLE if each.name == name)
    state = {"weights": rewritten(recipe)}
    save(state, tmp_path, verify="deep")
    report = verify(tmp_path, level="own_scales")
    assert {finding.entry.split(".")[1] for finding in report.findings} <= {"converted"}  # exact where it can be
    assert verify(tmp_path, level="deep").ok


def test_an_imported_scale_under_delayed_scaling_is_no_fault(tmp_path: Path) -> None:
    """Linears that were fused share the largest of their scales, which their own values do not fill."""
    recipe = Float8DelayedScaling(amax_history_len=3)
    current = quantize(values((64, 128), 1), Float8CurrentScaling(granularity="tensor"))
    payload = (current.payload.float() / 3).to(torch.float8_e4m3fn)
    parts = {"payload": payload, "scale": current.scale, "amax_history": history_of(current.scale, recipe)}
    weight = nn.Parameter(QuantizedTensor.from_parts(parts, recipe, torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD, [weight], lr=0.1)
    for step in range(5):
        save({"w": weight.detach()}, tmp_path / str(step), verify="own_scales")
        assert verify(tmp_path / str(step), level="own_scales").findings == ()
        weight.grad = torch.full((64, 128), 0.5, dtype=torch.bfloat16, device="cpu")
        optimizer.step()


# -- mixtures of two steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["payload", "scale", "global_scale", "amax_history"])
def test_a_part_of_the_step_before_is_found_in_every_weight(
    part: str, steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With masters beside the weights that is certain, whatever the recipe."""
    new = copied(steps[2])
    changed = mixed(new, steps[1], part)
    assert changed
    save(new, tmp_path / "c")
    assert verify(tmp_path / "c").ok  # every checksum is right
    assert {name for name in errors(verify(tmp_path / "c", level="deep")) if name.endswith("weight")} == changed
    with pytest.raises(
        CheckpointException, match="what is to be saved is not sound, nothing has been written"
    ) as error:
        save(new, tmp_path / "d", verify="deep")
    told = set(re.findall(r"^  (model\.[\w.]+): ", str(error.value), re.MULTILINE))
    wide = {f"model.{each.name}.weight" for each in TABLE if each.tensor_wide}
    assert {name for name in told if name.endswith("weight")} >= changed - wide
    assert told <= changed | {f"{name}.amax_history" for name in changed}
    assert not (tmp_path / "d" / ".metadata").exists()


def test_masters_of_another_step_are_found(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    save({"model": steps[1]["model"], "optim": steps[2]["optim"]}, tmp_path / "c")
    expected = {f"model.{each.name}.{end}" for each in TABLE for end in ("weight", "bias")}
    report = verify(tmp_path / "c", level="deep")
    assert {name for name in errors(report) if not name.endswith("history")} == expected
    message = next(finding.message for finding in report.errors if finding.entry == "model.mxfp8.weight")
    assert "is not what optim.state.mxfp8.weight.master_weight requantizes to (" in message


def test_one_of_several_tensors_under_a_name_must_fit(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    """A moving average beside the model is not what the masters requantize to."""
    save({**steps[2], "ema": steps[1]["model"]}, tmp_path / "c")
    assert verify(tmp_path / "c", level="deep").ok


def test_masters_are_found_by_the_longest_name_that_fits() -> None:
    def entry(name: str, recipe: Any = None, shape: tuple[int, ...] = (2, 128)) -> Entry:
        return Entry(name, recipe, shape, torch.float32 if recipe is None else torch.bfloat16)

    recipe = RECIPES["mxfp8"]
    entries = [
        entry("optim.state.mamba.state.w.master_weight"),
        entry("model.mamba.state.w", recipe),
        entry("model.other.w", recipe),
        entry("optim.state.lone.master_weight"),
        entry("optim.state.small.master_weight"),
        entry("model.small", recipe, (4, 128)),
    ]
    found = Masters.among({one.name: one for one in entries})
    assert found.beside == {"model.mamba.state.w": ["optim.state.mamba.state.w.master_weight"]}
    assert found.left == {
        "optim.state.lone.master_weight": NAMELESS,
        "optim.state.small.master_weight": OTHER_SHAPE,
    }


# -- the command line and options --------------------------------------------------------------------------------------


def test_the_command_line_tells_and_says_so_in_its_status(
    steps: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    save(steps[2], good)
    new = copied(steps[2])
    mixed(new, steps[1], "payload")
    save(new, bad)
    assert main(["verify", good, "--deep"]) == 0
    assert f"{len(TABLE)} tensors judged, {2 * len(TABLE)} masters" in capsys.readouterr().out
    assert main(["verify", bad]) == 0
    capsys.readouterr()
    assert main(["verify", bad, "--deep", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {finding["entry"] for finding in told["findings"]} >= {"model.mxfp8.weight"}
    assert (told["judged"], told["masters"]) == (len(TABLE), 2 * len(TABLE))
    assert main(["verify", good, "--own-scales"]) == 0


@pytest.mark.parametrize("to", ["nvfp4", "bfloat16", "float32"])
def test_what_was_converted_is_marked_and_left_out(to: str, steps: list[dict[str, Any]], tmp_path: Path) -> None:
    """Masters are copied as they are: they are not what the new bytes were made from, and no fault."""
    save(steps[2], tmp_path / "a")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to]) == 0
    again = ["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "mxfp8", "--include", "model.mxfp8.weight"]
    assert main(again) == 0
    for name in ("b", "c"):
        report = verify(tmp_path / name, level="own_scales")
        assert report.ok, report.errors
        assert [finding.message for finding in report.findings] == [CONVERTED]


def test_exports_are_judged_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q = quantize(values((64, 128), 1), RECIPES["mxfp8"])
    export_hf({"layers.0.down_proj.weight": q}, tmp_path / "good")
    q.payload.zero_()
    export_hf({"layers.0.down_proj.weight": q}, tmp_path / "bad")
    assert main(["verify", str(tmp_path / "good"), "--own-scales"]) == 0
    assert "1 tensors judged, 0 masters" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "bad"), "--deep"]) == 0
    assert main(["verify", str(tmp_path / "bad"), "--own-scales"]) == 1
    assert "256 of 256 scales are not those that their values ask for" in capsys.readouterr().out


def test_unsound_bytes_are_told_first(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    save(steps[1], tmp_path)
    file = next(tmp_path.glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 255
    file.write_bytes(raw)
    report = verify(tmp_path, level="deep")
    assert not report.ok
    assert report.findings[-1].message == "what the tensors mean was not looked at, since their bytes are not sound"


def test_unknown_levels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"QuantizedSavePlanner: verify='full' is not one of None, \"deep\", "):
        QuantizedSavePlanner(verify="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"verify: level='full' is not one of 'bytes', 'deep', 'own_scales'"):
        verify(tmp_path, level="full")  # type: ignore[arg-type]


class Elsewhere(Tensor):
    """Values of another device, as far as an operation can see: they meet others only after a copy to the CPU."""

    values: Tensor

    @staticmethod
    def of(values: Tensor) -> Elsewhere:
        self = make_wrapper(Elsewhere, values.shape, values.dtype, torch.device("meta"))
        self.values = values
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert sum(isinstance(arg, Tensor) for arg in args) == 1, f"{func} of tensors on two devices"
        found = func(args[0].values, *args[1:], **(kwargs or {}))
        return found if (kwargs or {}).get("device") == torch.device("cpu") else Elsewhere.of(found)


def test_masters_may_be_on_another_device_than_their_weights(steps: list[dict[str, Any]]) -> None:
    """Offloaded, say."""
    for of, found in ((1, 0), (2, 20)):  # an error shows the first 20
        weights = {f"model.{name}": value for name, value in steps[1]["model"].items()}
        masters = {
            f"optim.state.{name}.master_weight": Elsewhere.of(state["master_weight"])
            for name, state in steps[of]["optim"]["state"].items()
        }
        try:
            refuse_unsound({**weights, **masters}, "deep")
            told = ""
        except ValueError as error:
            told = str(error)
        assert told.count(": it is not what optim.state.") == found


# -- several ranks -----------------------------------------------------------------------------------------------------

SPREAD = ("float8_row", "float8_tensor", "mxfp8_square", "nvfp4", "int4_32")


def trained() -> dict[str, Any]:
    """Square blocks are cut: 160 rows over 3 ranks."""
    net = nn.ModuleDict({name: Layer(160, RECIPES[name], i, COLUMNS) for i, name in enumerate(SPREAD)})
    for layer in net.values():
        fully_shard(layer)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=1.0)
    for number in range(2):
        for param in net.parameters():
            param.grad = torch.ones_like(param) * (number * 0.1)  # none moves in the first step
        optimizer.step()
    return {"model": net.state_dict(), "optim": dcp_state.get_optimizer_state_dict(net, optimizer)}


def saved_whole(path: Path) -> None:
    save(trained(), path, verify="own_scales")


def saved_broken(path: Path) -> None:
    state = trained()
    if torch.distributed.get_rank() == 1:
        state["model"]["mxfp8_square.weight"].to_local().scale.add_(1)
    save(state, path, verify="deep")


CUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], set[int]]] = {
    "rows": ((4,), (Shard(0),), {0}),
    "columns": ((4,), (Shard(1),), {1}),
    "columns, counted from behind": ((4,), (Shard(-1),), {1}),
    "both": ((2, 2), (Shard(0), Shard(1)), {0, 1}),
    "replicas": ((2, 2), (Replicate(), Shard(1)), {1}),
    "one rank": ((4, 1), (Shard(0), Shard(1)), {0}),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_piece_is_whole_along_dims_that_are_not_cut(case: str) -> None:
    shape, placements, expected = CUTS[case]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", shape)
        assert _cut_dims(DTensor.from_local(torch.zeros(4, 32), mesh, placements, run_check=False)) == expected
    finally:
        dist.destroy_process_group()
    assert _cut_dims(torch.zeros(4, 32)) == set()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_judge_what_they_hold(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, saved_whole, shared_tmp_path / "c")
    report = verify(shared_tmp_path / "c", level="own_scales")
    assert report.findings == ()
    assert report.judged == len(SPREAD)


def saved_of_two_steps(path: Path) -> list[str]:
    """Each rank's pieces fit their masters; those of rank 0 as a step wrote them, the others as they were made."""
    state = trained()
    weight, master = state["model"]["int4_32.weight"], state["optim"]["state"]["int4_32.weight"]["master_weight"]
    if torch.distributed.get_rank():
        master.to_local().copy_(weight.to_local().dequantize(torch.float32))
    told = []
    for caching in (False, True, True):
        with pytest.raises(CheckpointException) as caught:
            save(state, path, verify="deep", enable_plan_caching=caching)
        told.append(str(caught.value))
    assert not (path / ".metadata").exists()
    save(state, path, enable_plan_caching=True)  # whoever does not ask for it is not refused
    with pytest.raises(CheckpointException) as caught:
        save(state, path / "again", verify="deep", enable_plan_caching=True)
    return [*told, str(caught.value)]


def test_ranks_whose_pieces_are_of_different_steps_are_refused(shared_tmp_path: Path) -> None:
    master = "optim.state.int4_32.weight.master_weight"
    for told in run_ranks(3, saved_of_two_steps, shared_tmp_path / "c"):
        for error in told:
            assert "what is to be saved is not sound, nothing has been written" in error, error
            assert f"model.int4_32.weight: rank 0 holds what {master} requantizes to, rank 1 holds what" in error
            assert f"rank 1 holds what {master} was made from, before a step wrote it: they are of different" in error
    assert errors(verify(shared_tmp_path / "c", level="deep")) == {"model.int4_32.weight"}


def test_one_tensor_beside_a_master_must_fit_on_all_ranks_in_one_way() -> None:
    def refused(*ranks: dict[str, int]) -> bool:
        try:
            refuse_mixtures([{"m": rank} if rank else {} for rank in ranks], "deep")
        except ValueError:
            return True
        return False

    assert not refused({"w": WRITTEN}, {"w": WRITTEN}, {})
    assert not refused({"w": FRESH}, {}, {"w": FRESH})
    assert refused({"w": WRITTEN}, {"w": FRESH})
    assert refused({"w": WRITTEN, "ema": 0}, {"w": 0, "ema": WRITTEN})
    assert not refused({"w": WRITTEN, "ema": 0}, {"w": WRITTEN, "ema": FRESH})
    assert not refused({"w": 0, "ema": BOTH}, {"w": BOTH, "ema": FRESH})


def test_what_one_rank_finds_is_an_error_on_all(shared_tmp_path: Path) -> None:
    told = run_ranks_catching(3, saved_broken, shared_tmp_path / "c")
    assert len(told) == 3
    for error in told:
        assert "mxfp8_square.weight: it is not what" in error
    assert not (shared_tmp_path / "c" / ".metadata").exists()
