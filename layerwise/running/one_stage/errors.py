"""Measures a stage: what each recipe of a menu would do to the output of each of its linears. No weight is changed.

    statistics   every batch through the stage, its linears watched      (the outputs are the next stage's inputs)
    measure      each rank some groups: rounds their weights under each recipe, and weighs the errors by the Hessian

    noise = tr((Q - W) H (Q - W)^T)        signal = tr(W H W^T)        H = E[x x^T], all batches of all ranks

The whole H, not its diagonal E[x^2]: inputs have means and directions, along which errors of single columns add up, so
that the diagonal alone can be far off, for the signal above all. It is what GPTQ collects, too, and takes as long.
Inputs are those of the unquantized model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import raise_together
from layerwise.algorithms.algorithm import CROSS, HESSIAN, Algorithm, Group, Inputs, Linear, upright
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.formats.candidates import LinearErrors, Menu, fits
from layerwise.inputs.replaying.replay import Replay
from layerwise.report.measure import Yardstick
from layerwise.running.one_stage.agreement import check_alike
from layerwise.running.one_stage.calibrate_stage import observe
from layerwise.running.one_stage.decide import collect_again
from layerwise.running.one_stage.exchange import QUANTIZER, entries_of
from layerwise.stages.sharing import naming, own_statistics, rounds_of
from layerwise.stages.stage import Method, Stage
from layerwise.stages.targets import agree_on_amaxes
from layerwise.statistics.key_values import KeyValues
from layerwise.weights.snapshot import Snapshot
from qtensor.spec.recipes import Recipe
from qtensor.tensor.quantized_tensor import QuantizedTensor

PIECE = 2**24  # elements at a time


@dataclass(frozen=True, kw_only=True)
class Measuring(Algorithm):
    """Rounds weights as `algorithm` decides, to see how large the errors are; folds nothing, writes nothing."""

    writes_weights: ClassVar[bool] = False
    algorithm: Algorithm
    recipes: int = 1  # how many each weight is rounded under

    @property
    def needs(self) -> frozenset[str]:
        """Return what the algorithm needs, and the Hessian; every input is that of the unquantized model."""
        return (self.algorithm.needs | {HESSIAN}) - {CROSS}

    @property
    def one_at_a_time(self) -> bool:
        """Return what the algorithm says."""
        return self.algorithm.one_at_a_time

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Return the cost of a decision and of a product with the Hessian, for each recipe."""
        return self.recipes * (self.algorithm.cost(rows, columns, tokens) + rows * columns**2)


@dataclass(frozen=True)
class StageErrors:
    """What is kept of a measured stage: a record for each of its linears."""

    linears: tuple[LinearErrors, ...]

    def saved(self) -> Mapping[str, Tensor]:
        """Return no tensors: a checkpoint's notes have it all."""
        return {}

    def to_json(self) -> list[dict[str, Any]]:
        """Return the records; Python's JSON brings floats back exactly."""
        return [asdict(linear) for linear in self.linears]

    def drop_saved(self) -> Self:
        """Return all of it, which is small."""
        return self

    def apply(self, stage: Stage, /) -> None:
        """Do nothing: the model stays as it is."""

    def install(self, stage: Stage, /) -> None:
        """Do nothing: the model stays as it is."""


@torch.no_grad()
def measure_stage(stage: Stage, replay: Replay, method: Method, menu: Menu, tell: Callable[[str], None]) -> StageErrors:
    """Return the errors of a stage whose weights are held, the same on all ranks.

    Args:
        stage: what is measured.
        replay: runs it on its batches.
        method: its algorithm is `Measuring`.
        menu: the recipes.
        tell: called with "layer_start", "capture" and "calibrate".

    Raises:
        RuntimeError: somebody wrote into weights.
        Exception: of the algorithm, on all ranks; a note tells the linears.
    """
    before = Snapshot(stage, watched=method.watched)
    tell("layer_start")
    tell("capture")
    collector, _ = observe(stage, replay, method, Yardstick(()), KeyValues({}))
    statistics = collector.agree(method.group)
    tell("calibrate")
    check_alike(stage, method.group)
    weights = {name: weight for target in stage.targets for name, weight in target.matrices()}
    options = [_Option(stage, recipe) for recipe in menu.recipes]
    groups = [tuple(Linear(name, weights[name]) for name in facts.names) for facts in statistics.facts]

    def total(index: int, owner: int) -> Inputs | None:
        facts = statistics.facts[index]
        if facts.tokens and method.algorithm.one_at_a_time:
            return collect_again(stage, replay, method, facts.names, owner)
        return statistics.total(index, owner)

    found: dict[str, LinearErrors] = {}
    for turn in rounds_of(method, [(facts.tokens, groups[i]) for i, facts in enumerate(statistics.facts)]):
        inputs = own_statistics(method, turn, total)
        with raise_together(method.group):
            for index in turn[method.rank]:
                with naming(groups[index]):
                    found |= _measure(Group(upright(groups[index]), inputs.pop(index)), options, method)
    if method.group is not None:
        everyone: list[Any] = [None] * method.group.size()
        dist.all_gather_object(everyone, found, group=method.group)
        found = {name: one for theirs in everyone for name, one in theirs.items()}
    with raise_together(method.group):
        before.check_unwritten(method.algorithm)
    return StageErrors(tuple(found[name] for name in weights))


@dataclass(eq=False)
class _Option:
    """A recipe, with the amaxes that the weights of a stage would agree on under it."""

    stage: Stage
    recipe: Recipe | None
    amaxes: Mapping[str, Tensor | None] = field(init=False)  # of the linears that it fits

    def __post_init__(self) -> None:
        fitting = [target for target in self.stage.targets if fits(target.shape, self.recipe)]
        self.amaxes = {} if self.recipe is None else agree_on_amaxes(fitting, self.recipe)


def _measure(group: Group, options: Sequence[_Option], method: Method) -> dict[str, LinearErrors]:
    """Return the errors of a group's linears."""
    algorithm, inputs = method.algorithm, group.inputs
    assert isinstance(algorithm, Measuring)
    hessian = None if inputs is None else inputs.hessian
    with full_precision(group.linears[0].weight.device):
        # Of copies, so that the bits do not depend on how FSDP has laid out the gathered weights.
        signal = {linear.name: _energy(_copy(linear.weight), hessian) for linear in group.linears}
        noise: dict[str, list[float | None]] = {linear.name: [] for linear in group.linears}
        for option in options:
            if option.recipe is None:
                for errors in noise.values():
                    errors.append(0.0)
                continue
            linears = tuple(
                Linear(one.name, one.weight, option.amaxes[one.name])
                for one in group.linears
                if one.name in option.amaxes
            )
            # Linears that share an input may differ in shape, so a recipe may fit some of them only.
            own = _noise(Group(linears, inputs), option.recipe, algorithm.algorithm, hessian) if linears else {}
            for name, errors in noise.items():
                errors.append(own.get(name))
    tokens = 0 if inputs is None else inputs.tokens
    return {name: LinearErrors(name, tokens, signal[name], tuple(errors)) for name, errors in noise.items()}


def _noise(group: Group, recipe: Recipe, algorithm: Algorithm, hessian: Tensor | None) -> dict[str, float]:
    """Return the noise of each linear under one recipe."""
    decisions = list(algorithm.decide(group, recipe))
    found = {}
    for linear, decision in zip(group.linears, decisions, strict=True):
        entries = entries_of(linear.name, linear.weight, decision.weight, decision.quantizer, recipe)
        parts = {name: part for name, part in entries.items() if not name.startswith(QUANTIZER)}
        error = QuantizedTensor.from_parts(parts, recipe, torch.float32).dequantize() - linear.weight.float()
        found[linear.name] = _energy(error, hessian)
    return found


def _copy(weight: Tensor) -> Tensor:
    """Copy to fp32, in memory of its own: kernels may add in another order if the alignment differs."""
    return weight.detach().to(torch.float32, copy=True)


def _energy(weight: Tensor, hessian: Tensor | None) -> float:
    """Return tr(W H W^T) of fp32 W [N, K], with H half of the fp32 `hessian` [K, K]; |W|^2 without one."""
    energy = 0.0
    for rows in weight.split(max(PIECE // max(weight.shape[1], 1), 1)):
        seen = rows if hessian is None else rows @ hessian
        energy += float((seen.double() * rows.double()).sum())
    return max(energy if hessian is None else energy / 2, 0.0)
