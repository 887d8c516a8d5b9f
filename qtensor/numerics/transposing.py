"""Matrices the other way round: bytes, and values quantized along their columns, or along rows and columns at once.

    turned(x)             [rows, columns] -> [columns, rows]
    encode_columns(x)     parts of x.T, every column of x by itself
    encode_both(x)        parts of x * factors, every row by itself, and those of its columns

What is written may have longer rows than asked for: they are filled up with zeros to a multiple, which a contraction
ignores. The definition is torch's transpose and the encode of kernels.py; a GPU, whose elementwise copies reach a tenth
of its memory's speed there, has kernels written by hand (triton_transposes.py) with the same bytes. They read
the values once for all amaxes and once for all codes.
"""

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel
from fsdp_hooks.kernels.probes import Written
from fsdp_hooks.lazy_bits import resolve
from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import kernels, triton_kernels
from qtensor.probes.turned import both_probes, columns_probes, transpose_probes
from qtensor.spec import registry as formats
from qtensor.spec.blocks import row_amax
from qtensor.spec.codecs.rounding import is_armed
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of

Parts = dict[str, Tensor]


def turned(x: Tensor, multiple: int = 1) -> Tensor:
    """Return [columns, rows] of a matrix of any dtype, a copy, with zeros behind each row up to a multiple."""
    if _as_defined(x) or not (kernel := _transpose_kernel()).runs_by_hand(x):
        made = padded(x.t(), multiple)
        # that of a single row or column is the tensor itself
        return made if is_tracing() or min(x.shape) > 1 else made.clone()
    return kernel(resolve(x).contiguous(), _padded(x.shape[0], multiple))  # type: ignore[no-any-return]


def encode_columns(x: Tensor, recipe: Recipe, multiple: int = 1) -> Parts:
    """Return the parts of x.T, every column of x by itself, with zeros behind each up to a multiple.

    Args:
        x: dense [rows, columns] in any floating dtype.
        recipe: of rows, see `Recipe.of_rows`.
        multiple: what the length of a column is padded to.
    """
    if _as_defined(x) or not (kernel := _columns_kernel(recipe.stored, x.dtype, multiple)).runs_by_hand(x):
        return kernels.encode_rows(turned(x, multiple), recipe)
    return kernel(resolve(x).contiguous())  # type: ignore[no-any-return]


def encode_both(x: Tensor, factors: Tensor | None, recipe: Recipe, multiple: int = 1) -> tuple[Parts, Parts]:
    """Return the parts of x * factors, every row by itself, and the `encode_columns` of x.

    Args:
        x: dense [rows, columns] in any floating dtype.
        factors: fp32 [1, columns] or [1, 1], multiplied in fp32; None: there are none.
        recipe: of rows.
        multiple: what rows and columns are padded to.
    """
    if _as_defined(x) or not (kernel := _both_kernel(recipe.stored, x.dtype, multiple)).runs_by_hand(x):
        return encode_scaled(x, factors, recipe, multiple), encode_columns(x, recipe, multiple)
    return kernel(resolve(x).contiguous(), factors)  # type: ignore[no-any-return]


def encode_scaled(x: Tensor, factors: Tensor | None, recipe: Recipe, multiple: int = 1) -> Parts:
    """Return the parts of x * factors alone, see `encode_both`."""
    scaled = x if factors is None else x.to(torch.float32) * factors
    return kernels.encode_rows(padded(scaled, multiple), recipe)


def padded(x: Tensor, multiple: int) -> Tensor:
    """Return x, contiguous, with zeros behind each row up to a multiple; one-byte elements have the code 0 for 0."""
    short = -x.shape[-1] % multiple
    # a graph for any number of tokens would otherwise be one of those that need no zeros, or one of the others
    if not is_tracing() and not short:
        return x.contiguous()
    wide = F.pad(x.view(torch.uint8), (0, short)).view(x.dtype) if x.itemsize == 1 else F.pad(x, (0, short))
    return wide.contiguous()


def _as_defined(x: Tensor) -> bool:
    """Return whether there is nothing to choose: graphs take the definition, and so do stochastic writes."""
    return is_tracing() or is_armed() or x.is_meta


def _padded(length: int, multiple: int) -> int:
    return length + -length % multiple


# -- kernels -----------------------------------------------------------------------------------------------------------
# One for each recipe, dtype and multiple, with what they do where the one written by hand has failed.


@functools.cache
def _transpose_kernel() -> Kernel:
    def transpose(x: Tensor, width: int) -> Tensor:
        raw = x.view(torch.uint8) if x.itemsize == 1 else x
        return F.pad(raw, (0, 0, 0, width - x.shape[0])).t().contiguous().view(x.dtype)

    def by_hand(x: Tensor, width: int) -> Tensor:
        return _module().transpose(x, width)  # type: ignore[no-any-return]

    written = Written(by_hand, transpose_probes(transpose)) if triton_kernels.available() else None
    return Kernel(transpose, "transpose", written)


@functools.cache
def _columns_kernel(recipe: Recipe, dtype: torch.dtype, multiple: int) -> Kernel:
    hand = _by_hand(recipe, dtype)

    def encode_columns(x: Tensor) -> Parts:
        return kernels.encode_rows(padded(x.t(), multiple), recipe)

    def by_hand(x: Tensor) -> Parts:
        assert hand is not None
        return _module().encode_columns(x, _padded(x.shape[0], multiple), **hand.options)  # type: ignore[no-any-return]

    if hand is None:
        return Kernel(encode_columns, "encode_columns")
    probes = columns_probes(recipe, dtype, lambda x: _defined(x.t(), recipe, multiple))
    return Kernel(encode_columns, "encode_columns", Written(by_hand, probes))


@functools.cache
def _both_kernel(recipe: Recipe, dtype: torch.dtype, multiple: int) -> Kernel:
    hand = _by_hand(recipe, dtype)

    def encode_both(x: Tensor, factors: Tensor | None) -> tuple[Parts, Parts]:
        return encode_scaled(x, factors, recipe, multiple), kernels.encode_rows(padded(x.t(), multiple), recipe)

    def by_hand(x: Tensor, factors: Tensor | None) -> tuple[Parts, Parts]:
        assert hand is not None
        widths = _padded(x.shape[1], multiple), _padded(x.shape[0], multiple)
        return _module().encode_both(x, factors, widths, **hand.options)  # type: ignore[no-any-return]

    def defined(x: Tensor, factors: Tensor | None) -> tuple[Parts, Parts]:
        scaled = x if factors is None else x.to(torch.float32) * factors
        return _defined(scaled, recipe, multiple), _defined(x.t(), recipe, multiple)

    if hand is None:
        return Kernel(encode_both, "encode_both")
    return Kernel(encode_both, "encode_both", Written(by_hand, both_probes(recipe, dtype, defined)))


def _defined(x: Tensor, recipe: Recipe, multiple: int) -> Parts:
    """Return the parts of rows as the format defines them, whatever would run them."""
    values = padded(x, multiple).to(torch.float32)
    return formats.encode(values, recipe, row_amax(values))


def _by_hand(recipe: Recipe, dtype: torch.dtype) -> triton_kernels.ByHand | None:
    if dtype not in triton_kernels.DTYPES or not triton_kernels.available():
        return None
    hand: triton_kernels.ByHand | None = format_of(recipe).by_hand(recipe)
    return hand if hand is not None and hand.turns else None


def _module() -> Any:
    # which imports Triton: nothing but a first call on a GPU does
    return importlib.import_module("qtensor.numerics.triton_transposes")
