"""Calibrates one stage (a layer, or all that is outside of layers): from gathered weights to quantized ones.

    statistics   every batch through the stage, its linears watched      (the outputs may be the next layer's inputs)
    reduce       over all ranks, in a fixed number of collectives
    smooth       column factors found and folded, where the algorithm has them and the layer allows it
    decide       the algorithm, the same on every rank
    install      the quantized values in place of the weights            (outputs again, for the next layer, if asked)

Nothing in the loops over batches is collective, so ranks may have different numbers of them, or none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_hooks.across_ranks import check_same, raise_together
from fsdp_hooks.digest import digest
from layerwise.algorithms.algorithm import HESSIAN, Decision, Group, Inputs, Linear
from layerwise.algorithms.arithmetic import full_precision
from layerwise.folding.smoothing import smooth, smooths
from layerwise.inputs.replay import Replay
from layerwise.inputs.structure import flatten
from layerwise.report.measure import Measured, Yardstick
from layerwise.stages.stage import Method, Pair, Stage
from layerwise.stages.targets import Target, agreed_amaxes
from layerwise.statistics.collector import Collector, Groups
from layerwise.weights.snapshot import Snapshot
from qtensor.formats import format_of
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The result of a stage: full tensors, the same on every rank.

    Attributes:
        weights: name of a target -> its quantized weight.
        quantizers: name of a target -> the quantizer that fixed its scales.
        input_amax: name of a target -> largest |input|, after folding; None where no token reached it.
        changed: other parameters that were changed, with their values while the stage is held.
        measured: the figures of a report.
        pairs: where column factors could go in the stage.
    """

    weights: Mapping[str, QuantizedTensor]
    quantizers: Mapping[str, Mapping[str, Tensor]]
    input_amax: Mapping[str, float | None]
    changed: Mapping[str, Tensor]
    measured: Measured = field(default_factory=Measured)
    pairs: tuple[Pair, ...] = ()


@torch.no_grad()
def calibrate_stage(stage: Stage, replay: Replay, method: Method, tell: Callable[[str], None]) -> Calibrated:
    """Calibrate a stage whose weights are held, and leave the quantized values in them.

    Args:
        stage: what is calibrated.
        replay: runs it on its batches.
        method: how.
        tell: called with "layer_start", "capture", "calibrate" and "write".

    Raises:
        RuntimeError: weights were changed although the algorithm writes none, or were changed too late.
    """
    before = Snapshot(stage, watched=method.watched)
    tell("layer_start")
    tell("capture")
    yardstick = Yardstick(stage.targets)
    collector, identities = _observe(stage, replay, method, yardstick)
    groups = collector.reduce(method.group)
    tell("calibrate")
    with raise_together(method.group):
        before.check_unwritten(method.algorithm)
    smoothed = smooth(stage, groups, method, replay, identities)
    yardstick.refer(collector, smoothed.factors)
    decisions = _decide(stage, replay, smoothed.groups, method)
    with raise_together(method.group):
        before.check_unwritten(method.algorithm)
        quantizers, weights = _round(stage.targets, decisions, method.recipe)
        for target in stage.targets:
            target.param.data.copy_(weights[target.name].dequantize())
    parts = [part for weight in weights.values() for part in weight.parts().values()]
    outcome = digest(parts) if parts else torch.zeros((), dtype=torch.int64, device="cpu")
    check_same(method.group, outcome, f"calibrate: {stage.title}")
    installed = Snapshot(stage, watched=method.watched)
    tell("write")
    with raise_together(method.group):
        for batch in range(len(replay) if method.quantized_onward else min(1, len(replay))):
            output = replay.run(batch)
            yardstick.compare(batch, output)
            if method.quantized_onward:
                replay.keep(batch, output)
    notes = {name: {**smoothed.notes.get(name, {}), **decision.notes} for name, decision in decisions.items()}
    measured = yardstick.measured(smoothed.groups, notes, stage.index if stage.name else None, method.group)
    with raise_together(method.group):
        installed.check_installed()
    written = {*before.written(), *smoothed.written} - {target.name for target in stage.targets}
    changed = {name: param.detach() for name, param in stage.params().items() if name in written}
    return Calibrated(weights, quantizers, _largest(stage.targets, smoothed.groups), changed, measured, smoothed.pairs)


def _observe(stage: Stage, replay: Replay, method: Method, yardstick: Yardstick) -> tuple[Collector, list[int]]:
    """Run every batch and watch its linears. Where folds will be probed, also return an identity for each output.

    An identity is a digest of all tensors of the output, the same for a batch on whichever rank it is.
    """
    algorithm = method.algorithm
    needs = algorithm.needs - ({HESSIAN} if algorithm.one_at_a_time else set())
    collector = Collector({target.name: target.param for target in stage.targets}, needs)
    identities: list[Tensor | int] = []
    with raise_together(method.group):
        for batch in range(len(replay)):
            with collector.batch():
                output = replay.run(batch)
            yardstick.note(batch, output)
            if smooths(algorithm):
                tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
                identities.append(digest(tensors) if tensors else 0)
            if not method.quantized_onward:
                replay.keep(batch, output)
    return collector, [int(one) for one in identities]


def _decide(stage: Stage, replay: Replay, groups: Groups, method: Method) -> dict[str, Decision]:
    """The decision about every 2-D weight; with one Hessian at a time, its batches are run again for each."""
    algorithm = method.algorithm
    weights = {name: weight for target in stage.targets for name, weight in target.matrices()}
    amaxes = agreed_amaxes(stage.targets, method.recipe)
    decisions: dict[str, Decision] = {}

    def decide(names: tuple[str, ...], inputs: Inputs | None) -> None:
        linears = tuple(Linear(name, weights[name], amaxes[name]) for name in names)
        with full_precision(linears[0].weight.device):  # only the layer itself runs in the precision the user chose
            own = algorithm.decide(Group(linears, inputs), method.recipe)
        if len(own) != len(names):
            raise ValueError(
                f"{type(algorithm).__name__}.decide returned {len(own)} decisions for the {len(names)} linears "
                f"{', '.join(names)}; expected one for each"
            )
        decisions.update(zip(names, own, strict=True))

    if not algorithm.one_at_a_time:
        with raise_together(method.group):
            for names, inputs in groups:
                decide(names, inputs)
        return decisions
    for names, statistics in groups:
        inputs = None if statistics is None else _with_hessian(stage, replay, method, names)
        with raise_together(method.group):
            decide(names, inputs)
    return decisions


def _with_hessian(stage: Stage, replay: Replay, method: Method, names: tuple[str, ...]) -> Inputs | None:
    """The statistics of one group's input, from all batches once more, with its Hessian."""
    collector = Collector({target.name: target.param for target in stage.targets}, frozenset({HESSIAN}), only=names)
    with raise_together(method.group):
        for batch in range(len(replay)):
            with collector.batch():
                replay.run(batch)
    return next(found for own, found in collector.reduce(method.group) if names[0] in own)


def _round(
    targets: Sequence[Target], decisions: Mapping[str, Decision], recipe: Recipe
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, QuantizedTensor]]:
    """The quantizer of every target, and its full weight, rounded under it."""
    quantizers, weights = {}, {}
    for target in targets:
        own = [decisions[name] for name in target.linears()]
        quantizer = quantizers[target.name] = _joined_quantizer(target, own)
        dense = [
            matrix.float() if decision.weight is None else decision.weight
            for (_, matrix), decision in zip(target.matrices(), own, strict=True)
        ]
        with full_precision(target.param.device):
            parts = format_of(recipe).encode_with(
                torch.stack(dense) if len(target.shape) == 3 else dense[0], recipe, quantizer
            )
        contiguous = {name: part.contiguous() for name, part in parts.items()}
        weights[target.name] = QuantizedTensor.from_parts(contiguous, recipe, target.param.dtype)
    return quantizers, weights


def _joined_quantizer(target: Target, decisions: Sequence[Decision]) -> Mapping[str, Tensor]:
    """The quantizer of a target, joined from those of its 2-D weights; parts that they share must be equal."""
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


def _largest(targets: Sequence[Target], groups: Groups) -> dict[str, float | None]:
    """The largest |input| of each target; None where no token reached it."""
    amaxes = {name: float(inputs.amax) for names, inputs in groups if inputs is not None for name in names}
    return {
        target.name: max((amaxes[name] for name in target.linears() if name in amaxes), default=None)
        for target in targets
    }
