"""One stage of a calibration: a layer, or all that is outside of layers, from gathered weights to decided ones.

    statistics   every batch through the stage, its linears watched      (the outputs may be the next layer's inputs)
    reduce       over all ranks, in a fixed number of collectives
    smooth       column factors found and folded, where the algorithm has them and the layer allows it
    decide       the algorithm, the same on every rank
    install      the quantized values in place of the weights            (outputs again, for the next layer, if asked)

Nothing in the loops over batches is collective, so ranks may have different numbers of them, or none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_hooks.alike import alike, check_same
from fsdp_hooks.digest import digest
from layerwise.algorithms.algorithm import HESSIAN, Algorithm, Decision, Group, Inputs, Linear
from layerwise.folding.places import Known, Pair, identity
from layerwise.folding.smoothing import Smoothed, smooth, smooths
from layerwise.guard import Guard
from layerwise.report.measure import Measured, Yardstick, matrices
from layerwise.statistics.arithmetic import full_precision
from layerwise.statistics.collector import Collector
from layerwise.targets import Target, siblings
from layerwise.weights.hold import params_of
from qtensor.formats import format_of, shared_amax
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor


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

    def params(self) -> dict[str, Tensor]:
        """Fqn in the model -> parameter of the stage, as it stands."""
        return params_of(self.name, self.module, self.without)

    def guard(self, *, watched: bool) -> Guard:
        """Its parameters at this moment."""
        return Guard(self.name, self.module, self.without, watched=watched)


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
    known: Known = field(default_factory=Known)


class Passes(Protocol):
    """A stage's batches on this rank."""

    @property
    def batches(self) -> int:
        """How many."""

    def run(self, batch: int) -> Any:
        """Runs the stage on one batch; returns its output."""

    def keep(self, batch: int, output: Any) -> None:
        """Keeps an output as input of the next stage."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What a stage came to, full tensors, the same on every rank.

    Attributes:
        weights: name of a target -> its quantized weight.
        quantizers: name of a target -> what decided its scales.
        inputs: name of a target -> statistics of its input, after folding; None where no token reached it.
        changed: the other parameters that were changed, as they stand while the stage is held.
        measured: the figures of a report.
        pairs: where column factors could go in it.
    """

    weights: Mapping[str, QuantizedTensor]
    quantizers: Mapping[str, Mapping[str, Tensor]]
    inputs: Mapping[str, Inputs | None]
    changed: Mapping[str, Tensor]
    measured: Measured = field(default_factory=Measured)
    pairs: tuple[Pair, ...] = ()


@torch.no_grad()
def calibrate_stage(stage: Stage, passes: Passes, method: Method, tell: Callable[[str], None]) -> Calibrated:
    """Calibrate a stage whose weights are held, and leave the quantized values in them.

    Args:
        stage: what is calibrated.
        passes: its batches.
        method: how.
        tell: told "layer_start", "capture", "calibrate" and "write".

    Raises:
        RuntimeError: weights were changed though the algorithm writes none, or were changed too late.
    """
    before = stage.guard(watched=method.watched)
    tell("layer_start")
    tell("capture")
    yardstick = Yardstick(stage.targets)
    collector, identities = _observe(stage, passes, method, yardstick)
    groups = collector.reduce(method.group)
    tell("calibrate")
    with alike(method.group):
        before.check_unwritten(method.algorithm)
    amaxes = _shared_amaxes(stage.targets, method.recipe) if smooths(method.algorithm) else {}
    smoothed = smooth(stage, groups, amaxes, method, passes, identities=identities)
    yardstick.refer(collector, smoothed.factors)
    decisions = _decide(stage, passes, smoothed.groups, method)
    with alike(method.group):
        before.check_unwritten(method.algorithm)
        with full_precision(stage.targets[0].param.device if stage.targets else torch.device("cpu")):
            quantizers, weights = _round(stage, decisions, method.recipe)
        for target in stage.targets:
            target.param.data.copy_(weights[target.name].dequantize())
    parts = [part for weight in weights.values() for part in weight.parts().values()]
    outcome = digest(parts) if parts else torch.zeros((), dtype=torch.int64, device="cpu")
    check_same(method.group, outcome, f"calibrate: {stage.name or 'the model'}")
    installed = stage.guard(watched=method.watched)
    tell("write")
    with alike(method.group):
        for batch in range(passes.batches if method.quantized_onward else min(1, passes.batches)):
            output = passes.run(batch)
            yardstick.compare(batch, output)
            if method.quantized_onward:
                passes.keep(batch, output)
    measured = yardstick.measured(
        smoothed.groups, _noted(decisions, smoothed), stage.index if stage.name else None, method.group
    )
    with alike(method.group):
        installed.check_installed()
    written = {*before.written(), *smoothed.written} - {target.name for target in stage.targets}
    changed = {name: param.detach() for name, param in stage.params().items() if name in written}
    inputs = {name: statistics for names, statistics in smoothed.groups for name in names}
    return Calibrated(weights, quantizers, inputs, changed, measured, smoothed.pairs)


def _observe(stage: Stage, passes: Passes, method: Method, yardstick: Yardstick) -> tuple[Collector, list[int]]:
    """Run every batch, its linears watched. Returns the identities of the outputs, too, where folds will be probed."""
    algorithm = method.algorithm
    needs = algorithm.needs - ({HESSIAN} if algorithm.one_at_a_time else set())
    collector = Collector({target.name: target.param for target in stage.targets}, needs)
    identities = []
    with alike(method.group):
        for batch in range(passes.batches):
            with collector.batch():
                output = passes.run(batch)
            yardstick.note(batch, output)
            if smooths(algorithm):
                identities.append(identity(output))
            if not method.quantized_onward:
                passes.keep(batch, output)
    return collector, [int(one) for one in identities]


def _decide(
    stage: Stage, passes: Passes, groups: Sequence[tuple[tuple[str, ...], Inputs | None]], method: Method
) -> dict[str, Decision]:
    """The decision about every 2-D weight; with one Hessian at a time, its batches are run again for each."""
    algorithm = method.algorithm
    weights = {name: weight for target in stage.targets for name, weight in matrices(target)}
    amaxes = _shared_amaxes(stage.targets, method.recipe)

    def decided(names: tuple[str, ...], inputs: Inputs | None) -> dict[str, Decision]:
        linears = tuple(Linear(name, weights[name], amaxes[name]) for name in names)
        with full_precision(linears[0].weight.device):  # the layer runs in what its owner chose, decisions do not
            own = algorithm.decide(Group(linears, inputs), method.recipe)
        if len(own) != len(names):
            raise ValueError(
                f"{type(algorithm).__name__}.decide returned {len(own)} decisions for the {len(names)} linears "
                f"{', '.join(names)}; expected one for each"
            )
        return dict(zip(names, own, strict=True))

    decisions: dict[str, Decision] = {}
    if not algorithm.one_at_a_time:
        with alike(method.group):
            for names, inputs in groups:
                decisions |= decided(names, inputs)
        return decisions
    for names, statistics in groups:
        inputs = None if statistics is None else _with_hessian(stage, passes, method, names)
        with alike(method.group):
            decisions |= decided(names, inputs)
    return decisions


def _with_hessian(stage: Stage, passes: Passes, method: Method, names: tuple[str, ...]) -> Inputs | None:
    """The statistics of one group's input, from all batches once more, with its Hessian."""
    collector = Collector({target.name: target.param for target in stage.targets}, frozenset({HESSIAN}), only=names)
    with alike(method.group):
        for batch in range(passes.batches):
            with collector.batch():
                passes.run(batch)
    return next(found for own, found in collector.reduce(method.group) if names[0] in own)


def _shared_amaxes(targets: Sequence[Target], recipe: Recipe) -> dict[str, Tensor | None]:
    """What decides the shared scale of every 2-D weight, after agreement between those that share it."""
    found: dict[str, Tensor | None] = {}
    for together in siblings(targets, recipe):
        own = [shared_amax(target.param.detach().float(), recipe) for target in together]
        for target, amax in zip(together, own, strict=True):
            agreed = torch.stack(own).amax() if len(own) > 1 else amax  # type: ignore[arg-type]
            for index, name in enumerate(target.linears()):
                per_row = agreed is not None and agreed.ndim == 3  # [E, N, 1]
                found[name] = agreed[index] if per_row and agreed is not None else agreed
    return found


def _round(
    stage: Stage, decisions: Mapping[str, Decision], recipe: Recipe
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, QuantizedTensor]]:
    """The quantizer and the quantized weight of every target."""
    quantizers, weights = {}, {}
    for target in stage.targets:
        own = [decisions[name] for name in target.linears()]
        quantizers[target.name] = _joined(target, own)
        weights[target.name] = _quantized(target, own, quantizers[target.name], recipe)
    return quantizers, weights


def _joined(target: Target, decisions: Sequence[Decision]) -> Mapping[str, Tensor]:
    """The quantizer of a target from those of its 2-D weights; what they share must be the same."""
    if len(target.shape) == 2:
        return decisions[0].quantizer
    joined = {}
    for key, first in decisions[0].quantizer.items():
        values = torch.stack([decision.quantizer[key] for decision in decisions])
        if first.ndim == 0 and not bool((values == first).all()):
            raise ValueError(
                f"{target.name}: its experts came to different values of {key}, of which one tensor "
                f'{tuple(target.shape)} has only one; use granularity="row"'
            )
        joined[key] = first if first.ndim == 0 else values
    return joined


def _quantized(
    target: Target, decisions: Sequence[Decision], quantizer: Mapping[str, Tensor], recipe: Recipe
) -> QuantizedTensor:
    """The full weight, rounded under its decided scales."""
    own = [
        matrix.float() if decision.weight is None else decision.weight
        for (_, matrix), decision in zip(matrices(target), decisions, strict=True)
    ]
    dense = torch.stack(own) if len(target.shape) == 3 else own[0]
    parts = format_of(recipe).encode_with(dense, recipe, quantizer)
    contiguous = {name: part.contiguous() for name, part in parts.items()}
    return QuantizedTensor.from_parts(contiguous, recipe, target.param.dtype)


def _noted(decisions: Mapping[str, Decision], smoothed: Smoothed) -> dict[str, Mapping[str, Any]]:
    """What a report shows of each linear."""
    return {name: {**smoothed.notes.get(name, {}), **decision.notes} for name, decision in decisions.items()}
