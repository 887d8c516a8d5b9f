"""Checkpoints of linears whose inputs are rotated at run time: they say so, and fit no model that does not rotate.

Whoever wrote them: what says so is a tensor beside the weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from dcp_adapters import (
    HeldVersion,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    QuantizedStager,
    apply_deltas,
    digest,
    expand,
    tensor_digests,
)
from dcp_adapters.__main__ import main
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.rotations import rotations_in
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from layerwise import rotate_inputs_
from qtensor import MXFP8BlockScaling, quantize_
from qtensor.products.input_rotation import input_rotations

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model(block: int | None = 16) -> nn.Module:
    torch.manual_seed(0)
    built = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32), "head": nn.Linear(32, 8)})
    quantize_(built, MXFP8BlockScaling(), exclude=["head"])
    if block is not None:
        rotate_inputs_(built, {"down": block, "head": block})
    return built


def save(built: nn.Module, path: Path, *, nested: bool, **options: Any) -> Path:
    state = built.state_dict()
    planner = QuantizedSavePlanner(**options)
    dcp.save({"model": state} if nested else state, checkpoint_id=path, planner=planner, no_dist=True)
    return path


def load(built: nn.Module, path: Path, **options: Any) -> None:
    planner = QuantizedLoadPlanner(**options)
    dcp.load({"model": built.state_dict()}, checkpoint_id=path, planner=planner, no_dist=True)


def whole(built: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(built, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


WRITERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "ours": lambda built, path: save(built, path, nested=True),
    "of whole state dicts": lambda built, path: dcp.save(
        {"model": whole(built)}, checkpoint_id=path, planner=QuantizedSavePlanner(), no_dist=True
    ),
    "of stock, of parts": lambda built, path: dcp.save(
        {"model": expand(built.state_dict())}, checkpoint_id=path, no_dist=True
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_keeps_it(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](model(), tmp_path)
    assert rotations_in(StoredCheckpoint(tmp_path).entries) == {"model.down": 16, "model.head": 16}
    message = "model.down.weight: the checkpoint has it for inputs that are rotated at run time in blocks of 16"
    with pytest.raises(CheckpointException, match=message):
        load(model(None), tmp_path, allow_partial_load=True)
    if writer.startswith("of stock"):
        with pytest.raises(CheckpointException, match=message):
            load_parts(model(None), tmp_path)


def load_parts(built: nn.Module, path: Path) -> None:
    """As parts, by our planner."""
    planner = QuantizedLoadPlanner(allow_partial_load=True)
    dcp.load({"model": expand(built.state_dict())}, checkpoint_id=path, planner=planner, no_dist=True)


def test_stock_finds_what_the_file_lacks(tmp_path: Path) -> None:
    """It does not look at what the target lacks, which docs/rotations.md says."""
    dcp.save(expand(model(None).state_dict()), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: down.input_rotation"):
        dcp.load(expand(model().state_dict()), checkpoint_id=tmp_path, no_dist=True)


def test_a_delta_says_so_too(tmp_path: Path) -> None:
    full = save(model(), tmp_path / "full", nested=True)
    delta = save(model(), tmp_path / "delta", nested=True, delta_to=full)
    load(model(), delta)
    with pytest.raises(CheckpointException, match="the target for inputs as they are"):
        load(model(None), delta)


def test_live_deltas_fit_models_that_rotate_alike() -> None:
    held, new, target = HeldVersion(model().state_dict()), model(), model()
    with torch.no_grad():
        new["head"].weight.add_(1)
    delta = held.since(new.state_dict(), 1)
    assert delta is not None
    for other in (None, 32):
        with pytest.raises(ValueError, match=r"a delta needs equal names.*\n  down.input_rotation"):
            apply_deltas(model(other).state_dict(), [delta])
    apply_deltas(target.state_dict(), [delta])
    assert digest(target) == digest(new)


def test_digests_and_snapshots_know_it(tmp_path: Path) -> None:
    digests = tensor_digests(model())
    assert {name for name in digests if "rotation" in name} == {"down.input_rotation", "head.input_rotation"}
    assert digest(model()) not in {digest(model(None)), digest(model(32))}
    assert digest(save(model(), tmp_path, nested=True)) == digest(model())
    staged = QuantizedStager().stage({"model": model().state_dict()})
    assert digest(staged["model"]) == digest(model())


def test_the_commands_keep_it(tmp_path: Path) -> None:
    path = save(model(), tmp_path / "saved", nested=True)
    assert main(["verify", str(path)]) == 0
    for name, options in {
        "dense": ["--to", "bfloat16"],
        "other": ["--to", "nvfp4", "--include", "*down.weight"],
    }.items():
        assert main(["convert", str(path), str(tmp_path / name), *options]) == 0
        entries = StoredCheckpoint(tmp_path / name).entries
        assert rotations_in(entries) == {"model.down": 16, "model.head": 16}
        with pytest.raises(CheckpointException, match="the target for inputs as they are"):
            load(model(None), tmp_path / name, on_mismatch="convert")


def test_plans_of_models_with_other_rotations_are_not_taken_for_one(tmp_path: Path) -> None:
    for block in (16, 32, None):
        path = save(model(block), tmp_path / str(block), nested=True, enable_plan_caching=True)
        found = rotations_in(StoredCheckpoint(path).entries)
        assert found == ({} if block is None else {"model.down": block, "model.head": block})


def test_it_loads_into_a_model_that_rotates(tmp_path: Path) -> None:
    built, other = model(), model(None)
    save(built, tmp_path, nested=True)
    rotate_inputs_(other, {"down": 16, "*ead": 16})
    with torch.no_grad():
        other.head.weight.zero_()
    load(other, tmp_path)
    assert torch.equal(other.head.weight, built.head.weight)


@pytest.mark.parametrize("options", [{}, {"on_mismatch": "convert"}, {"allow_partial_load": True}])
@pytest.mark.parametrize(("held", "wanted"), [(16, None), (None, 16), (16, 32)])
def test_it_loads_into_no_other(held: int | None, wanted: int | None, options: Any, tmp_path: Path) -> None:
    path, target = save(model(held), tmp_path, nested=True), model(wanted)
    words = {
        block: f"inputs that are rotated at run time in blocks of {block}" if block else "inputs as they are"
        for block in (held, wanted)
    }
    with pytest.raises(CheckpointException) as raised:
        load(target, path, **options)
    ((error, _),) = raised.value.failures.values()
    assert str(error) == "the checkpoint does not fit the target; nothing has been loaded:" + "".join(
        f"\n  model.{name}.weight: the checkpoint has it for {words[held]}, the target for {words[wanted]}; "
        "layerwise.rotate_inputs_ gives a model that is built anew the rotations of its checkpoint"
        for name in ("down", "head")
    )


def test_what_only_one_side_has_is_a_key_as_any_other(tmp_path: Path) -> None:
    """Without the weight on the other side there is nothing to compute with it."""
    state = model().state_dict()
    alone = {name: value for name, value in state.items() if not name.startswith("down.weight")}
    dcp.save({"model": alone}, checkpoint_id=tmp_path, planner=QuantizedSavePlanner(), no_dist=True)
    with pytest.raises(CheckpointException, match=r"model.down.weight: missing in the checkpoint"):
        load(model(), tmp_path)
    load(model(), tmp_path, allow_partial_load=True)
    del state["head.weight"], state["head.input_rotation"]
    planner = QuantizedLoadPlanner(allow_partial_load=True)
    dcp.load({"model": state}, checkpoint_id=tmp_path, planner=planner, no_dist=True)


ODD = {
    "an odd size": torch.zeros(24, dtype=torch.uint8),
    "one": torch.zeros(1, dtype=torch.uint8),
    "two dims": torch.zeros(4, 4, dtype=torch.uint8),
    "floats": torch.zeros(16, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", ODD)
def test_entries_of_another_form_are_refused(case: str, tmp_path: Path) -> None:
    state = model().state_dict() | {"down.input_rotation": ODD[case]}
    dcp.save({"model": state}, checkpoint_id=tmp_path, planner=QuantizedSavePlanner(), no_dist=True)
    message = r"model.down.input_rotation is (uint8|bfloat16) \[.*\]; under this name, expected uint8 \[block\] "
    for target in (model(), model(None)):
        with pytest.raises(CheckpointException, match=message):
            load(target, tmp_path)
    with pytest.raises(ValueError, match=message):
        rotations_in(StoredCheckpoint(tmp_path).entries)


def test_entries_without_a_weight_are_refused() -> None:
    entry = Entry("down.input_rotation", None, (16,), torch.uint8)
    message = "^down.input_rotation says that inputs of a linear are rotated at run time, and down.weight is not there"
    with pytest.raises(ValueError, match=message):
        rotations_in({entry.name: entry, "down.bias": Entry("down.bias", None, (8,), torch.float32)})


CALLS: dict[str, tuple[type[Exception], Any, str]] = {
    "nothing": (ValueError, {"*.w2": 16}, "the pattern '*.w2' of online= matches no module"),
    "no power": (ValueError, {"down": 24}, "online= has 24 for 'down', which is no power of two from 2 on"),
    "too large": (ValueError, {"down": 128}, "block=128 does not divide the 64 inputs of down, which online= names"),
    "all": (TypeError, {"*": 16}, " is a ModuleDict; only nn.Linear, as it is, can be rotated"),
    "twice": (ValueError, {"up": 16, "u*": 32}, "online= has several blocks for up: 16, 32"),
}


@pytest.mark.parametrize("case", CALLS)
def test_rotations_that_do_not_fit_are_refused(case: str) -> None:
    error, online, message = CALLS[case]
    built = model(None)
    with pytest.raises(error, match=f"^{re.escape('rotate_inputs_: ' + message)}"):
        rotate_inputs_(built, online)
    assert not input_rotations(built)
    rotate_inputs_(built, {"up": 16})
    with pytest.raises(ValueError, match=r"^rotate_inputs_: the inputs of up are rotated at run time already"):
        rotate_inputs_(built, {"up": 16})
