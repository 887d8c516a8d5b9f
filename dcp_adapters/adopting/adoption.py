"""`adopt`: the quantized modules of other libraries become ours, in place.

    candidates (candidates.py)  ->  what each becomes, or why not (sources/)  ->  requantized, where asked for
    any refused  ->  one error for all of them, and nothing is changed
    none         ->  every module is changed (replace.py)

All of a model is decided first, so an error loses nothing.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dcp_adapters.adopting.candidates import Candidate, candidates_of, dense_dtype, known, why_no_linear, why_not
from dcp_adapters.adopting.forget import forget_libraries
from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.replace import replace_weights
from dcp_adapters.adopting.report import AdoptedWeight, AdoptionReport
from dcp_adapters.plain.words import in_lines
from dcp_adapters.stored.numeric_error import Error, error_between
from qtensor.model.loading import watch_loads
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import check_shape, registered
from qtensor.tensor.quantized_tensor import QuantizedTensor, quantize

LOG = logging.getLogger(__name__)
FAILURES = (
    ValueError,
    TypeError,
    RuntimeError,
    AssertionError,
)  # of a recipe that does not fit, or a library's decoder
MEASURED = 8  # refused weights whose error of requantizing is told; it takes a dense copy of each


def adopt(
    model: nn.Module,
    *,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    requantize: Recipe | None = None,
) -> AdoptionReport:
    """Make weights that other libraries quantized ours, in place and with their bytes; call it before fully_shard.

    Modules of torchao, compressed-tensors, ModelOpt and transformers' FP8 become plain modules whose weights are
    quantized parameters. Biases, hooks, ties, `requires_grad` and the training mode stay. Scales and whatever else the
    library put into a module go, and with its last module what it put into the model (of transformers, `hf_quantizer`
    and `config.quantization_config`). Nothing is changed before all weights have been looked at.

    What a library does with inputs becomes `activations="dynamic"` of the recipe where ours is the same, bit for bit;
    otherwise inputs stay as they are, and the report says so.

    Args:
        model: any module; all of it in memory, and not sharded.
        include: globs over module fqns; every one must match a quantized module. None: all of them.
        exclude: globs over the fqns of modules to leave as they are.
        requantize: a recipe for weights that no recipe holds exactly, which are refused without it. All others keep
            their bytes.

    Returns:
        What became of each weight.

    Raises:
        ValueError: weights cannot be held exactly, are sharded, on the meta device or offloaded, or are tied to a
            module that is not adopted; all of them are named. Or there is nothing to adopt. Nothing has been changed.
        TypeError: a string instead of a list of patterns, or `requantize` is no recipe.

    Example:
        ```python
        >>> model = AutoModelForCausalLM.from_pretrained("fp8")
        >>> print(adopt(model))
        ```
    """
    if requantize is not None:
        registered(requantize)
    chosen = candidates_of(model, include, exclude)
    if not chosen:
        raise ValueError("adopt: every quantized module is left out by exclude; there is nothing to adopt")
    with torch.no_grad():
        dtype = dense_dtype(model, chosen)
        decisions = [one for one in _decide(chosen, why_not(model, chosen), requantize) if one.outcomes or one.refusals]
        if refused := [line for one in decisions for line in one.refusals]:
            raise ValueError(
                f"adopt: {len(refused)} weights cannot be adopted, and nothing has been changed; leave them out by "
                f"exclude=, or pass requantize= where it is offered:{in_lines(refused)}"
            )
        entries = tuple(entry for one in decisions for entry in one.entries())
        if not entries:
            raise ValueError("adopt: the quantizers of all these modules are switched off; there is nothing to adopt")
        whole = {id(one.module) for one in known(model)} == {id(one.module) for one in chosen}
        made: dict[int, nn.Parameter] = {}  # id of what was taken -> its parameter, the same for tied weights
        params = [one.params(made, dtype) for one in decisions]
    for one, own in zip(decisions, params, strict=True):
        replace_weights(one.candidate.module, one.candidate.source, own)
    if whole:
        forget_libraries(model)
    watch_loads(model.modules())
    LOG.info("adopt: %d weights, %d of them exactly", len(entries), sum(entry.exact for entry in entries))
    return AdoptionReport(entries)


@dataclass(frozen=True, eq=False)
class _Decision:
    """What is to become of one module.

    refusals: why not, a line for each weight; empty if all is well. errors: of weights that are not exact, by name.
    """

    candidate: Candidate
    outcomes: Mapping[str, Outcome]
    errors: Mapping[str, Error]
    refusals: Sequence[str] = ()

    def taken(self) -> dict[str, Taken]:
        return {name: outcome for name, outcome in self.outcomes.items() if isinstance(outcome, Taken)}

    def entries(self) -> list[AdoptedWeight]:
        return [
            AdoptedWeight(
                name=self.candidate.param(name),
                library=self.candidate.source.library,
                kind=self.candidate.kind,
                recipe=taken.weight.recipe,
                exact=taken.exact,
                error=self.errors.get(name),
                note=taken.note,
            )
            for name, taken in self.taken().items()
        ]

    def params(self, made: dict[int, nn.Parameter], dtype: torch.dtype) -> dict[str, nn.Parameter]:
        wants = self.candidate.source.tensors(self.candidate.module)[0].requires_grad
        for taken in self.taken().values():
            weight = taken.weight
            if not taken.dtype_known and weight.dtype != dtype:
                weight = QuantizedTensor.from_parts(weight.parts(), weight.recipe, dtype)
            made.setdefault(id(taken), nn.Parameter(weight, requires_grad=wants))
        return {name: made[id(taken)] for name, taken in self.taken().items()}


def _decide(chosen: Sequence[Candidate], problems: Mapping[str, str], recipe: Recipe | None) -> list[_Decision]:
    """Return what becomes of each module; tied ones become the same."""
    seen: dict[tuple[int, ...], _Decision] = {}
    decisions = []
    measured = MEASURED
    for one in chosen:
        if one.fqn in problems:
            decisions.append(_Decision(one, {}, {}, [f"{one}: {problems[one.fqn]}"]))
            continue
        tied = seen.get(one.key) if one.key else None
        if tied is None:
            tied = seen[one.key] = _decide_one(one, recipe, measure=measured > 0)
            measured -= len(tied.refusals)
        decisions.append(_Decision(one, tied.outcomes, tied.errors, tied.refusals))
    return decisions


def _decide_one(one: Candidate, recipe: Recipe | None, *, measure: bool) -> _Decision:
    outcomes: dict[str, Outcome] = {}
    errors: dict[str, Error] = {}
    refusals: list[str] = []
    try:
        found = one.source.take(one.module)
    except (AttributeError, KeyError, TypeError) as error:
        line = f"{one}: it lacks what this version reads of {one.source.library}: {error}"
        return _Decision(one, {}, {}, [f"{line}; docs/coming_from/ has the versions"])
    for name, outcome in found.items():
        outcomes[name] = outcome
        unfit = why_no_linear(one, outcome)
        if unfit is not None:
            refusals.append(f"{one}: {unfit}")
        elif isinstance(outcome, Taken):
            if not outcome.exact and outcome.values is not None:
                errors[name] = error_between(outcome.values(), outcome.weight)
        elif recipe is None or outcome.values is None:
            refusals.append(f"{one}: {_told(outcome, measure=measure)}")
        else:
            try:
                weight, errors[name] = _requantized(outcome, recipe)
            except FAILURES as error:
                refusals.append(f"{one}: {outcome.reason}; requantize: {error}")
                continue
            note = "; ".join(filter(None, (f"requantized: {outcome.reason}", outcome.note)))
            outcomes[name] = Taken(weight=weight, exact=errors[name].exact, note=note)
    return _Decision(one, outcomes, errors, refusals)


def _requantized(refused: Refused, recipe: Recipe) -> tuple[QuantizedTensor, Error]:
    assert refused.values is not None
    values = refused.values()
    check_shape(values.shape, recipe, "the weight")
    weight = quantize(values, recipe)
    return weight, error_between(values, weight)


def _told(refused: Refused, *, measure: bool) -> str:
    """Say why, and what requantizing would cost."""
    if refused.values is None:
        return refused.reason
    if refused.nearest is None:
        return f"{refused.reason}; requantize= takes any recipe"
    if not measure:
        return f"{refused.reason}; requantize={refused.nearest} takes it"
    try:
        _, error = _requantized(refused, refused.nearest)
    except FAILURES:
        return f"{refused.reason}; requantize= takes any recipe that fits its shape"
    most, relative, snr = error.cells()
    return (
        f"{refused.reason}; requantize={refused.nearest} would make an error of {most} at most, {relative} of the "
        f"weight's norm (SNR {snr} dB)"
    )
