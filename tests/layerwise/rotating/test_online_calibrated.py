"""Calibration of linears whose inputs are rotated at run time: it sees rotated inputs, sharded, and when it resumes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters.records.rotations import say_inputs
from layerwise import AWQ, GPTAQ, GPTQ, Max, SmoothQuant, rotate_inputs_
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize_, quantized_model_init
from qtensor.products.input_rotation import hadamard, input_rotations, rotate_inputs_of
from tests.layerwise.rotating.decoders import matrix
from tests.layerwise.small_runs import (
    HIDDEN,
    LAYERS,
    Case,
    Found,
    Layer,
    Model,
    batches,
    bytes_of,
    found,
    logits_of,
    model_of,
    run,
    stopped,
)
from tests.ranks import run_ranks, run_ranks_each

BLOCK, U8 = 16, torch.uint8
ALGORITHMS = {
    "max": Case(algorithm=Max(), dtype=torch.float32, options={"inputs": "static"}),
    "gptq": Case(algorithm=GPTQ(), dtype=torch.float32),
    "gptaq": Case(algorithm=GPTAQ(), dtype=torch.float32),
    "awq": Case(algorithm=AWQ(), recipe=MXFP8BlockScaling(), dtype=torch.float32),
    "smoothquant, then gptq": Case(
        algorithm=GPTQ(smoothing=SmoothQuant()), recipe=MXFP8BlockScaling(), stop=("checkpoint", 1)
    ),
}


class Written(Layer):
    """The same layer, with the rotation written into its forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm1(hidden)
        hidden = hidden + self.o_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))
        wide = torch.relu(self.up_proj(self.norm2(hidden)))
        return hidden + self.down_proj(hadamard(wide.float(), BLOCK).to(wide.dtype))


@torch.no_grad()
def turn(model: Model, *, written: bool = False) -> None:
    """Rotate the weights, and the inputs by hooks or in the forward of the layers."""
    for layer in model.layers:
        weight = layer.down_proj.weight
        weight.copy_(weight.double() @ matrix(HIDDEN, HIDDEN, BLOCK, None))
        if written:
            layer.__class__ = Written
        else:
            rotate_inputs_of(layer.down_proj, BLOCK)


def turned(case: Case, *, shard: bool | None = None) -> Model:
    return model_of(case, shard=shard, prepare=turn)


def bare(found: Found) -> Found:
    """Without the buffers that say what is rotated, which are shown to be there."""
    state, kept = {}, set()
    for place in ("result", "model"):
        named = getattr(found, place)
        kept.add(frozenset(name for name in named if "rotation" in name))
        state[place] = {name: value for name, value in named.items() if "rotation" not in name}
    assert kept == {frozenset(f"layers.{index}.down_proj.input_rotation" for index in range(LAYERS))}
    return dataclasses.replace(found, **state)


def of_one(name: str) -> Found:
    model = turned(ALGORITHMS[name], shard=False)
    return found(run(model, ALGORITHMS[name]), model)


@pytest.mark.full
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_calibration_is_that_of_a_model_with_the_rotation_in_its_forward(name: str) -> None:
    case = ALGORITHMS[name]
    written = model_of(case, shard=False, prepare=functools.partial(turn, written=True))
    assert bare(of_one(name)).same() == found(run(written, case), written).same()


def inputs_of(model: Model) -> Tensor:
    """What the first layer has for its down_proj, before anything rotates it: [tokens, HIDDEN] in fp64."""
    kept: list[Tensor] = []
    layer = model.layers[0]
    handle = layer.up_proj.register_forward_hook(lambda _, args, output: kept.append(torch.relu(output).double()))
    with torch.no_grad():
        for batch in batches():
            model(batch)
    handle.remove()
    return torch.cat([one.flatten(0, 1) for one in kept])


def test_the_largest_input_is_that_of_rotated_inputs() -> None:
    case = ALGORITHMS["max"]
    model = turned(case)
    plain = inputs_of(model)
    (record,) = [one for one in run(model, case).report.records if one.name == "layers.0.down_proj.weight"]
    exact = (plain @ matrix(HIDDEN, HIDDEN, BLOCK, None)).abs().max().item()
    assert record.input_amax == pytest.approx(exact, rel=2**-20)  # 4 sums and a product in fp32, of positive values
    assert record.input_amax != pytest.approx(plain.abs().max().item(), rel=0.01)


@pytest.mark.parametrize("algorithm", [SmoothQuant(), AWQ()])
def test_no_factors_are_folded_through_a_rotation(algorithm: Any) -> None:
    """They would have to divide rotated inputs, and up_proj makes the others."""
    case = Case(algorithm=algorithm, recipe=MXFP8BlockScaling(), dtype=torch.float32)

    def smoothed(model: Model) -> set[str]:
        records = run(model, case).report.records
        return {one.name.rpartition("s.0.")[2] for one in records if "s.0." in one.name and one.alpha is not None}

    without = smoothed(model_of(case))
    assert "down_proj.weight" in without
    assert smoothed(turned(case)) == without - {"down_proj.weight"}


def sharded(name: str) -> Found:
    model = turned(ALGORITHMS[name])
    return found(run(model, ALGORITHMS[name]), model)


def test_ranks_come_to_the_bytes_of_one() -> None:
    names = ["max", "gptq"]
    whole = [of_one(name).same() for name in names]
    for results in run_ranks_each(2, names, sharded):
        assert [result.same() for result in results] == whole


def resumed(path: Path) -> Found:
    case = ALGORITHMS["smoothquant, then gptq"]
    model = turned(case)
    return found(run(model, case, checkpoint_dir=path), model)


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    name = "smoothquant, then gptq"
    stopped(turned(ALGORITHMS[name]), ALGORITHMS[name], tmp_path / "run")
    whole = of_one(name)
    for result in run_ranks(2, resumed, tmp_path / "run"):
        assert result.resumed == (0, 1)
        assert result.same() == whole.same()


def test_a_run_does_not_go_on_without_the_rotations(tmp_path: Path) -> None:
    case = dataclasses.replace(ALGORITHMS["gptq"], stop=("checkpoint", 1))
    stopped(turned(case), case, tmp_path)
    plain = model_of(case)
    plain.load_state_dict(turned(case).state_dict(), strict=False)
    with pytest.raises(ValueError, match="input_rotations"):
        run(plain, case, checkpoint_dir=tmp_path)


def test_a_model_on_disk_is_calibrated_alike(tmp_path: Path) -> None:
    case = dataclasses.replace(ALGORITHMS["gptq"], options={"weights": tmp_path / "rotated"})
    save_model(turned(case), tmp_path / "rotated")
    with torch.device("meta"):
        model = Model().to(case.dtype)
    for layer in model.layers:
        rotate_inputs_of(layer.down_proj, BLOCK)
    state = run(model, case).state_dict()
    assert {name: bytes_of(value) for name, value in state.items()} == of_one("gptq").result
    save_model(model_of(case), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"layers.0.down_proj.input_rotation, .* are on the meta device and not in"):
        run(model, case, weights=tmp_path / "plain")


@pytest.mark.parametrize("online", [{}, {"*.down_proj": 2 * BLOCK}, {"*.down_proj": BLOCK, "*.o_proj": BLOCK}])
def test_files_fit_models_that_rotate_alike(online: dict[str, int], tmp_path: Path) -> None:
    """Also where the model has the buffers, and only its parameters are in the files."""
    case = Case(dtype=torch.float32)
    save_model(turned(case, shard=False), tmp_path / "rotated")
    with torch.device("meta"):
        model = Model().to(case.dtype)
    rotate_inputs_(model, online)
    for module in input_rotations(model):
        model.get_submodule(module).input_rotation = torch.zeros(online["*." + module.rpartition(".")[2]], dtype=U8)
    at, block = ("o_proj", BLOCK) if "*.o_proj" in online else ("down_proj", online.get("*.down_proj", 0))
    on_disk, own = say_inputs(0 if at == "o_proj" else BLOCK), say_inputs(block)
    message = (
        f"^calibrate: layers.0.{at}.weight in .*rotated is for {on_disk}, and the model has {own}; "
        "layerwise.rotate_inputs_ gives a model the rotations of its files"
    )
    with pytest.raises(ValueError, match=message):
        run(model, case, weights=tmp_path / "rotated")


def save_model(model: nn.Module, path: Path) -> None:
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")


# -- beside other wrappers ---------------------------------------------------------------------------------------------


def before_and_after() -> tuple[str, str, str, list[str]]:
    """Logits of a plain model, of one that was sharded with hooks, of one that got them afterwards; its keys."""
    case = Case(dtype=torch.float32)
    plain, first = turned(case, shard=False), turned(case)
    then = model_of(case, shard=False, prepare=functools.partial(turn, written=False))
    for layer in then.layers:
        layer.down_proj._forward_pre_hooks.clear()
        del layer.down_proj.input_rotation
        fully_shard(layer)
    fully_shard(then)
    for layer in then.layers:
        rotate_inputs_of(layer.down_proj, BLOCK)
    assert dist.get_world_size() == 2
    return logits_of(plain), logits_of(first), logits_of(then), list(first.state_dict())


def test_fully_shard_before_or_after_the_hooks() -> None:
    for plain, first, then, keys in run_ranks(2, before_and_after):
        assert plain == first == then
        assert keys == list(turned(Case(), shard=False).state_dict())


def test_quantized_storage_keeps_the_hooks() -> None:
    model = turned(Case(dtype=torch.float32))
    other = copy.deepcopy(model)
    quantize_(model, MXFP8BlockScaling(), exclude=["*.spare"])
    assert input_rotations(model) == {f"layers.{index}.down_proj": BLOCK for index in range(LAYERS)}
    with torch.no_grad():
        for name, param in other.named_parameters():
            quantized: Any = model.get_parameter(name)
            param.copy_(quantized.dequantize() if hasattr(quantized, "dequantize") else quantized)
    assert logits_of(model) == logits_of(other)
    with quantized_model_init(NVFP4BlockScaling()):
        linear = nn.Linear(HIDDEN, HIDDEN)
    rotate_inputs_of(linear, BLOCK)
    assert linear(torch.ones(2, HIDDEN)).shape == (2, HIDDEN)
