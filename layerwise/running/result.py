"""The result of a calibration: quantized weights beside the shards they belong to, and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.wrappers import plain_buffers
from layerwise.formats.assignment import Assignment, recipe_of
from layerwise.formats.candidates import Menu
from layerwise.report.report import Report
from layerwise.rotating.written import find_written
from layerwise.running.kv_cache import kv_scales
from layerwise.running.outcome import StageOutcome
from layerwise.running.plan import CalibrationPlan
from layerwise.stages.stage import Stage
from layerwise.stages.targets import Target
from qtensor.formats.float8 import Float8CurrentScaling
from qtensor.products.input_rotation import MARKER, input_rotations, marker
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, encode, tensor_wide


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """What `calibrate` returns.

    Attributes:
        recipe: the format of the weights, or of each weight.
        report: errors, amaxes, clip ratios and warnings, a record for each linear.
        starved: names of the weights that no token reached on any rank; their scales come from the weights alone.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> result = calibrate(model, [torch.randn(8, 64)], recipe=MXFP8BlockScaling(), layers=["0"])
        >>> type(result.state_dict()["0.weight"]).__name__
        'MXFP8Tensor'
        >>> print(result.report.table())
        ```
    """

    recipe: Recipe | Assignment
    report: Report
    starved: Sequence[str]
    _entries: Mapping[str, Tensor]

    def state_dict(self) -> dict[str, Any]:
        """Return what was calibrated, by the fqns of the plain model (without steps into wrappers), and no adapters.

        It holds quantized weights (QuantizedTensor, or DTensors of them if the model is sharded), other parameters
        that the algorithm changed (norms that factors were folded into) or `rotate_` had written before (embeddings,
        norms, linears that stay dense; these are the model's own, not copies), and with inputs="static" also
        `<module>.input_scale`, fp32 [] (for experts [E, N, K] `<module>.<parameter>.input_scale`); with kv_cache
        also `<attention>.k_scale` and `.v_scale`, fp32 [], or [heads] for granularity="head". Save it with `dcp.save`
        and `QuantizedSavePlanner`. Of linears whose inputs are rotated at run time there is `<module>.input_rotation`,
        uint8 [block], also if they stay dense.
        """
        return dict(self._entries)


def result_of(plan: CalibrationPlan, outcomes: Sequence[StageOutcome], resumed: Sequence[int]) -> CalibrationResult:
    """Return the result of all stages; an earlier run had finished those in `resumed`."""
    recipe, stages = plan.method.recipe, plan.stages
    assert not isinstance(recipe, Menu), "formats are chosen"
    entries: dict[str, Tensor] = {}
    starved: list[str] = []
    for stage, outcome in zip(stages, outcomes, strict=True):
        starved += [record.name for record in outcome.measured.records if record.tokens == 0]
        for target in stage.targets:
            entries[target.name] = outcome.weights[target.name]
            if plan.options.inputs == "static":
                entries[f"{target.module_name if len(target.shape) == 2 else target.name}.input_scale".lstrip(".")] = (
                    _input_scale(outcome, target, stage, recipe_of(recipe, target.name))
                )
        entries |= outcome.dense
        if plan.options.kv_cache is not None:
            entries |= kv_scales(plan.options.kv_cache, outcome.kv_amax)
    for name, param in find_written(plan.model).items():
        # What this calibration has made of a weight comes before what rotate_ has.
        entries.setdefault(name, param.detach())
    entries |= _markers(plan.model)
    report = Report(
        records=tuple(record for outcome in outcomes for record in outcome.measured.records),
        layer_errors={
            stage.index: outcome.measured.output_snr
            for stage, outcome in zip(stages, outcomes, strict=True)
            if stage.name and outcome.measured.output_snr is not None
        },
        resumed=tuple(resumed),
        title=f"{recipe}",
    )
    return CalibrationResult(recipe, report, tuple(starved), entries)


def _markers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of all linears whose inputs are rotated; of a model on the meta device they are made anew."""
    found, buffers = {}, dict(plain_buffers(model))
    for module, block in input_rotations(model).items():
        name = f"{module}.{MARKER}".lstrip(".")
        buffer = buffers[name]
        found[name] = marker(block, torch.device("cpu")) if buffer.is_meta else buffer.detach()
    return found


def _input_scale(outcome: StageOutcome, target: Target, stage: Stage, recipe: Recipe) -> Tensor:
    """Return fp32 []: the tensor-wide scale that the recipe's formula makes of the largest |input|.

    If no token reached the linear, the largest amax of linears of the same kind in its stage (other experts) is
    taken, or else that of its weight.
    """
    amax = outcome.input_amax[target.name]
    if amax is None:
        kind = target.module_name.rpartition(".")[2]
        others = [outcome.input_amax[t.name] for t in stage.targets if t.module_name.rpartition(".")[2] == kind]
        known = [value for value in others if value is not None]
        own = [record.weight_amax for record in outcome.measured.records if record.name in target.linears()]
        amax = max(known or own)
    per_tensor = (
        Float8CurrentScaling(element=recipe.element, granularity="tensor")
        if isinstance(recipe, Float8CurrentScaling)
        else recipe
    )
    # The format's own formula makes the scale; the row's values take no part, as the amax is given.
    row = torch.zeros(1, block_multiple(recipe), dtype=torch.float32, device="cpu")
    parts = encode(row, per_tensor, torch.tensor(amax, dtype=torch.float32, device="cpu"))
    return parts[tensor_wide(per_tensor) or "scale"].clone()
