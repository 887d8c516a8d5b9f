"""The hook that rotates inputs at run time: what it computes, and that it stays with its module and changes no key."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from qtensor.input_rotation import InputRotation, input_rotations, noted_rotations, rotate_inputs_of

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
    exact, found = x.double() @ matrix(48, BLOCK), InputRotation(BLOCK).rotated(x)
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
        assert noted_rotations(other.state_dict()) == {"down": BLOCK}


def test_a_state_dict_has_the_same_keys_and_knows_of_it() -> None:
    model = rotated()
    state = model.state_dict()
    assert list(state) == list(mlp().state_dict())
    assert noted_rotations(state) == noted_rotations(get_model_state_dict(model)) == {"down": BLOCK}
    assert noted_rotations({f"model.{name}": value for name, value in state.items()}) == {"model.down": BLOCK}
    assert noted_rotations(model.down.state_dict()) == {"": BLOCK}
    assert noted_rotations(torch.compile(model).state_dict()) == {"down": BLOCK}
    assert noted_rotations(model.state_dict(keep_vars=True)) == {"down": BLOCK}
    assert noted_rotations(mlp().state_dict()) == {}
    mlp().load_state_dict(state)


def test_it_can_be_undone() -> None:
    model, x = mlp(), inputs(torch.float64, 5, 8)
    rotate_inputs_of(model.down, BLOCK)()
    assert torch.equal(model(x), mlp()(x))
    assert not input_rotations(model)
    assert not noted_rotations(model.state_dict())


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
        InputRotation(BLOCK).rotated(inputs(torch.float32, 2, 24))
