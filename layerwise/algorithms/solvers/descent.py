"""Coordinate descent: one column after the other is rounded again, given all others as they are rounded.

    e       what the row of a weight was changed by, so far
    f       e^T H e, its error                                H symmetric, its diagonal positive
    best    q[j] - (H e)[j] / H[j, j], for column j           where f would be least, along q[j] alone
    q[j]    = snap(best * enc) * dec

Along q[j], f is a parabola around `best`: the nearest element is the best one, and no element of that column alone
makes the error any smaller. One sweep over all columns is a round; the scales never change.

The error of no row rises. A column is changed only if it comes nearer to `best` by more than a small part of the
step, so that last bits decide no ties; and a row keeps what it had before a round unless its error, computed in fp64,
has fallen.

In each block of columns, H e is computed anew by a matrix product; inside, a column takes in the steps of earlier ones.
"""

import torch
from torch import Tensor

from layerwise.algorithms.solvers.columns import ColumnRounding

BLOCK = 128  # columns between two products with all of H
NEARER = 2.0**-14  # of a step, at least; fp32 sums of some thousand terms are off by less
STRIP = 256  # rows of H that are made fp64 at once


def descend(weights: Tensor, rounded: Tensor, hessian: Tensor, rounding: ColumnRounding, rounds: int) -> Tensor:
    """Find values whose error is at most the one of `rounded`, row by row.

    Args:
        weights: fp32 [K, rows], what the stored values stand for.
        rounded: fp32 [K, rows], values that `rounding` leaves as they are.
        hessian: fp32 [K, K].
        rounding: how columns are rounded.
        rounds: sweeps at most; after one that changes nothing there is no other.

    Returns:
        fp32 [K, rows], values that `rounding` leaves as they are.
    """
    least = _errors(rounded - weights, hessian)
    for _ in range(rounds):
        tried = _swept(weights, rounded, hessian, rounding)
        errors = _errors(tried - weights, hessian)
        better = errors < least
        if not better.any():
            break
        rounded, least = torch.where(better, tried, rounded), torch.where(better, errors, least)
    return rounded


def _swept(weights: Tensor, rounded: Tensor, hessian: Tensor, rounding: ColumnRounding) -> Tensor:
    """Return `rounded` after one sweep."""
    rounded = rounded.clone()
    off = rounded - weights
    diagonal = hessian.diagonal().tolist()
    for start in range(0, len(rounded), BLOCK):
        end = min(start + BLOCK, len(rounded))
        # From the errors as they stand, so that rounding errors of earlier updates do not add up.
        slopes = hessian[start:end] @ off  # [columns, rows], H e
        steps = torch.zeros_like(slopes)
        for index in range(start, end):
            done, value = index - start, rounded[index]
            slope = slopes[done]
            if done:
                slope.addmv_(steps[:done].t(), hessian[start:index, index])
            best = value - slope.div_(diagonal[index])
            nearest = rounding(best, index)
            step = nearest - value
            taken = (value - best).abs_() - (nearest - best).abs_() > NEARER * step.abs()
            steps[done], rounded[index] = torch.where(taken, step, 0.0), torch.where(taken, nearest, value)
        off[start:end] = rounded[start:end] - weights[start:end]
    return rounded


def _errors(off: Tensor, hessian: Tensor) -> Tensor:
    """Return fp64 [rows]: e^T H e for each column e of `off` [K, rows]."""
    wide = off.double()
    strips = zip(wide.split(STRIP), hessian.split(STRIP), strict=True)
    return torch.stack([(part * (strip.double() @ wide)).sum(dim=0) for part, strip in strips]).sum(dim=0)
