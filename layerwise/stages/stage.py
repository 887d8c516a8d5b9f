"""What a run goes through and how: stages, and the method that each of them is calibrated with.

A stage is what is held at once: a layer, or all that is outside of the layers. Stages of one kind are made alike: where
column factors could go in one of them is all that the others are asked about.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from layerwise.algorithms.algorithm import Algorithm
from layerwise.stages.targets import Target
from qtensor.recipes import Recipe

Pair = tuple[tuple[str, ...], str, str]  # linears, and the name and kind of what produces their input


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of the model that is held at once.

    Attributes:
        index: its number.
        name: fqn of the layer; "" for what is outside of layers.
        module: the layer, or the model.
        without: modules inside it that do not belong to it: the layers, when it is the model.
        targets: the weights to quantize in it.
        shared: fqns of modules with parameters that are used outside of it, too.
    """

    index: int
    name: str
    module: nn.Module
    without: tuple[nn.Module, ...]
    targets: tuple[Target, ...]
    shared: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name or "the model"

    @property
    def prefix(self) -> str:
        """What the fqns of its parameters begin with."""
        return f"{self.name}." if self.name else ""

    def modules(self) -> dict[str, nn.Module]:
        """Fqn in the stage -> module, in the order of the tree."""
        left_out = {id(child) for layer in self.without for child in layer.modules()}
        return {fqn: child for fqn, child in self.module.named_modules() if id(child) not in left_out}

    def params(self) -> dict[str, Tensor]:
        """Fqn in the model -> parameter, as it stands."""
        return {
            ".".join(filter(None, (self.name, fqn, attribute))): param
            for fqn, child in self.modules().items()
            for attribute, param in child._parameters.items()
            if param is not None
        }

    def kind(self) -> Any:
        """The same for stages that are made alike: the class and the names and shapes of its parameters."""
        shapes = tuple((name.removeprefix(self.prefix), tuple(param.shape)) for name, param in self.params().items())
        return type(self.module), shapes


class KnownPairs:
    """Where factors can go in stages of one kind, from the first of them; the others are only asked about that.

    Every pair is still proven in every stage: what is known saves the questions that had the answer no.
    """

    def __init__(self) -> None:
        self._pairs: dict[Any, tuple[Pair, ...]] = {}

    def of(self, stage: Stage) -> tuple[Pair, ...] | None:
        """What is known for a stage like this one."""
        return self._pairs.get(stage.kind())

    def learn(self, stage: Stage, pairs: Iterable[Pair]) -> None:
        """Remember what the first stage of its kind has shown."""
        self._pairs.setdefault(stage.kind(), tuple(pairs))


@dataclass(frozen=True, eq=False)
class Method:
    """How every stage is calibrated.

    Attributes:
        algorithm: decides.
        recipe: the format.
        quantized_onward: the next stage gets the outputs of the quantized one, not those from before.
        group: over which statistics are reduced; None for none.
        watched: a callback, or an algorithm of somebody else, could write weights where none are expected.
        known: where column factors can go, as far as earlier stages have shown.
    """

    algorithm: Algorithm
    recipe: Recipe
    quantized_onward: bool
    group: dist.ProcessGroup | None
    watched: bool = True
    known: KnownPairs = field(default_factory=KnownPairs)
