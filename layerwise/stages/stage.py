"""The stages that a run goes through, and the method that calibrates each of them.

A stage is what is held at once: a layer, or all that is outside of the layers. Stages of one kind are built alike: the
first is probed for places where column factors can go, and later ones at these places only.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_hooks.wrappers import plain_modules, unwrap
from layerwise.algorithms.algorithm import Algorithm
from layerwise.formats.assignment import Formats
from layerwise.stages.experts import ExpertBlock
from layerwise.stages.targets import Target
from qtensor.spec.recipes import Recipe

Pair = tuple[tuple[str, ...], str, str]  # linears, and the name and kind of what produces their input


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of the model that is held at once.

    Attributes:
        index: its number.
        name: fqn of the layer; "" for what is outside of layers.
        module: the layer, or the model.
        without: modules inside it that do not belong to it: the layers, if it is the model.
        targets: the weights to quantize in it.
        shared: fqns of its modules with parameters that are used outside of it, too.
        attentions: fqn in the model -> module, of those whose caches get scales.
        recipes: of each target; none while formats are searched for.
        blocks: whose experts see every token when statistics are made.
    """

    index: int
    name: str
    module: nn.Module
    without: tuple[nn.Module, ...]
    targets: tuple[Target, ...]
    shared: frozenset[str] = frozenset()
    attentions: Mapping[str, nn.Module] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    blocks: tuple[ExpertBlock, ...] = ()

    @property
    def title(self) -> str:
        """Return its name in messages."""
        return self.name or "the model"

    @property
    def prefix(self) -> str:
        """Return the beginning of its parameters' fqns."""
        return f"{self.name}." if self.name else ""

    def modules(self) -> dict[str, nn.Module]:
        """Map plain fqns in the stage to modules, in the order of the tree, with adapters and without wrappers."""
        return dict(self.placed())

    def everything(self) -> list[nn.Module]:
        """Return all its modules: wrappers, too, which FSDP may have sharded."""
        return [module for _, module in self.placed()]

    def placed(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield plain fqns in the stage and modules; a wrapper comes before what it wraps, under one name."""
        left_out = {id(child) for layer in self.without for child in layer.modules()}
        for fqn, child in plain_modules(self.module, adapters=True):
            if id(child) not in left_out:
                yield fqn, child

    def params(self) -> dict[str, Tensor]:
        """Map fqns in the model to parameters, as they stand."""
        return {
            ".".join(filter(None, (self.name, fqn, attribute))): param
            for fqn, child in self.placed()
            for attribute, param in child._parameters.items()
            if param is not None
        }

    def kind(self) -> Any:
        """Return what is equal for stages that are built and quantized alike: class, parameters, targets, recipes."""
        shapes = tuple((name.removeprefix(self.prefix), tuple(param.shape)) for name, param in self.params().items())
        return (
            type(unwrap(self.module)),
            shapes,
            tuple(one.name.removeprefix(self.prefix) for one in self.targets),
            self.recipes,
        )

    def kinds(self) -> dict[str, Recipe]:
        """Map names of targets to their recipes, as far as these are known."""
        return dict(zip((target.name for target in self.targets), self.recipes, strict=False))


class KnownPairs:
    """Where factors could go in the first stage of each kind; later ones are probed only there.

    Every pair is still probed in every stage; only those that failed in the first one are skipped.
    """

    def __init__(self) -> None:
        self._pairs: dict[Any, tuple[Pair, ...]] = {}

    def of(self, stage: Stage) -> tuple[Pair, ...] | None:
        """Return what is known of stages of this kind; None if this is the first."""
        return self._pairs.get(stage.kind())

    def learn(self, stage: Stage, pairs: Iterable[Pair]) -> None:
        """Remember what the first stage of its kind has shown."""
        # The first stage of a kind counts, so that a resumed run probes what an uninterrupted one would.
        self._pairs.setdefault(stage.kind(), tuple(pairs))


@dataclass(frozen=True, eq=False)
class Method:
    """How every stage is calibrated.

    Attributes:
        algorithm: decides about weights and factors.
        recipe: the format of all weights, or of each; or those to choose from.
        quantized_onward: the next stage gets the outputs of the quantized stage, not those from before.
        group: the ranks to reduce statistics over; None for a single process.
        watched: a callback, or a user's own algorithm, could write weights where no writes are expected.
        known: where column factors can go, as far as earlier stages have shown.
    """

    algorithm: Algorithm
    recipe: Formats
    quantized_onward: bool
    group: dist.ProcessGroup | None
    watched: bool = True
    known: KnownPairs = field(default_factory=KnownPairs)

    @property
    def ranks(self) -> int:
        """Return how many ranks share the work."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Return this rank's number among them."""
        return 0 if self.group is None else self.group.rank()
