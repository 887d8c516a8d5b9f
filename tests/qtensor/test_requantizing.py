"""A master and the bytes beside it: what the optimizer leaves always fits, and a part of another step never does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtensor import Float8CurrentScaling, Float8DelayedScaling, MasterWeightOptimizer, quantize
from qtensor.formats.float8_delayed import history_fault
from qtensor.numerics import kernels
from qtensor.numerics.own_scales import elements_of
from qtensor.numerics.requantizing import MasterCheck, differing_bytes
from tests.recipes import TABLE

ROWS, COLUMNS = 256, 256
EACH = pytest.mark.parametrize("recipe", [pytest.param(each.recipe, id=each.name) for each in TABLE])


class Trained:
    """A weight, its optimizer, and the parts of the step before."""

    def __init__(self, recipe: Any, magnitude: float = 1.0) -> None:
        self.draw, self.recipe, self.magnitude = torch.Generator("cpu").manual_seed(11), recipe, magnitude
        self.weight = nn.Parameter(quantize(self.noise(), recipe))
        self.optimizer = MasterWeightOptimizer(torch.optim.SGD, [self.weight], lr=1.0)
        self.before = self.parts()

    def noise(self) -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=self.draw, dtype=torch.float32, device="cpu") * self.magnitude

    def parts(self) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self.weight.detach().parts().items()}

    def step(self, size: float = 0.1) -> None:
        self.before = self.parts()
        self.weight.grad = (self.noise() * size).to(self.weight.dtype)
        self.optimizer.step()

    @property
    def master(self) -> Tensor:
        return self.optimizer.state[self.weight]["master_weight"]  # type: ignore[no-any-return]


def fits(parts: dict[str, Tensor], master: Tensor, recipe: Any) -> bool:
    check = MasterCheck(recipe)
    for start in range(0, ROWS, 128):  # no block is cut
        piece = slice(start, start + 128)
        check.see({name: part[piece] if part.ndim > 1 else part for name, part in parts.items()}, master[piece])
    return check.parts_belong()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@EACH
@pytest.mark.parametrize("magnitude", [1e-38, 1e-6, 1.0, 1e20])
def test_what_the_optimizer_wrote_fits_its_master(recipe: Any, magnitude: float) -> None:
    trained = Trained(recipe, magnitude)
    assert fits(trained.parts(), trained.optimizer._masters[trained.weight], recipe)  # fresh
    for _ in range(3):
        trained.step()
        assert fits(trained.parts(), trained.master, recipe)


@EACH
def test_a_part_of_the_step_before_is_found_wherever_it_differs(recipe: Any) -> None:
    """With the master beside it this is certain: each mixture of two steps that is not one of them."""
    trained = Trained(recipe)
    trained.step()
    trained.step()
    parts = trained.parts()
    for name, old in trained.before.items():
        assert fits({**parts, name: old}, trained.master, recipe) == same(parts[name], old), name
    assert not fits(trained.before, trained.master, recipe)


@EACH
def test_a_piece_is_judged_without_the_amax_of_the_whole(recipe: Any) -> None:
    """As a rank holds it: the rows of another may have the largest value."""
    trained = Trained(recipe)
    trained.step()
    parts, master = trained.parts(), trained.master
    for rows in (slice(0, 128), slice(128, 256)):
        piece = {name: part[rows] if part.ndim > 1 else part for name, part in parts.items()}
        assert differing_bytes(piece, master[rows], recipe, whole_rows=True) == 0
        assert differing_bytes(piece, master[rows] * 1.1, recipe, whole_rows=True) > 0


def test_columns_are_judged_without_the_amax_of_their_rows() -> None:
    recipe = next(each.recipe for each in TABLE if each.name == "float8_row")
    trained = Trained(recipe)
    trained.step()
    parts, master = trained.parts(), trained.master
    for columns in (slice(0, 64), slice(64, 256)):
        piece = {"payload": parts["payload"][:, columns].contiguous(), "scale": parts["scale"]}
        assert differing_bytes(piece, master[:, columns].contiguous(), recipe, whole_rows=False) == 0
        assert differing_bytes(piece, master[:, columns] * 1.1, recipe, whole_rows=False) > 0


def test_bytes_of_columns_are_counted_under_an_amax_that_leads_to_their_scale() -> None:
    """The payload of the piece's own amax beside the scale of a larger one: the scale is what others agreed on."""
    recipe = Float8CurrentScaling()
    master = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    own, amax = quantize(master, recipe).parts(), 2.5 * master.abs().amax(dim=1, keepdim=True)
    theirs = kernels.encode(master, recipe, amax)
    piece = {"payload": own["payload"], "scale": theirs["scale"]}
    expected = int((own["payload"].view(torch.uint8) != theirs["payload"].view(torch.uint8)).sum())
    assert expected > master.numel() / 2
    assert differing_bytes(piece, master, recipe, whole_rows=False) == expected
    assert differing_bytes(theirs, master, recipe, whole_rows=False) == 0


# -- histories ---------------------------------------------------------------------------------------------------------

DELAYED = (
    Float8DelayedScaling(amax_history_len=4),
    Float8DelayedScaling(amax_history_len=4, amax_compute="most_recent"),
    Float8DelayedScaling(amax_history_len=3, margin=2, element="e5m2"),
    Float8DelayedScaling(amax_history_len=1),
)


def fault(parts: dict[str, Tensor], recipe: Any, *, whole: bool = True) -> str | None:
    return history_fault(parts, recipe, elements_of(parts, recipe).abs().amax(), whole=whole)


@pytest.mark.parametrize("recipe", DELAYED, ids=repr)
def test_a_history_that_led_to_its_scale_is_never_doubted(recipe: Any) -> None:
    trained = Trained(recipe)
    for number in range(12):
        trained.step(5.0 if number % 5 == 0 else 0.3)
        assert fault(trained.parts(), recipe) is None
        upper = {name: part[:64] if part.ndim > 1 else part for name, part in trained.parts().items()}
        assert fault(upper, recipe, whole=False) is None
    with torch.no_grad():
        trained.weight.copy_(trained.noise())
    assert fault(trained.parts(), recipe) is None


def test_a_step_of_zeros_leaves_the_scale_of_the_step_before() -> None:
    recipe = DELAYED[1]
    history = torch.tensor([0.0, 5.0, 4.0, 0.0])
    parts = {"payload": torch.zeros(4, 32).to(torch.float8_e4m3fn), "amax_history": history}
    assert fault({**parts, "scale": torch.tensor(5 / 448)}, recipe) is None
    assert "the amax history leads to 0.0 to 0.0111" in str(fault({**parts, "scale": torch.tensor(6 / 448)}, recipe))


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_a_scale_smaller_than_its_history_is_found(magnitude: float) -> None:
    """A weight that grows: the scale of the step before is too small for the amaxes that are recorded."""
    recipe = DELAYED[0]
    trained = Trained(recipe, magnitude)
    for size in (0.1, 6.0, 0.1):
        trained.step(size)
    message = fault({**trained.parts(), "scale": trained.before["scale"]}, recipe)
    assert message is not None
    assert message.startswith("the scale is ")
    assert "the amax history leads to at least" in message


def test_the_scale_of_the_most_recent_amax_is_found_wherever_it_differs() -> None:
    recipe = DELAYED[1]
    trained = Trained(recipe)
    for size in (2.0, 2.0, 2.0, 2.0):  # a random walk: amaxes grow
        trained.step(size)
    assert fault({**trained.parts(), "scale": trained.before["scale"]}, recipe) is not None


def test_a_payload_that_the_last_amax_does_not_fill_is_found() -> None:
    recipe = DELAYED[0]
    trained = Trained(recipe)
    for size in (0.1, 6.0):
        trained.step(size)
    trained.step(0.1)
    parts = trained.parts()
    half = {**parts, "payload": (parts["payload"].float() / 2).to(torch.float8_e4m3fn)}
    message = fault(half, recipe)
    assert message is not None
    assert message.startswith("the largest element is ")
    assert fault(half, recipe, whole=False) is None  # other shards may hold the largest
