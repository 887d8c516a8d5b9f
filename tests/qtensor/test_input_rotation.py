"""The hook that rotates inputs at run time, and the buffer that says so: what they compute, and where they stay."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_hooks import unsharded
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize_
from qtensor.products.input_rotation import InputRotation, input_rotations, rotate_inputs_of
from tests.ranks import run_ranks

BLOCK = 16


def matrix(width: int, block: int) -> Tensor:
    """H [width, width] in fp64."""
    one = torch.from_numpy(scipy.linalg.hadamard(block)).double() / block**0.5
    return torch.block_diag(*[one] * (width // block))


def inputs(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp(dtype: torch.dtype = torch.float64) -> Mlp:
    torch.manual_seed(0)
    return Mlp().to(dtype)


def rotated(dtype: torch.dtype = torch.float64) -> Mlp:
    """Computes what `mlp` computes, in fp64 within 48 roundings of 2**-53."""
    model = mlp(dtype)
    with torch.no_grad():
        model.down.weight.copy_(model.down.weight.double() @ matrix(48, BLOCK))
    rotate_inputs_of(model.down, BLOCK)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 3, 48), (0, 48)])
def test_the_input_is_multiplied_and_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = inputs(dtype, *shape)
    exact, found = x.double() @ matrix(48, BLOCK), InputRotation(BLOCK).rotate(x)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    # Rounding to the dtype; before it 4 sums and a product in fp32 (fp64), of values of up to 4 in a block.
    inner = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    limit = torch.finfo(dtype).eps / 2 * exact.abs() + 5 * inner * 16
    assert bool(((found.double() - exact).abs() <= limit).all())


def test_a_module_computes_what_it_computed() -> None:
    x = inputs(torch.float64, 5, 8)
    torch.testing.assert_close(rotated()(x), mlp()(x), rtol=0, atol=1e-14)
    model, hidden = rotated(), inputs(torch.float64, 5, 48)
    assert torch.equal(model.down(input=hidden), model.down(hidden))


def test_copies_and_pickles_keep_it() -> None:
    model, x = rotated(), inputs(torch.float64, 5, 8)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
    ):
        assert torch.equal(other(x), model(x))
        assert input_rotations(other) == {"down": BLOCK}
        assert other.down.input_rotation.shape == (BLOCK,)


def said(state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (value.dtype, tuple(value.shape)) for name, value in state.items() if "input_rotation" in name}


SAID = (torch.uint8, (BLOCK,))


def test_every_state_dict_has_the_buffer() -> None:
    model = rotated()
    assert set(model.state_dict()) == {*mlp().state_dict(), "down.input_rotation"}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for state in (
        model.state_dict(),
        model.state_dict(keep_vars=True),
        get_model_state_dict(model),
        get_model_state_dict(model, options=options),
        model.to(torch.bfloat16).state_dict(),
    ):
        assert said(state) == {"down.input_rotation": SAID}
    assert said(torch.compile(model).state_dict()) == {"_orig_mod.down.input_rotation": SAID}
    assert said(model.down.state_dict()) == {"input_rotation": SAID}
    assert input_rotations(model.down) == {"": BLOCK}


def test_state_dicts_do_not_fit_models_that_rotate_other_inputs() -> None:
    model, other = rotated(), mlp()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "down.input_rotation"'):
        mlp().load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "down.input_rotation"'):
        rotated().load_state_dict(mlp().state_dict())
    rotate_inputs_of(other.down, 2 * BLOCK)
    with pytest.raises(RuntimeError, match=r"size mismatch for down.input_rotation"):
        other.load_state_dict(model.state_dict())


def test_a_model_on_meta_has_it_too() -> None:
    with torch.device("meta"):
        model = Mlp().double()
    rotate_inputs_of(model.down, BLOCK)
    assert model.down.input_rotation.is_meta
    model.to_empty(device="cpu")
    assert input_rotations(model) == {"down": BLOCK}
    model.load_state_dict(rotated().state_dict())
    x = inputs(torch.float64, 5, 8)
    assert torch.equal(model(x), rotated()(x))


def test_a_model_that_was_rotated_in_inference_mode_can_be_loaded() -> None:
    model = mlp()
    with torch.inference_mode():
        rotate_inputs_of(model.down, BLOCK)
    model.load_state_dict(rotated().state_dict())


def test_only_the_buffer_of_a_rotation_is_taken_for_one() -> None:
    model = mlp()
    model.down.register_buffer("input_rotation", torch.eye(BLOCK))
    assert input_rotations(model) == {}


def test_it_can_be_undone() -> None:
    model, x = mlp(), inputs(torch.float64, 5, 8)
    rotate_inputs_of(model.down, BLOCK)()
    assert torch.equal(model(x), mlp()(x))
    assert not input_rotations(model)
    assert list(model.state_dict()) == list(mlp().state_dict())


def of_shards(*, first: bool) -> tuple[Any, ...]:
    """What state dicts say, whole ones, gathered weights, and again after a step; with hooks before or after FSDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(model, MXFP8BlockScaling())
    if first:
        rotate_inputs_of(model[1], BLOCK)
    fully_shard(model)
    if not first:
        rotate_inputs_of(model[1], BLOCK)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with unsharded(model):
        gathered = said(model.state_dict())
    return said(model.state_dict()), gathered, said(whole), input_rotations(model)


@pytest.mark.parametrize("first", [True, False])
def test_shards_have_it(first: bool) -> None:
    expected = {"1.input_rotation": SAID}
    for rank, (live, gathered, whole, rotations) in enumerate(run_ranks(2, of_shards, first=first)):
        assert live == gathered == expected
        assert whole == ({} if rank else expected)  # torch gives it to rank 0 alone
        assert rotations == {"1": BLOCK}


def test_gradients_go_through() -> None:
    model, plain = rotated(), mlp()
    x, y = (inputs(torch.float64, 5, 8).requires_grad_() for _ in range(2))
    model(x).sum().backward()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-14)
    torch.testing.assert_close(model.up.weight.grad, plain.up.weight.grad, rtol=0, atol=1e-14)
    torch.testing.assert_close(model.down.weight.grad, plain.down.weight.grad @ matrix(48, BLOCK), rtol=0, atol=1e-14)


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    model, x = rotated(torch.float32), inputs(torch.float32, 5, 8)
    found = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(found, model(x), rtol=0, atol=1e-5)  # products in another order


def test_blocks_that_are_cut_are_refused() -> None:
    message = "a linear whose inputs are rotated in blocks of 16 got 24 channels, which are no whole blocks; shard it "
    with pytest.raises(ValueError, match=f"^{message}"):
        InputRotation(BLOCK).rotate(inputs(torch.float32, 2, 24))
