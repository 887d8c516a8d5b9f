"""Folds column factors into the modules that produce the columns, and checks that the layer computes the same.

    fold               weights * s, producers / s, each weight rounded once; returns the factors as applied
    transform_inputs   the statistics of x / s, from those of x
    verify_outputs     the layer's outputs before and after differ by rounding only

The factors of all groups of a layer are found first, from the unchanged statistics, and then folded at once: a producer
may itself be a target whose columns are scaled.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.algorithms.algorithm import SUB_BLOCK, Inputs
from layerwise.folding.probing import Producer

_NO_COLUMNS = "the statistics of a scaled input need those of its columns; found None, ask for COLUMNS"
AMPLIFICATION = 4.0  # how much a layer may amplify the rounding errors of a fold (see `tolerance`)

Key = tuple[int, tuple[int, ...]]  # where a tensor's values lie, and its shape


@dataclass(frozen=True, eq=False)
class Fold:
    """Factors [K] to fold: the columns of `weights` ([N, K] or [E, N, K]) are multiplied, the producer is divided."""

    producer: Producer
    weights: tuple[Tensor, ...]
    factors: Tensor


@torch.no_grad()
def fold(folds: Sequence[Fold]) -> list[Tensor]:
    """Fold all factors of a layer in place, in fp32, every weight rounded once to its dtype.

    Returns:
        The factors as applied, fp32 [K] for each fold, for `transform_inputs`. For a linear they are those given. For a
        norm they are old gain / new gain, after the new gain was rounded, so that its rounding costs nothing. (1 +
        weight would lose a small gain altogether: a channel whose gain would round to 0 keeps its gain, with factor 1.)

    Raises:
        ValueError: factors that are not [K], finite and positive; nothing was written.
        OverflowError: a weight would leave the range of its dtype; nothing was written.
    """
    columns: dict[Key, Tensor] = {}
    channels: dict[Key, tuple[Producer, Tensor]] = {}
    written: dict[Key, tuple[str, Tensor]] = {}
    applied = []
    for one in folds:
        factors = _check_factors(one)
        applied.append(factors)
        assert columns.keys().isdisjoint(map(_place_of, one.weights)), "a weight takes one input, so it is in one group"
        columns |= {_place_of(w): factors for w in one.weights}
        channels |= {_place_of(t): (one.producer, factors) for t in one.producer.tensors}
        written |= {_place_of(t): (one.producer.name, t) for t in (*one.weights, *one.producer.tensors)}
    for write in (False, True):  # twice, rather than to hold new values of a whole layer until all are known to be good
        for key, (name, tensor) in written.items():
            value = tensor.float() * columns[key] if key in columns else tensor.float()
            if key in channels:
                producer, factors = channels[key]
                value = _divide_channels(producer, tensor, value, factors)
            # What was infinite before may stay so: only values that become infinite refuse the fold.
            rounded = value.to(tensor.dtype)
            if write:
                tensor.copy_(rounded)
            elif not torch.equal(torch.isfinite(rounded), torch.isfinite(tensor)):
                raise OverflowError(
                    f"folding factors into {name} takes values out of the range of {tensor.dtype} (largest "
                    f"{float(value.abs().max()):.3g}); use bfloat16 weights or an algorithm that does not scale columns"
                )
    return applied


def _place_of(tensor: Tensor) -> Key:
    """Identify memory: a parameter and its detached alias may both be named, and are written once."""
    return tensor.data_ptr(), tuple(tensor.shape)


def _divide_channels(producer: Producer, tensor: Tensor, value: Tensor, factors: Tensor) -> Tensor:
    """Divide the channels of a tensor of the producer; its columns are scaled already if it is a target, too."""
    spread = factors.reshape(-1, *[1] * (value.ndim - 1))
    if producer.kind == "offset" and _place_of(tensor) == _place_of(producer.weight):
        return (1 + value) / spread - 1
    return value / spread


def _check_factors(one: Fold) -> Tensor:
    """Return the factors of a fold, checked; for a norm, old gain / rounded new gain."""
    producer, factors = one.producer, one.factors.float()
    if factors.shape != (producer.channels,) or not bool((torch.isfinite(factors) & (factors > 0)).all()):
        found = f"{tuple(factors.shape)} from {float(factors.min()):.3g} to {float(factors.max()):.3g}"
        raise ValueError(
            f"factors for {producer.name}: found {found}, expected {producer.channels} finite, positive factors"
        )
    if producer.kind == "linear":
        return factors
    # A rounded gain has changed by another factor than the one that was asked for. The columns get that one.
    shift = 1.0 if producer.kind == "offset" else 0.0
    gain = shift + producer.weight.float()
    left = shift + (gain / factors - shift).to(producer.weight.dtype).float()
    return torch.where(gain * left > 0, gain / left, torch.ones_like(gain))


def transform_inputs(inputs: Inputs, factors: Tensor) -> Inputs:
    """Return the statistics of x / factors, from those of x.

    Raises:
        ValueError: the amax of each column is not known (an algorithm that smooths needs COLUMNS).
    """
    if inputs.column_mean is None:
        raise ValueError(_NO_COLUMNS)
    amax, column_amax = scale_amaxes(inputs.column_amax, factors)
    local, full, cross = inputs.local_hessian, inputs.hessian, inputs.cross
    if local is not None:
        padding = local.shape[0] * SUB_BLOCK - factors.numel()
        blocks = torch.nn.functional.pad(factors, (0, padding), value=1.0).reshape(-1, SUB_BLOCK)
        local = local / (blocks.unsqueeze(-1) * blocks.unsqueeze(-2))
    if full is not None:
        full = full / factors.unsqueeze(-1) / factors
    if cross is not None:
        cross = cross / factors.unsqueeze(-1) / factors
    return dataclasses.replace(
        inputs,
        amax=amax,
        column_amax=column_amax,
        column_mean=inputs.column_mean / factors,
        local_hessian=local,
        hessian=full,
        cross=cross,
    )


def scale_amaxes(column_amax: Tensor | None, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the amax of x / factors and that of each column, from the latter of x.

    Raises:
        ValueError: these are not known (an algorithm that smooths needs COLUMNS).
    """
    if column_amax is None:
        raise ValueError(_NO_COLUMNS)
    scaled = column_amax / factors
    return scaled.amax(), scaled


def tolerance(dtype: torch.dtype, folds: int, columns: int) -> float:
    """Return the relative RMS difference that `folds` folds may make to a layer's outputs of this dtype.

    Each fold rounds three things anew: the producer's channels, the group's columns and the values between them. These
    errors are independent and at most u (the dtype's unit roundoff), so their RMS grows with the square root of their
    number. Sums run in fp32 over up to `columns` terms; with random signs they gather sqrt(columns) fp32 errors.
    What follows in the layer (softmax, gates, a residual that cancels) may amplify all that; a factor of 4 is allowed,
    which gives 5 % for four folds in bf16. A wrong fold is off by the size of the output itself.
    """
    unit = torch.finfo(dtype).eps / 2
    return AMPLIFICATION * math.sqrt(3 * folds) * (unit + 2**-24 * math.sqrt(columns))


def verify_outputs(before: Sequence[Tensor], after: Sequence[Tensor], allowed: float, what: str) -> float:
    """Return the largest relative RMS difference of a floating-point output; 0 without outputs.

    Raises:
        RuntimeError: it is more than `allowed`, or not a number; `what` names the layer.
    """
    found = max((deviation(a, b) for a, b in zip(before, after, strict=True) if a.is_floating_point()), default=0.0)
    if not found <= allowed:
        raise RuntimeError(
            f"{what}: folding changed its outputs by {found:.3g} (relative RMS), more than the {allowed:.3g} of "
            "rounding; the fold is not exact here: use an algorithm that does not scale columns"
        )
    return found


def deviation(before: Tensor, after: Tensor) -> float:
    """Return the RMS of the difference over that of `before`; infinities and NaN in the same places do not count."""
    same = (before == after) | (torch.isnan(before) & torch.isnan(after))  # such as the infinities of a mask
    off = torch.where(same, 0.0, before.double() - after.double())
    size = float(torch.linalg.vector_norm(torch.where(torch.isfinite(before), before.double(), 0.0)))
    distance = float(torch.linalg.vector_norm(off))
    return distance / size if size else (math.inf if distance else 0.0)
