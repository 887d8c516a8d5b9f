"""A life: a model, its reference, and the steps that both take; after each step all bytes are compared.

Everything a step does follows from its own seed, so steps can be left out of a life and the others stay what they were.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from qtensor import MasterWeightOptimizer, QuantizedTensor, high_precision_init_val
from qtensor.scales.high_precision import HighPrecisionWeight
from tests._rank_worker import warnings_as_errors
from tests.adversary.attack import Found
from tests.adversary.lives import models
from tests.adversary.lives.models import TOKENS, Layer
from tests.adversary.lives.twin import Masters, Plain, Weight, held_equal, raw, same_values, weights_of

DEFAULTS = ("float32",) * 4 + ("bfloat16", "float16", "float64", "bfloat16 meta", "float64 meta")
# name -> (class, options); with ordinary optimizers only those that write a parameter once a step
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.125}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
SINGLE_WRITES = ("sgd", "momentum", "adam", "amsgrad", "adagrad", "adamax", "rmsprop", "adadelta", "radam")


@dataclass(frozen=True)
class Step:
    """One step: its name in the table, and the seed of all that it draws."""

    name: str
    seed: int


@dataclass(frozen=True)
class Plan:
    """All that a life is."""

    seed: int
    layers: tuple[Layer, ...]
    steps: tuple[Step, ...]
    defaults: str = "float32"
    optimizer: str = "sgd"
    masters: bool = True
    grouped: int = 0  # how many parameters at the end are not in the optimizer to begin with


@dataclass
class Life:
    """Where a life stands."""

    plan: Plan
    path: Path
    layers: list[Layer]
    net: Any
    weights: dict[str, Weight]
    optimizer: Any = None
    twin: Any = None
    left: list[str] = field(default_factory=list)  # names that no group has yet
    saves: int = 0
    bases: list[Path] = field(default_factory=list)  # full saves, to which deltas may be made
    change: Any = None  # a step that writes something
    uploads: Any = None  # the process group of saves in the background

    def shard(self, net: Any) -> Any:
        """Cut a new model as this life's is."""
        return net

    def whole(self, param: Tensor) -> Any:
        """The full tensor of a parameter."""
        return param.detach()

    first = True  # whether this rank does what one alone does

    def everywhere(self, value: Any) -> Any:
        """What rank 0 has."""
        return value

    def agree(self) -> None:
        """Make scales agreed, where writes by hand leave them to be."""

    @contextlib.contextmanager
    def under(self, *, device: bool = True) -> Iterator[None]:
        """The defaults of this life."""
        dtype, _, other = self.plan.defaults.partition(" ")
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device(other) if other and device else contextlib.nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def tune(self, *, all_of_them: bool = False) -> None:
        """A new optimizer over the parameters as they are."""
        names = list(self.weights)
        self.left = [] if all_of_them or not self.plan.grouped else names[-self.plan.grouped :]
        self.optimizer, self.twin = self.optimizers([name for name in names if name not in self.left])

    def optimizers(self, names: Sequence[str]) -> tuple[Any, Any]:
        kind, options = OPTIMIZERS[self.plan.optimizer]
        params = self.named()
        chosen = [params[name] for name in names]
        with self.under(device=False):
            if self.plan.masters:
                return MasterWeightOptimizer(kind, chosen, **options), Masters(self.weights, kind, [names], options)
            return kind(chosen, **options), Plain(self.weights, kind, [names], options)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def batch(self, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs, and the gradients of outputs."""
        xs, signs = [], []
        for number, layer in enumerate(self.layers):
            lead = (layer.experts, TOKENS) if layer.experts else (TOKENS,)
            xs.append(models.small((*lead, layer.columns), seed + 2 * number, layer.dtype))
            signs.append(models.small((*lead, layer.rows), seed + 2 * number + 1, layer.dtype))
        return xs, signs

    # -- what is compared ----------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raise `Found` where the model is not what its reference is."""
        params = self.named()
        if list(params) != list(self.weights):
            raise Found(f"parameters {list(params)}, expected {list(self.weights)}")
        for name, weight in self.weights.items():
            self.compare_weight(name, params[name], weight)

    def compare_weight(self, name: str, param: Tensor, weight: Weight) -> None:
        if (param.dtype, tuple(param.shape), param.requires_grad) != (weight.dtype, weight.shape, weight.requires_grad):
            raise Found(
                f"{name} is {param.dtype} {tuple(param.shape)}, requires_grad={param.requires_grad}; expected "
                f"{weight.dtype} {weight.shape}, {weight.requires_grad}"
            )
        found = stored(local(param))
        wanted = self.piece(param, weight)
        if found != wanted:
            raise Found(f"{name}: other bytes in {different(found, wanted)}")
        own = high_precision_init_val(param)
        if (own is None) != (weight.initial is None) or (own is not None and raw(own) != raw(weight.initial)):
            raise Found(f"{name}: the preserved initial value is {own}, expected {weight.initial}")
        if not isinstance(param, DTensor):
            grad = param.grad
            if (grad is None) != (weight.grad is None):
                raise Found(f"{name}: gradient {grad}, expected {weight.grad}")
            if grad is not None and not (grad.dtype == weight.grad.dtype and same_values(grad, weight.grad)):
                raise Found(f"{name}: another gradient")

    def piece(self, param: Tensor, weight: Weight) -> dict[str, bytes]:
        return weight.stored()

    def compare_states(self) -> None:
        """The states of the optimizers."""
        wanted, params = self.twin.states(), self.named()
        for name in wanted:
            found = self.optimizer.state.get(params[name], {})
            if not held_equal(found, wanted[name]):
                raise Found(f"{name}: optimizer state\n{found}\nexpected\n{wanted[name]}")


def local(param: Tensor) -> Any:
    with torch.no_grad():
        return param.to_local() if isinstance(param, DTensor) else param.detach()


def stored(held: Any) -> dict[str, bytes]:
    """The bytes of a local tensor."""
    if isinstance(held, QuantizedTensor):
        return {name: raw(part) for name, part in held.parts().items()}
    return {"": raw(held.dense if isinstance(held, HighPrecisionWeight) else held)}


def different(found: dict[str, bytes], wanted: dict[str, bytes]) -> str:
    if found.keys() != wanted.keys():
        return f"parts {list(found)}, expected {list(wanted)}"
    told = []
    for name, own in found.items():
        other = wanted[name]
        if own != other:
            places = [index for index, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]]
            told.append(
                f"{name or 'values'}: {len(places)} of {len(other)} bytes (now {len(own)}), first at {places[:5]}: "
                f"{own[places[0] : places[0] + 8].hex() if places else ''}, expected "
                f"{other[places[0] : places[0] + 8].hex() if places else ''}"
            )
    return "; ".join(told)


def quiet() -> None:
    """What torch warns of, and is meant."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")


def born(plan: Plan, path: Path) -> Life:
    """The model of a plan and its reference."""
    layers = list(plan.layers)
    weights = weights_of(layers)

    def values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return models.weights(shape, plan.seed + len(name) + sum(shape), dtype)

    life = Life(plan, path, layers, None, weights)
    with life.under():
        life.net = models.build(layers, values)
    for name, weight in weights.items():
        weight.write(values(name, weight.shape, weight.dtype))
    return life


StepFunction = Callable[[Life, Random], Any]


def live(plan: Plan, table: dict[str, StepFunction]) -> dict[str, int]:
    """Live it in one process; returns how often each step was taken."""
    taken: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="life-") as path, warnings_as_errors():
        quiet()
        life = born(plan, Path(path))
        life.change = table["in_place"]
        life.compare()
        life.tune()
        for number, step in enumerate(plan.steps):
            try:
                if table[step.name](life, Random(step.seed)) is None:
                    taken[step.name] = taken.get(step.name, 0) + 1
                life.compare()
            except (Exception, CheckpointException) as error:  # the latter is no Exception
                raise Failure(number, step, error) from error
    return taken


class Failure(Exception):
    """A step that failed."""

    def __init__(self, number: int, step: Step, error: BaseException) -> None:
        super().__init__(f"step {number}, {step.name}({step.seed}): {type(error).__name__}: {error}")
        self.number, self.step, self.error = number, step, error
