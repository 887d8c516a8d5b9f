"""AWQ: weights whose inputs are large are scaled up before rounding, and scales are clipped, as far as outputs gain.

    smooth   for alpha in 0, 0.1, .. 1:  s = act^alpha / w^(1 - alpha), clamped to [1e-4, 1e4], over sqrt(max * min)
             act: the mean of |X| in each column
             w: the mean over all rows of the group of |W| / (the largest |W| in its scale's block)
             the s of least output error wins; no s at all is also tried, so scaling never makes that error larger
    clip     for each scale the fraction of its amax with the least local error (see clipping.py)

The output error of values W' in place of W, over all tokens of all ranks, comes from the Hessian H = 2 X^T X / n:

    |X (W' - W)^T|^2 = n / 2 * tr((W' - W) H (W' - W)^T)

so no token is needed again, and every rank decides the same. The formula of s, and act, are those of Lin et al., 2023
(arXiv:2306.00978); w, relative to the largest of its block, is what the authors' code and NVIDIA's ModelOpt use.
A column that is all zero in X or in the weights has nothing to balance and takes no part: s = 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from layerwise.algorithms.algorithm import COLUMNS, HESSIAN, LOCAL_HESSIAN, Algorithm, Decision, Group, Smoothing
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.smoothquant import LARGEST_FACTOR, SMALLEST_FACTOR
from layerwise.algorithms.solvers.clipping import (
    best_clips,
    finite_or_zero,
    group_by_scale,
    local_hessian_of,
    round_trip,
)
from qtensor.spec.blocks import tile, untile
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import block_multiple, format_of, shared_amax


@dataclass(frozen=True, kw_only=True)
class AWQ(Algorithm):
    """Activation-aware scaling of columns, clipping of scales, or both.

    Args:
        variant: "lite" scales columns where that can be folded, "clip" clips, "full" does both.
        alpha_step: the step between the exponents that are tried, from 0 to 1.
        least_clip: the smallest clip ratio.
        clip_step: the step between the clip ratios that are tried, from 1 down.

    Raises:
        ValueError: another variant, or a number that is not above 0 and at most 1.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=Int4GroupScaling(), algorithm=AWQ(variant="clip"), layers=["0"])
        ```
    """

    writes_weights: ClassVar[bool] = True

    variant: str = "full"
    alpha_step: float = 0.1
    least_clip: float = 0.5
    clip_step: float = 0.05

    def __post_init__(self) -> None:
        check_choice(self, "variant", ("full", "lite", "clip"))
        for name in ("alpha_step", "least_clip", "clip_step"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"AWQ: {name}={value!r} is not above 0 and at most 1")

    @property
    def needs(self) -> frozenset[str]:
        """Return the statistics that its variant reads; "full" cuts the local Hessian out of the Hessian."""
        return frozenset({LOCAL_HESSIAN} if self.variant == "clip" else {COLUMNS, HESSIAN})

    @property
    def smooths(self) -> bool:
        """Return False if it only clips."""
        return self.variant != "clip"

    @property
    def alphas(self) -> tuple[float, ...]:
        """Return the exponents, 0 first."""
        steps = round(1 / self.alpha_step)
        # Multiples of a float step are off in their last bits, and reports show them.
        return tuple(min(1.0, round(i * self.alpha_step, 6)) for i in range(steps + 1))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the clip ratios, 1 first."""
        # The quotient may come out a little below the whole number that it stands for, which would lose the
        # last ratio.
        steps = int((1 - self.least_clip) / self.clip_step + 1e-6)
        return tuple(round(1 - i * self.clip_step, 6) for i in range(steps + 1))

    def smooth(self, group: Group, recipe: Recipe) -> Smoothing | None:
        """Return the factors of least output error; None if it is best not to scale."""
        alpha, factors = self.search(group, recipe)
        return None if alpha is None or factors is None else Smoothing(factors, {"alpha": alpha})

    def search(self, group: Group, recipe: Recipe) -> tuple[float | None, Tensor | None]:
        """Return the best alpha and its factors; (None, None) if it is best not to scale, or the input is not known."""
        if group.inputs is None or self.variant == "clip":
            return None, None
        activations, hessian = group.inputs.column_mean, group.inputs.hessian
        assert activations is not None
        assert hessian is not None
        sizes = _relative_sizes(group, recipe)
        best: tuple[float | None, Tensor | None] = None, None
        # No factors are tried, too: so scaling never makes the error larger.
        least = _scaled_error(group, recipe, hessian, None)
        for alpha in self.alphas:
            factors = _factors(activations, sizes, alpha)
            error = _scaled_error(group, recipe, hessian, factors)
            if error < least:
                least, best = error, (alpha, factors)
        return best

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return the scales of the weights' own amaxes, or clipped ones; a warning if no token was seen."""
        unclipped = [decision.quantizer for decision in Max().decide(group, recipe)]
        if group.inputs is None:
            warning = "no token reached it: quantized without activations, as Max does"
            return [Decision(quantizer, notes={"warning": warning}) for quantizer in unclipped]
        if self.variant == "lite":
            return [Decision(quantizer) for quantizer in unclipped]
        hessian, local = group.inputs.hessian, group.inputs.local_hessian
        if local is None:
            assert hessian is not None
            # The blocks on the diagonal of H are the local Hessian, so "full" does not collect it a
            # second time.
            local = local_hessian_of(hessian)
        clipped = best_clips(group, recipe, local, self.ratios)
        # The local error leaves out how blocks interact. If the full Hessian is known, clips must lower its error.
        kept = [True] * len(clipped)
        if self.variant == "full" and hessian is not None:
            for members in group_by_scale(group.linears):
                with_clips = _error_of(group, recipe, hessian, members, [clipped[i].quantizer for i in members])
                without = _error_of(group, recipe, hessian, members, [unclipped[i] for i in members])
                for i in members:
                    kept[i] = with_clips < without
        return [
            Decision(one.quantizer, notes={"clip": float(one.ratios.mean())})
            if keep
            else Decision(quantizer, notes={"clip": 1.0})
            for one, quantizer, keep in zip(clipped, unclipped, kept, strict=True)
        ]


def _relative_sizes(group: Group, recipe: Recipe) -> Tensor:
    """Return fp32 [K]: the mean over all rows of each column's magnitude, relative to the largest in its block.

    The block is the columns of one scale, or the whole row if scales serve whole rows or the tensor.
    """
    block = block_multiple(recipe)
    weights = torch.cat([finite_or_zero(one.weight).abs() for one in group.linears])  # [rows, K]
    blocks = tile(weights, weights.shape[-1] if block == 1 else block)
    largest = blocks.amax(dim=-1, keepdim=True)
    # A block of zeros would give 0 / 0.
    relative = torch.where(largest > 0, blocks / largest, torch.zeros_like(blocks))
    return untile(relative, weights.shape[-1]).mean(dim=0)


def _factors(activations: Tensor, sizes: Tensor, alpha: float) -> Tensor:
    """Return fp32 [K]; those of live columns are divided by sqrt(largest * smallest), so that they spread around 1."""
    live = (activations > 0) & (sizes > 0)
    if not bool(live.any()):
        return torch.ones_like(activations)
    raw = (activations.pow(alpha) / sizes.pow(1 - alpha)).clamp(SMALLEST_FACTOR, LARGEST_FACTOR)
    middle = (raw[live].max() * raw[live].min()).sqrt()
    return torch.where(live, raw / middle, torch.ones_like(raw))


def _scaled_error(group: Group, recipe: Recipe, hessian: Tensor, factors: Tensor | None) -> float:
    """Return tr(dW H dW^T) over the group, its columns scaled before rounding and scaled back afterwards.

    Scaled weights are rounded to their dtype first, as folding stores them; inf if they leave its range.
    """
    fmt, total = format_of(recipe), 0.0
    for members in group_by_scale(group.linears):
        linears = [group.linears[i] for i in members]
        weights, amaxes = [finite_or_zero(one.weight) for one in linears], [one.amax for one in linears]
        if factors is not None:
            weights = [(w * factors).to(one.weight.dtype).float() for w, one in zip(weights, linears, strict=True)]
            if not all(bool(torch.isfinite(w).all()) for w in weights):
                # Folding would refuse such factors, and with them the layer; an infinite error leaves
                # them out.
                return math.inf
            amaxes = [shared_amax(w, recipe) for w in weights]
            if len(members) > 1:
                # These weights store one tensor-wide scale, so it has to serve the largest of them
                # after scaling.
                amaxes = [torch.stack([a for a in amaxes if a is not None]).amax()] * len(members)
        for one, w, amax in zip(linears, weights, amaxes, strict=True):
            values = round_trip(w, recipe, fmt.quantizer(w, recipe, amax))
            total += _output_error(
                (values if factors is None else values / factors) - finite_or_zero(one.weight), hessian
            )
    return total


def _error_of(
    group: Group, recipe: Recipe, hessian: Tensor, members: Sequence[int], quantizers: Sequence[Mapping[str, Tensor]]
) -> float:
    """Return tr(dW H dW^T) of some linears under some quantizers."""
    weights = [finite_or_zero(group.linears[i].weight) for i in members]
    return sum(
        _output_error(round_trip(w, recipe, quantizer) - w, hessian)
        for w, quantizer in zip(weights, quantizers, strict=True)
    )


def _output_error(off: Tensor, hessian: Tensor) -> float:
    """Return tr(off H off^T)."""
    return float(((off @ hessian) * off).sum(dtype=torch.float64))
