"""What is kept of a calibrated stage: this rank's box of its result, for shards, checkpoints and the final result.

    Calibrated (full, temporary)  ->  Outcome (own box)  ->  saved: quantizers only, or weights and what changed
                                                          ->  applied to the shards  ->  CalibrationResult

If the algorithm writes no weights, only scales are saved. A resumed run rounds the payload again from the weights of
the model, which the fingerprint of the run proves to be the same.
"""

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import local_of
from layerwise.formats.assignment import Formats, recipe_of
from layerwise.report.measure import StageFigures
from layerwise.report.report import LinearReport
from layerwise.running.one_stage.calibrate_stage import Calibrated
from layerwise.stages.stage import Pair, Stage
from layerwise.statistics.key_values import Amaxes
from layerwise.weights.hold import Weights
from layerwise.weights.on_disk import OnDisk
from layerwise.weights.shards import (
    dense_box,
    empty_quantizer,
    empty_weight,
    home_of,
    keep_box,
    keep_quantizer,
    round_box,
    store_box,
)
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class StageOutcome:
    """A stage's result on this rank.

    Attributes:
        weights: name of a target -> its quantized weight, in the layout of the parameter.
        quantizers: name of a target -> what fixed its scales, in the same layout; empty if weights are saved.
        dense: name of another parameter that was changed -> its new value, in the same layout.
        input_amax: name of a target -> largest |input|; None if no token reached it.
        gathered: name of a target -> the dtype of the values that were rounded, which under mixed precision is not
            that of the parameter.
        measured: the figures of a report.
        pairs: where column factors could go in the stage.
        kv_amax: fqn of an attention -> the largest |key| and |value| of each head that came to its cache.
    """

    weights: Mapping[str, Tensor]
    quantizers: Mapping[str, Mapping[str, Tensor]]
    dense: Mapping[str, Tensor]
    input_amax: Mapping[str, float | None]
    gathered: Mapping[str, str]
    measured: StageFigures = field(default_factory=StageFigures)
    pairs: tuple[Pair, ...] = ()
    kv_amax: Mapping[str, Amaxes] = field(default_factory=dict)

    def saved(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of it."""
        # Scales are enough: the payload is rounded again from weights that the fingerprint proves to be the
        # same.
        if self.quantizers:
            return {f"{name}.{key}": value for name, own in self.quantizers.items() for key, value in own.items()}
        return {**self.weights, **self.dense}

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint notes beside it; Python's JSON brings floats back exactly."""
        return {
            "dense": list(self.dense),
            "input_amax": dict(self.input_amax),
            "gathered": dict(self.gathered),
            "records": [asdict(record) for record in self.measured.records],
            "output_snr": self.measured.output_snr,
            "pairs": self.pairs,
            **({"kv_amax": dict(self.kv_amax)} if self.kv_amax else {}),
        }

    def drop_saved(self) -> "StageOutcome":
        """Return what is still needed of it when a checkpoint has it."""
        return replace(self, quantizers={})

    def apply(self, stage: Stage, installed: Container[str] = ()) -> None:
        """Put the result into the model; call it while the stage is sharded.

        Weights in `installed` that are stored dense have their values already: these were in the gathered weights.
        """
        for target in stage.targets:
            shard = local_of(target.param)
            # FSDP has written what the gathered weights held into dense shards; quantized storage gets
            # its bytes here.
            there = target.name in installed and not isinstance(shard, QuantizedTensor | HighPrecisionWeight)
            # A model that is read from files stays on the meta device; the result holds its weights
            # alone.
            if not target.param.is_meta and not there:
                store_box(self.weights[target.name], target)
        params = stage.params()
        for name, value in self.dense.items():
            if not params[name].is_meta:
                params[name].data.copy_(value)

    def install(self, stage: Stage) -> None:
        """Put the result's values into a stage that is held and not sharded."""
        params = stage.params()
        for target in stage.targets:
            q: Any = self.weights[target.name]
            target.weight.copy_(q.dequantize())
        for name, value in self.dense.items():
            params[name].data.copy_(value)


def outcome_of(stage: Stage, calibrated: Calibrated, *, writes_weights: bool) -> StageOutcome:
    """Cut this rank's box out of a stage's result. Call it once the stage is sharded again."""
    params = stage.params()
    return StageOutcome(
        weights={target.name: keep_box(calibrated.weights[target.name], target) for target in stage.targets},
        quantizers={}
        if writes_weights
        else {
            target.name: keep_quantizer(
                calibrated.quantizers[target.name], target, calibrated.weights[target.name].recipe
            )
            for target in stage.targets
        },
        dense={
            # The gathered values are in the shards by now, where the layout is right already.
            name: held if params[name].is_meta else params[name].detach().clone()
            for name, held in calibrated.changed.items()
        },
        input_amax=calibrated.input_amax,
        gathered={name: str(weight.dtype).removeprefix("torch.") for name, weight in calibrated.weights.items()},
        measured=calibrated.measured,
        pairs=calibrated.pairs,
        kv_amax=calibrated.kv_amax,
    )


def placeholders(stage: Stage, recipe: Formats, note: Mapping[str, Any], *, writes_weights: bool) -> dict[str, Tensor]:
    """Return uninitialised tensors to load a stage's saved state into."""
    if not writes_weights:
        return {
            f"{target.name}.{key}": value
            for target in stage.targets
            for key, value in empty_quantizer(target, recipe_of(recipe, target.name)).items()
        }
    params = stage.params()
    return {
        **{target.name: empty_weight(target, recipe_of(recipe, target.name)) for target in stage.targets},
        **{name: torch.empty_like(params[name], device=home_of(params[name])) for name in note["dense"]},
    }


def restore_outcome(
    stage: Stage, recipe: Formats, note: Mapping[str, Any], state: Mapping[str, Tensor], source: Weights
) -> StageOutcome:
    """Return the outcome of a stage from its saved state.

    Args:
        stage: sharded, with the weights it had before the calibration.
        recipe: the format of all targets, or of each.
        note: what `StageOutcome.to_json` gave; looked at already (checkpoint_notes.py).
        state: what was loaded into `placeholders`.
        source: has the rows of targets before the calibration, for a state of scales only.
    """
    measured = StageFigures(tuple(LinearReport.from_json(record) for record in note["records"]), note["output_snr"])
    weights = {target.name: state[target.name] for target in stage.targets if target.name in state}
    quantizers: dict[str, dict[str, Tensor]] = {}
    for target in stage.targets:
        if target.name not in weights:
            prefix = f"{target.name}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            quantizers[target.name] = own
            box = dense_box(target, source.read(target.param) if isinstance(source, OnDisk) else None)
            dense = box.to(getattr(torch, note["gathered"][target.name]))
            # Under the saved scales each element is rounded by itself, so this gives the bytes of the
            # first run on any ranks.
            weights[target.name] = round_box(dense, own, recipe_of(recipe, target.name), target)
    changed = {name: state[name] for name in note["dense"]}
    pairs = tuple((tuple(names), name, kind) for names, name, kind in note["pairs"])
    kv_amax = note.get("kv_amax", {})
    return StageOutcome(weights, quantizers, changed, note["input_amax"], note["gathered"], measured, pairs, kv_amax)
