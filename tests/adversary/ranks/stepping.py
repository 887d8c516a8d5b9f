"""Optimizer steps and agreements on scales by simulated ranks; the bytes are those of one process.

A rank may die, fail in its inner optimizer, have other parameters than the others, list them in another order, have
some on the meta device, or (replicas compared) a flipped bit. All ranks of a group raise, then, and no quantized
parameter of theirs was written. After each operation the ranks tell each other how it ended, as a trainer would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtensor import Float8CurrentScaling, MasterWeightOptimizer, QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.cases import SIZES, Layout, Weight, bits, death, layout, refused, simulated, weights, words

TROUBLE = ("none", "none", "none", "death", "inner", "inner", "absent", "recipe", "renamed", "meta", "bit")
STEPS = 3


@dataclass(frozen=True)
class _Training:
    """What all ranks do alike."""

    given: list[Weight]
    kind: type[torch.optim.Optimizer]
    compares: bool
    named: bool
    frozen: frozenset[str]
    still: frozenset[tuple[str, int]]  # no gradient in this step
    seed: int

    def grad(self, each: Weight, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(each.seed + step)
        return torch.randn(each.shape, generator=generator).to(torch.bfloat16)

    def params(self, values: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(value, requires_grad=name not in self.frozen) for name, value in values.items()}

    def optimizer(self, params: dict[str, nn.Parameter], rank: int) -> Any:
        order = list(params)
        if self.named:
            Random(f"{self.seed}/{rank}").shuffle(order)
        listed: Any = [(name, params[name]) for name in order] if self.named else [params[name] for name in order]
        return MasterWeightOptimizer(self.kind, listed, lr=0.5, check_replicas=self.compares)

    def backward(self, params: dict[str, nn.Parameter], step: int, cut: Callable[[Weight, Tensor], Tensor]) -> None:
        for each in self.given:
            if each.name in params and each.name not in self.frozen and (each.name, step) not in self.still:
                params[each.name].grad = cut(each, self.grad(each, step))

    def alone(self) -> list[dict[str, Tensor]]:
        """The full tensors after each step, as one process makes them."""
        params = self.params({each.name: each.full() for each in self.given})
        optimizer = self.optimizer(params, 0)
        found = []
        for step in range(STEPS):
            self.backward(params, step, lambda _, grad: grad)
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: param.detach().clone() for name, param in params.items()})
        return found


def scenario(random: Random) -> str:
    """A few steps."""
    size = random.choice(SIZES)
    given = weights(random)
    placed = layout(random, size, given, plain=False)
    trouble = random.choice(TROUBLE)
    training = _Training(
        given,
        random.choice([_SGD, _AdamW]),
        trouble == "bit" or random.random() < 0.3,
        random.random() < 0.7,
        frozenset(each.name for each in given if random.random() < 0.1),
        frozenset((each.name, step) for each in given for step in range(STEPS) if random.random() < 0.15),
        random.randrange(2**32),
    )
    who, at = random.randrange(size), random.randrange(STEPS)
    expected = training.alone()

    def body(rank: int) -> tuple[list[str], str]:
        """The errors of the operation that failed, and what was wrong with the bytes."""
        mesh = placed.device_mesh()
        own = trouble if rank == who else "none"
        values = {each.name: placed.piece(each, each.full(), mesh) for each in given}
        _spoil(values, own, [each for each in given if own != "absent" or _leaves_others(each, placed)], training.seed)
        params = training.params(values)
        made: list[Any] = []
        errors = _told(lambda: made.append(training.optimizer(params, rank)))
        if any(errors):
            return errors, ""
        made[0]._inner.fails_at = at if own == "inner" else None
        for step in range(STEPS):
            training.backward(params, step, lambda each, grad: placed.piece(each, grad, mesh))
            flipped = _flip(params) if own == "bit" and step == at else None
            before = _held(params)
            errors = _told(made[0].step)
            made[0].zero_grad()
            if any(errors):
                written = [name for name, held in _held(params).items() if held != before[name]]
                kept = [each.name for each in given if each.facts is not None and each.name in written]
                return errors, f"step {step} raised and wrote {kept}" if errors[rank] and kept else ""
            if flipped is not None and any(place.is_replicate() for place in placed.placements[flipped] or ()):
                return [], f"a flipped bit of {flipped} in one replica was not noticed"
            for each in given if trouble in ("none", "inner") else ():
                if bits(params[each.name].detach()) != bits(placed.piece(each, expected[step][each.name], mesh)):
                    recipe = each.facts and each.facts.name
                    where = f"rank {rank} of {placed.mesh}, {placed.placements[each.name]}"
                    return [], f"{each.name} ({recipe}, {each.shape}) on {where}: other bytes after step {step}"
        return [], ""

    fault = death(random, size, 12) if trouble == "death" else None
    with simulated(size, random, body, fault) as outcomes:
        if any(one.died for one in outcomes):
            return "death"
        if (raised := next((one.error for one in outcomes if one.error), None)) is not None:
            raise raised
        (errors, _), wrong = outcomes[0].value, next((one.value[1] for one in outcomes if one.value[1]), None)
    if wrong is not None:
        raise Found(f"with {trouble}: {wrong}")
    if not any(errors):
        return "stepped" if trouble in ("none", "inner", "death") else f"stepped with {trouble}"
    if trouble in ("none", "death"):
        raise Found(f"a step failed without a reason: {errors}")
    refused([error for error in errors if error], f"steps with {trouble}", alike=False)
    exchange = any(each.facts is not None and each.name not in training.frozen for each in given)
    if trouble == "inner" and exchange and len(placed.mesh) == 1 and not all(errors):
        raise Found(f"a rank failed in its step, and others went on: {errors}")
    return "refused" if all(errors) else "refused by some"


def _told(step: Callable[[], object]) -> list[str]:
    """How an operation ended on each rank."""
    try:
        step()
        own = ""
    except Exception as error:
        own = words(error)
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    return errors


def _held(params: dict[str, nn.Parameter]) -> dict[str, bytes]:
    return {name: b"" if param.is_meta else bits(param.detach()) for name, param in params.items()}


class _Failing:
    """An optimizer that fails at its step of a number."""

    fails_at: int | None = None
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.fails_at is not None and self.count > self.fails_at:
            raise FloatingPointError("the inner optimizer failed")
        return super().step(closure)  # type: ignore[misc]


class _SGD(_Failing, torch.optim.SGD):
    pass


class _AdamW(_Failing, torch.optim.AdamW):
    pass


def _flip(params: dict[str, nn.Parameter]) -> str | None:
    """A bit of one parameter, and its name."""
    for name, param in params.items():
        held: Any = param.detach()
        held = held.to_local() if isinstance(held, DTensor) else held
        held = held.payload if isinstance(held, QuantizedTensor) else held
        if held.numel():
            held.view(-1).view(torch.uint8)[0] ^= 1
            return name
    return None


def _leaves_others(weight: Weight, placed: Layout) -> bool:
    """Whether a rank without a weight still knows the groups that cut it, by others that they cut."""
    cut = _dims_cut(placed, weight.name)
    return any(name != weight.name and cut <= _dims_cut(placed, name) for name in placed.placements)


def _dims_cut(placed: Layout, name: str) -> set[int]:
    """The mesh dims that cut a weight."""
    return {number for number, placement in enumerate(placed.placements[name] or ()) if placement.is_shard()}


def _spoil(values: dict[str, Tensor], trouble: str, given: list[Weight], seed: int) -> None:
    """Give this rank something else than the others have."""
    if not given:
        return
    weight = Random(seed).choice(given)
    name, value = weight.name, values[weight.name]
    if trouble == "absent":
        del values[name]
    elif trouble == "renamed":
        values["another.weight"] = values.pop(name)
    elif trouble == "recipe" and isinstance(value, DTensor):
        shape = value.to_local().shape
        values[name] = _like(quantize(torch.zeros(shape), Float8CurrentScaling(granularity="tensor")), value)
    elif trouble == "meta" and isinstance(value, DTensor):
        values[name] = _like(value.to_local().to("meta"), value)


def _like(local: Tensor, value: DTensor) -> Tensor:
    mesh, placements = value.device_mesh, value.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
