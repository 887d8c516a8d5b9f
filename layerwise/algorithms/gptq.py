"""GPTQ: later columns make up for what rounding a column costs the output.

    H       = 2 X^T X / tokens, with damping * mean(diag H) added to its diagonal
    U       upper triangular, U^T U = H^-1
    for each column j:                         (in order, or by decreasing H[j, j])
        q   = snap(w[j] * enc) * dec           the values that encode_with will store
        w[k] -= (w[j] - q) / U[j, j] * U[j, k] for all k > j

The scales are fixed before the first column: those of another algorithm. If that one weighs errors by the local
Hessian, it gets the blocks on the diagonal of H, which are the same up to the rounding of fp32 products. A decision's
`weight` holds every column as it was just before it was rounded, so that rounding it under the same scales chooses the
same elements again; after coordinate descent (descent.py) it holds the elements' values, which round to themselves.

With factors for columns, weights and H are those after folding: what GPTQ makes up for is the error of the weights that
are stored.

H is known from a sample. With fewer tokens it says more about that sample, and less about other inputs: rounding that
trusts it then makes the error on others larger, in the end larger than rounding to nearest. Damping is what keeps it
from that, so by default it grows with K / tokens (docs/calibration.md has figures); 0.01 is what is usual.

U takes one factorisation: with J, which reverses the order of rows, J H J = L L^T gives U = J L^-1 J; neither the
inverse of H nor a Cholesky of that is needed. Columns are processed as the rows of W^T, in blocks: inside a block, a
column first takes in the corrections of the earlier ones; the rest is updated once a block, by a matrix product.

Last bits matter here: one of them can decide a tie, and so change all columns after it. So products run in full fp32,
and on one thread on CPU, where the number of threads would change the order of additions.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from layerwise.algorithms.algorithm import HESSIAN, LOCAL_HESSIAN, Algorithm, Decision, Group, Smoothing
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.solvers.arithmetic import full_precision, one_thread
from layerwise.algorithms.solvers.clipping import local_hessian_of
from layerwise.algorithms.solvers.columns import ColumnRounding, columns_of, per_linear, rounding_of
from layerwise.algorithms.solvers.descent import descend
from qtensor.spec.recipes import Recipe

MSE = Mse()
LEAST_DAMPING = 0.01
RAISES = 3  # of the damping, tenfold each, before giving up
KERNELS = 2**21  # multiplications that take as long as starting the dozen kernels for a column


@dataclass(frozen=True, kw_only=True)
class GPTQ(Algorithm):
    """Rounds column by column, and changes the columns that follow to make up for each error.

    Args:
        damping: added to the diagonal of the Hessian, as a fraction of its mean; None: K / (2 tokens), at least 0.01.
            If it is too little to factorise the Hessian, it is raised tenfold, up to three times, and the decision's
            notes say so.
        block: columns between two updates of all the others; only a matter of speed.
        act_order: start with the columns whose inputs are largest.
        descent: rounds of coordinate descent afterwards: each column is rounded again, given all others. The error that
            GPTQ minimises never rises by it, in no row.
        scales: the algorithm whose scales the columns are rounded under, one that writes no weights.
        smoothing: the algorithm whose factors for columns are folded in before, `AWQ()` (its clip ratios take no part)
            or `SmoothQuant()`; None: no factors.
        hessians: "shared", all Hessians of a layer are collected in one pass over the batches; "one_at_a_time", a pass
            for each, which needs memory for a single one.

    Raises:
        ValueError: for any other value, or factors that need the Hessian with `hessians="one_at_a_time"`.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=Int4GroupScaling(), algorithm=GPTQ(), layers=["0"])
        ```
    """

    writes_weights: ClassVar[bool] = True
    layer_inputs: ClassVar[str] = "quantized"

    damping: float | None = None
    block: int = 128
    act_order: bool = True
    descent: int = 0
    scales: Algorithm = MSE
    smoothing: Algorithm | None = None
    hessians: str = "shared"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.damping is not None and not 0 < self.damping <= sys.float_info.max:
            raise ValueError(f"{name}(damping={self.damping!r}): expected a positive number, such as 0.01, or None")
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"{name}(block={self.block!r}): expected a positive number of columns, such as 128")
        if type(self.descent) is not int or self.descent < 0:
            raise ValueError(f"{name}(descent={self.descent!r}): expected a number of rounds, such as 1, or 0 for none")
        scales: object = self.scales  # whatever it was given
        smoothing: object = self.smoothing
        if not isinstance(scales, Algorithm) or scales.writes_weights:
            raise ValueError(
                f"{name}(scales={self.scales!r}): expected an algorithm that writes no weights, such as Mse()"
            )
        if smoothing is not None and not (isinstance(smoothing, Algorithm) and smoothing.smooths):
            raise ValueError(
                f"{name}(smoothing={self.smoothing!r}): expected an algorithm with factors for columns, AWQ() or "
                "SmoothQuant(), or None"
            )
        if self.hessians not in ("shared", "one_at_a_time"):
            raise ValueError(f"{name}(hessians={self.hessians!r}): expected one of 'shared', 'one_at_a_time'")
        if self.one_at_a_time and self.smoothing is not None and self.smoothing.needs & {HESSIAN, LOCAL_HESSIAN}:
            raise ValueError(
                f"{name}(smoothing={self.smoothing!r}, hessians='one_at_a_time'): its factors need the Hessians of all "
                "linears at once; use hessians='shared', or SmoothQuant()"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Return the Hessian, which holds the local one, and what the scales and factors are made from."""
        others = self.scales.needs | (frozenset() if self.smoothing is None else self.smoothing.needs)
        return (others | {HESSIAN}) - {LOCAL_HESSIAN}

    @property
    def one_at_a_time(self) -> bool:
        """Return whether the Hessians of a layer are collected one after the other."""
        return self.hessians == "one_at_a_time"

    @property
    def smooths(self) -> bool:
        """Return whether there are factors for columns."""
        return self.smoothing is not None

    def smooth(self, group: Group, recipe: Recipe) -> Smoothing | None:
        """Return the factors of `smoothing`."""
        return None if self.smoothing is None else self.smoothing.smooth(_for(self.smoothing, group), recipe)

    @torch.no_grad()
    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """Return the scales of `scales`, and the values to round under them; plain rounding if there is no input.

        Raises:
            RuntimeError: the Hessian cannot be factorised, or a weight is not finite.
        """
        if group.inputs is not None:
            _check(group)
        with full_precision(group.linears[0].weight.device):
            decisions = self.scales.decide(_for(self.scales, group), recipe)
        if group.inputs is None:
            warning = "no token reached it; rounded to nearest under scales from its values"
            return [Decision(one.quantizer, notes={**one.notes, "warning": warning}) for one in decisions]
        values, damping = self._values(group, rounding_of(group, recipe, [one.quantizer for one in decisions]))
        notes, least = {}, self._least_damping(group)
        if damping != least:
            raised = f"damping raised from {least:g} to {damping:g}"
            notes = {"warning": f"the Hessian was not positive definite: {raised}"}
        return [
            Decision(one.quantizer, own, {**one.notes, **notes})
            for one, own in zip(decisions, per_linear(values, group), strict=True)
        ]

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Return the cost of the scales, the factorisation and the columns, as measured on one core of a CPU.

        A round of descent starts twice as many kernels, and multiplies by the Hessian three times, twice in fp64.
        """
        scales = self.scales.cost(rows, columns, tokens)
        if not tokens:
            return scales
        product, kernels = rows * columns**2, KERNELS * columns
        return scales + columns**3 + product + kernels + self.descent * (5 * product + 2 * kernels)

    def _values(self, group: Group, rounding: ColumnRounding) -> tuple[Tensor, float]:
        """Return the values to round, fp32 [K, rows], and the damping that it took."""
        assert group.inputs is not None
        hessian = group.inputs.hessian
        assert hessian is not None
        with one_thread(), full_precision(hessian.device):
            # Stable, since columns of equal diagonals must come in one order on every rank and device.
            order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if self.act_order else None
            factor, damping = self._factorise(group, hessian if order is None else hessian[order][:, order])
            aims = self._aims(group, factor, order)
            # It works in place, and descent measures errors from the aims as they were.
            values = _compensate(aims.clone() if self.descent else aims, factor, order, rounding, self.block)
            # Descent needs memory for another [K, K], and the factor no more.
            del factor
            if self.descent:
                # Descent begins at stored values, not at those just before rounding.
                rounded = torch.stack([rounding(column, index) for index, column in enumerate(values)])
                # With the same damping, or descent would bring down another error than GPTQ has, and
                # trust the sample more.
                damped = _damp(hessian.clone(), damping)
                values = descend(aims, rounded, damped, rounding, self.descent)
        return values, damping

    def _aims(self, group: Group, factor: Tensor, order: Tensor | None) -> Tensor:
        """Return what the stored values are to come close to, fp32 [K, rows], new.

        `factor` is in the order of processing.
        """
        return columns_of(group)

    def _least_damping(self, group: Group) -> float:
        """Return the damping to try first."""
        assert group.inputs is not None
        if self.damping is not None:
            return self.damping
        return max(LEAST_DAMPING, group.linears[0].weight.shape[1] / (2 * group.inputs.tokens))

    def _factorise(self, group: Group, hessian: Tensor) -> tuple[Tensor, float]:
        """Return the factor, and the damping that it took."""
        # A Hessian of few tokens is singular but for its damping, and rounding may undo that: more is tried before
        # the layer fails, maybe hours into a run.
        for raised in range(RAISES + 1):
            damping = self._least_damping(group) * 10**raised
            factor = _inverse_factor(hessian, damping)
            if factor is not None:
                return factor, damping
        assert group.inputs is not None
        raise RuntimeError(
            f"{_linear_names(group)}: the Hessian of their input ({group.inputs.tokens} tokens of {len(hessian)} "
            f"columns) is not positive definite, not even with damping {damping:g}; calibrate on more tokens, give a "
            f"larger {type(self).__name__}(damping=...), or exclude these linears"
        )


def _check(group: Group) -> None:
    """Raise if there is no Hessian, or a weight is not finite."""
    assert group.inputs is not None
    if group.inputs.hessian is None:
        raise ValueError(f"{_linear_names(group)}: GPTQ needs the Hessian of their input, and got inputs without one")
    for linear in group.linears:
        if not torch.isfinite(linear.weight).all():
            raise RuntimeError(f"{linear.name} holds values that are not finite; GPTQ would spread them to all columns")


def _for(algorithm: Algorithm, group: Group) -> Group:
    """Return the group with all that the algorithm needs: the local Hessian is cut out of the Hessian."""
    inputs = group.inputs
    if LOCAL_HESSIAN not in algorithm.needs or inputs is None or inputs.hessian is None:
        return group
    return dataclasses.replace(
        group, inputs=dataclasses.replace(inputs, local_hessian=local_hessian_of(inputs.hessian))
    )


def _damp(hessian: Tensor, damping: float) -> Tensor:
    """Add damping * mean(diag H) to H's diagonal, in place. A column without input becomes the identity's."""
    diagonal = hessian.diagonal()  # a view
    mean = diagonal.mean()
    # A column without input makes H singular. With the row and column of the identity it gets no error and hands
    # none on.
    silent = diagonal == 0
    hessian[silent] = 0
    hessian[:, silent] = 0
    diagonal.add_(damping * mean)
    diagonal[silent] = 1
    return hessian


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """Return U [K, K], upper triangular, U^T U = (H + damping * mean(diag H))^-1; None if H cannot be factorised.

    A column without input does not affect the others: its row and column of U are those of the identity.
    """
    # The flips are J H J of the formula at the top. They copy, so H itself stays as it was for the next damping.
    # The `_ex` variant reports a failure and does not raise.
    lower, info = torch.linalg.cholesky_ex(_damp(hessian.flip(0, 1), damping))
    if info:
        return None
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    factor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
    # A pivot just above 0 can be factorised, and its inverse overflows.
    return factor if torch.isfinite(factor).all() else None


def _compensate(columns: Tensor, factor: Tensor, order: Tensor | None, rounding: ColumnRounding, block: int) -> Tensor:
    """Return the values to round, [K, rows], in place of `columns`. `factor` is in the order of processing."""
    columns = columns if order is None else columns[order]
    # Scales belong to columns where they are stored, so rounding asks by these numbers.
    numbers = list(range(len(columns))) if order is None else order.tolist()
    # One transfer to the host, where one for each column would make it wait for the device K times.
    diagonal = factor.diagonal().tolist()
    for start in range(0, len(columns), block):
        end = min(start + block, len(columns))
        errors = torch.empty_like(columns[start:end])
        for index in range(start, end):
            values, done = columns[index], index - start
            if done:
                values.addmv_(errors[:done].t(), factor[start:index, index], alpha=-1)
            torch.sub(values, rounding(values, numbers[index]), out=errors[done]).div_(diagonal[index])
        # What this block has left to all columns behind it goes there at once, as one product of matrices.
        columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    return columns if order is None else torch.empty_like(columns).index_copy_(0, order, columns)


def _linear_names(group: Group) -> str:
    return ", ".join(linear.name for linear in group.linears)
