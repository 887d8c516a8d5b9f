"""Calibrates one stage (a layer, or all that is outside of layers): from gathered weights to quantized ones.

    statistics   every batch through the stage, its linears watched      (the outputs may be the next layer's inputs)
    agree        which linears share an input, over all ranks
    smooth       column factors found and folded, if the algorithm has them and the layer allows it
    decide       each rank about some groups, whose statistics are reduced to it; all ranks get the quantized weights
    install      the quantized values in place of the weights            (outputs again, for the next layer, if asked)

Keys and values on their way into caches are watched in the runs whose outputs the next layer gets; if those are of the
weights before folding, and some were folded, every batch runs once more.

Nothing in the loops over batches is collective, so ranks may have different numbers of them, or none.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_hooks.kernels.digest import digest
from fsdp_hooks.ranks.across_ranks import raise_together
from layerwise.algorithms.algorithm import CROSS, HESSIAN
from layerwise.folding.smoothing import smooth
from layerwise.inputs.replaying.replay import Replay
from layerwise.inputs.values.structure import flatten
from layerwise.report.measure import StageFigures, Yardstick
from layerwise.running.one_stage.agreement import check_alike
from layerwise.running.one_stage.decide import decide, needed_statistics, run_reference
from layerwise.stages.stage import Method, Pair, Stage
from layerwise.stages.targets import Target
from layerwise.statistics.collector import Collector
from layerwise.statistics.key_values import Amaxes, KeyValues
from layerwise.statistics.statistics import Facts
from layerwise.weights.rounding import put_values
from layerwise.weights.snapshot import Snapshot
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """The result of a stage: full tensors, the same on every rank.

    Attributes:
        weights: name of a target -> its quantized weight.
        quantizers: name of a target -> the quantizer that fixed its scales.
        input_amax: name of a target -> largest |input|, after folding; None if no token reached it.
        changed: other parameters that were changed, with their values while the stage is held.
        measured: the figures of a report.
        pairs: where column factors could go in the stage.
        kv_amax: fqn of an attention -> the largest |key| and |value| of each head that came to its cache.
    """

    weights: Mapping[str, QuantizedTensor]
    quantizers: Mapping[str, Mapping[str, Tensor]]
    input_amax: Mapping[str, float | None]
    changed: Mapping[str, Tensor]
    measured: StageFigures = field(default_factory=StageFigures)
    pairs: tuple[Pair, ...] = ()
    kv_amax: Mapping[str, Amaxes] = field(default_factory=dict)


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
        NotImplementedError: an attention has no keys and values of its own to find scales for.
    """
    # A callback may write from its first event on, so the bytes are taken before any is told.
    before = Snapshot(stage, watched=method.watched)
    tell("layer_start")
    tell("capture")
    yardstick = Yardstick(stage.targets)
    caches = KeyValues(stage.attentions)
    collector, identities = observe(stage, replay, method, yardstick, caches)
    statistics = collector.agree(method.group)
    tell("calibrate")
    with raise_together(method.group):
        before.check_unwritten(method.algorithm)
    # Unquantized outputs for the next layer were kept before this changes weights.
    smoothed = smooth(stage, statistics, method, replay, identities)
    yardstick.set_reference(collector, smoothed.factors)
    del collector
    # Each rank decides about some groups only, and for all ranks: so all must hold the same weights by now.
    check_alike(stage, method.group)
    if stage.attentions and not method.quantized_onward and (smoothed.written or before.find_writes()):
        if method.rank == 0:
            LOG.debug("%s: its batches run once more, since folding has changed keys and values", stage.title)
        caches = _watch_again(stage, replay, method)
    weights, quantizers, noted = decide(stage, replay, statistics, smoothed, method)
    with raise_together(method.group):
        before.check_unwritten(method.algorithm)
        for target in stage.targets:
            put_values(weights[target.name], target.weight)
    installed = Snapshot(stage, watched=method.watched)
    tell("write")
    onward = method.quantized_onward
    with raise_together(method.group), caches.watching() if onward else nullcontext():
        # If the next layer gets unquantized outputs, one batch is enough, to compare outputs for the report.
        for batch in range(len(replay) if onward else min(1, len(replay))):
            output = replay.run(batch)
            yardstick.compare(batch, output)
            if onward:
                replay.keep(batch, output)
    kv_amax = caches.agree(method.group)
    notes = {name: {**smoothed.notes.get(name, {}), **own} for name, own in noted.items()}
    measured = yardstick.make_figures(smoothed.facts, notes, stage.index if stage.name else None, method.group)
    with raise_together(method.group):
        installed.check_installed()
    # Targets are in the result anyway, quantized; what else was written goes into it dense.
    written = {*before.find_writes(), *smoothed.written} - {target.name for target in stage.targets}
    changed = {name: param.detach() for name, param in stage.params().items() if name in written}
    input_amax = _largest(stage.targets, smoothed.facts)
    return Calibrated(weights, quantizers, input_amax, changed, measured, smoothed.pairs, kv_amax)


def observe(
    stage: Stage, replay: Replay, method: Method, yardstick: Yardstick, caches: KeyValues
) -> tuple[Collector, list[int]]:
    """Run every batch and watch its linears, and its caches unless the caches of the quantized stage count.

    If folds will be probed, also return an identity for each output: a digest of all its tensors, which is the same for
    a batch on every rank.
    """
    algorithm = method.algorithm
    # If only one Hessian fits into memory, each comes from a pass of its own later (`collect_again`).
    needs = needed_statistics(stage, method) - ({HESSIAN, CROSS} if algorithm.one_at_a_time else set())
    weights = {target.name: target.weight for target in stage.targets}
    collector = Collector(weights, needs, apart=stage.kinds(), blocks=stage.blocks)
    partners = collector.partners()
    identities: list[Tensor | int] = []
    with raise_together(method.group), nullcontext() if method.quantized_onward else caches.watching():
        for batch in range(len(replay)):
            run_reference(replay, batch, partners)
            with collector.batch(partners):
                output = replay.run(batch)
            yardstick.note(batch, output)
            if algorithm.smooths:
                tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
                # A tensor, and no number yet: reading it here would make the host wait for the device
                # in every batch.
                identities.append(digest(tensors) if tensors else 0)
            if not method.quantized_onward:
                replay.keep(batch, output)
    return collector, [int(one) for one in identities]


def _watch_again(stage: Stage, replay: Replay, method: Method) -> KeyValues:
    """Watch keys and values again, since weights have changed: factors of o_proj are in v_proj, say."""
    caches = KeyValues(stage.attentions)
    with raise_together(method.group), caches.watching():
        for batch in range(len(replay)):
            replay.run(batch)
    return caches


def _largest(targets: Sequence[Target], facts: Sequence[Facts]) -> dict[str, float | None]:
    """Return the largest |input| of each target; None if no token reached it."""
    amaxes = {name: float(one.amax) for one in facts if one.amax is not None for name in one.names}
    return {
        target.name: max((amaxes[name] for name in target.linears() if name in amaxes), default=None)
        for target in targets
    }
