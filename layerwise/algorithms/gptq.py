"""GPTQ: later columns make up for what rounding a column costs the output.

    H       = 2 X^T X / tokens, with damping * mean(diag H) added to its diagonal
    U       upper triangular, U^T U = H^-1
    for each column j:                         (in order, or by decreasing H[j, j])
        q   = snap(w[j] * enc) * dec           the values that encode_with will store
        w[k] -= (w[j] - q) / U[j, j] * U[j, k] for all k > j

The scales are fixed before the first column. A decision's `weight` holds every column as it was just before it was
rounded, so that rounding it under the same scales chooses the same elements again.

U takes one factorisation: with J, which reverses the order of rows, J H J = L L^T gives U = J L^-1 J; neither the
inverse of H nor a Cholesky of that is needed. Columns are processed as the rows of W^T, in blocks: inside a block, a
column first takes in the corrections of the earlier ones; the rest is updated once a block, by a matrix product.

Last bits matter here: one of them can decide a tie, and so change all columns after it. So products run in full fp32,
and on one thread on CPU, where the number of threads would change the order of additions.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from layerwise.algorithms.algorithm import HESSIAN, Algorithm, Decision, Group
from layerwise.algorithms.arithmetic import full_precision, one_thread
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from qtensor.formats import block_multiple, format_of
from qtensor.recipes import Recipe

RAISES = 3  # of the damping, tenfold each, before giving up


@dataclass(frozen=True, kw_only=True)
class GPTQ(Algorithm):
    """Rounds column by column, and changes the columns that follow to make up for each error.

    Args:
        damping: added to the diagonal of the Hessian, as a fraction of its mean. Where that is too little to factorise
            the Hessian, it is raised tenfold, up to three times, and the decision's notes say so.
        block: columns between two updates of all the others; only a matter of speed.
        act_order: start with the columns whose inputs are largest.
        scales: "max", from the largest magnitudes, or "mse", those of `Mse()`.
        hessians: "shared", all Hessians of a layer are collected in one pass over the batches; "one_at_a_time", a pass
            for each, which needs memory for a single one.

    Raises:
        ValueError: for any other value.
    """

    writes_weights: ClassVar[bool] = True
    layer_inputs: ClassVar[str] = "quantized"

    damping: float = 0.01
    block: int = 128
    act_order: bool = False
    scales: str = "max"
    hessians: str = "shared"

    def __post_init__(self) -> None:
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"GPTQ(damping={self.damping!r}): expected a positive number, such as 0.01")
        if self.block < 1:
            raise ValueError(f"GPTQ(block={self.block!r}): expected a positive number of columns, such as 128")
        for name, choices in (("scales", ("max", "mse")), ("hessians", ("shared", "one_at_a_time"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"GPTQ({name}={getattr(self, name)!r}): expected one of {', '.join(map(repr, choices))}"
                )

    @property
    def needs(self) -> frozenset[str]:
        """The Hessian."""
        return frozenset({HESSIAN})

    @property
    def one_at_a_time(self) -> bool:
        """Whether the Hessians of a layer are collected one after the other."""
        return self.hessians == "one_at_a_time"

    @torch.no_grad()
    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Scales from the weights alone, and the values to round under them; plain rounding where there is no input.

        Raises:
            RuntimeError: the Hessian cannot be factorised, or a weight is not finite.
        """
        quantizers = self._quantizers(group, recipe)
        if group.inputs is None:
            notes = {"warning": "no token reached it; rounded to nearest under scales from its values"}
            return [Decision(quantizer, notes=notes) for quantizer in quantizers]
        hessian = group.inputs.hessian
        if hessian is None:
            raise ValueError(
                f"{_linear_names(group)}: GPTQ needs the Hessian of their input, and got inputs without one"
            )
        for linear in group.linears:
            if not torch.isfinite(linear.weight).all():
                raise RuntimeError(
                    f"{linear.name} holds values that are not finite; GPTQ would spread them to all columns"
                )
        with one_thread(), full_precision(hessian.device):
            order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if self.act_order else None
            factor, damping = self._factorised(group, hessian if order is None else hessian[order][:, order])
            values = _compensated(group, factor, order, _rounding(group, recipe, quantizers), self.block)
        notes = {}
        if damping != self.damping:
            raised = f"damping raised from {self.damping:g} to {damping:g}"
            notes = {"warning": f"the Hessian was not positive definite: {raised}"}
        return [Decision(quantizer, value, notes) for quantizer, value in zip(quantizers, values, strict=True)]

    def _quantizers(self, group: Group, recipe: Recipe) -> list[Mapping[str, Tensor]]:
        scales = Mse() if self.scales == "mse" else Max()
        return [decision.quantizer for decision in scales.decide(group, recipe)]

    def _factorised(self, group: Group, hessian: Tensor) -> tuple[Tensor, float]:
        """The factor, and the damping that it took."""
        for raised in range(RAISES + 1):
            damping = self.damping * 10**raised
            factor = _inverse_factor(hessian, damping)
            if factor is not None:
                return factor, damping
        assert group.inputs is not None
        raise RuntimeError(
            f"{_linear_names(group)}: the Hessian of their input ({group.inputs.tokens} tokens of {len(hessian)} "
            f"columns) is not positive definite, not even with damping {damping:g}; calibrate on more tokens, give a "
            "larger GPTQ(damping=...), or exclude these linears"
        )


@dataclass(frozen=True, eq=False)
class _Rounding:
    """How all rows of a group are rounded; row s of both, [scales, rows], is for `span` columns from s * span on."""

    enc: Tensor
    dec: Tensor
    span: int
    snap: Callable[[Tensor, Recipe], Tensor]
    recipe: Recipe

    def __call__(self, values: Tensor, column: int) -> Tensor:
        """What the values of one column [rows] are stored as."""
        scale = column // self.span
        return self.snap(values * self.enc[scale], self.recipe).mul_(self.dec[scale])


def _rounding(group: Group, recipe: Recipe, quantizers: Sequence[Mapping[str, Tensor]]) -> _Rounding:
    fmt = format_of(recipe)
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for linear, quantizer in zip(group.linears, quantizers, strict=True):
        for scales, found in zip(both, fmt.grid(recipe, quantizer), strict=True):
            rows = found.reshape(1, 1) if found.ndim == 0 else found  # [1 or N, scales]
            scales.append(rows.expand(linear.weight.shape[0], -1))
    enc, dec = (torch.cat(scales).t().contiguous() for scales in both)
    span = block_multiple(recipe) if len(enc) > 1 else group.linears[0].weight.shape[1]
    return _Rounding(enc, dec, span, fmt.snap, recipe)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """U [K, K], upper triangular, U^T U = (H + damping * mean(diag H))^-1; None where H cannot be factorised.

    A column without input does not affect the others: its row and column of U are those of the identity.
    """
    flipped = hessian.flip(0, 1)
    diagonal = flipped.diagonal()  # a view
    mean = diagonal.mean()
    silent = diagonal == 0
    flipped[silent] = 0
    flipped[:, silent] = 0
    diagonal.add_(damping * mean)
    diagonal[silent] = 1
    lower, info = torch.linalg.cholesky_ex(flipped)
    if info:
        return None
    del flipped, diagonal
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    factor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
    return factor if torch.isfinite(factor).all() else None


def _compensated(group: Group, factor: Tensor, order: Tensor | None, rounding: _Rounding, block: int) -> list[Tensor]:
    """The values to round, fp32 [N, K] for each linear. `factor` is in the order of processing."""
    columns = torch.cat([linear.weight.float() for linear in group.linears]).t()  # [K, rows]
    columns = columns.contiguous() if order is None else columns[order]
    numbers = list(range(len(columns))) if order is None else order.tolist()
    diagonal = factor.diagonal().tolist()
    for start in range(0, len(columns), block):
        end = min(start + block, len(columns))
        errors = torch.empty_like(columns[start:end])
        for index in range(start, end):
            values, done = columns[index], index - start
            if done:
                values.addmv_(errors[:done].t(), factor[start:index, index], alpha=-1)
            torch.sub(values, rounding(values, numbers[index]), out=errors[done]).div_(diagonal[index])
        columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    if order is not None:
        columns = torch.empty_like(columns).index_copy_(0, order, columns)
    return [part.contiguous() for part in columns.t().split([len(linear.weight) for linear in group.linears])]


def _linear_names(group: Group) -> str:
    return ", ".join(linear.name for linear in group.linears)
