"""Steps that train, freeze and copy."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from tests.adversary.attack import Found
from tests.adversary.lives import models, twin
from tests.adversary.lives.twin import same_values

if TYPE_CHECKING:
    from tests.adversary.lives.life import Life


def train(life: Life, random: Random) -> Any:
    """A forward and a backward; gradients add up."""
    if not any(weight.requires_grad for weight in life.weights.values()):
        return "frozen"
    for _ in range(random.choice((1, 1, 2))):
        xs, signs = life.batch(random.getrandbits(40))
        with life.under():
            outputs = life.net(xs)
            sum((y * sign).sum() for y, sign in zip(outputs, signs, strict=True)).backward()
        (wanted,) = twin.gradients(life.layers, life.weights, [(xs, signs)])
        compare_outputs(outputs, wanted)
    return None


def compare_outputs(found: Any, wanted: Any, *, first: int = 0) -> None:
    for number, (y, other) in enumerate(zip(found, wanted, strict=True), start=first):
        if y.dtype != other.dtype or not same_values(y.detach(), other):
            raise Found(f"layer {number} gives {y}, expected {other}")


def evaluate(life: Life, random: Random) -> None:
    """A forward without gradients."""
    xs, signs = life.batch(random.getrandbits(40))
    with life.under(), random.choice((torch.no_grad, torch.inference_mode))():
        outputs = life.net(xs)
    compare_outputs(outputs, twin.outputs(life.layers, life.weights, (xs, signs)))


def step(life: Life, random: Random) -> None:
    """A step of the optimizer."""
    if random.random() < 0.3:
        rate = random.choice((0.5, 0.01, 0.03, 1e-4))
        for group in [*life.optimizer.param_groups, *life.twin.inner.param_groups]:
            group["lr"] = rate
    with life.under(device=False):
        life.optimizer.step()
        life.twin.step()
    life.compare()
    life.compare_states()
    if random.random() < 0.8:
        zero(life, random)


def zero(life: Life, random: Random) -> None:
    """Gradients are dropped, also of parameters that no group has."""
    life.net.zero_grad()
    for weight in life.weights.values():
        weight.grad = None


def freeze(life: Life, random: Random) -> None:
    """Some parameters are frozen, or thawed."""
    flag = random.random() < 0.5
    for name, param in life.named().items():
        if random.random() < 0.5:
            param.requires_grad_(flag)
            life.weights[name].requires_grad = flag


def add_group(life: Life, random: Random) -> Any:
    """The optimizer gets the parameters that it did not have."""
    if not life.left:
        return "all there"
    params = life.named()
    with life.under(device=False):
        life.optimizer.add_param_group({"params": [params[name] for name in life.left]})
        life.twin.add_group(life.left)
    life.left = []
    return None


def tune(life: Life, random: Random) -> None:
    """Another optimizer."""
    life.tune()


def duplicate(life: Life, random: Random) -> None:
    """Model and optimizer are copied; the life goes on with the copies, and the originals are overwritten."""
    how, before = random.choice(("deepcopy", "pickle", "torch.save")), (life.net, life.optimizer)
    with life.under():
        life.net, life.optimizer = _copied(how, before)
    for weight in life.weights.values():
        weight.grad = None  # as torch does with parameters
        if how != "deepcopy":
            weight.forget()
    with torch.no_grad():
        for param in before[0].parameters():
            param.zero_()


def _copied(how: str, whole: Any) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(whole)
    if how == "pickle":
        return pickle.loads(pickle.dumps(whole))
    held = io.BytesIO()
    torch.save(whole, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def convert_dtype(life: Life, random: Random) -> None:
    """The model appears in another dtype; a new optimizer follows."""
    dtype = random.choice(models.DTYPES)
    with life.under():
        life.net.to(dtype)
    life.layers = [replace(layer, dtype=dtype) for layer in life.layers]
    for weight in life.weights.values():
        if not weight.quantized:
            assert weight.value is not None
            weight.value = weight.value.to(dtype)
        weight.dtype = dtype
        if weight.initial is not None:
            weight.initial = weight.initial.to(dtype)
        if weight.grad is not None:
            weight.grad = weight.grad.to(dtype)
    life.tune()


STEPS = {
    "train": train,
    "evaluate": evaluate,
    "step": step,
    "zero": zero,
    "freeze": freeze,
    "add_group": add_group,
    "tune": tune,
    "duplicate": duplicate,
    "convert_dtype": convert_dtype,
}
