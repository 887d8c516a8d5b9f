"""Calls of the kernels of a recipe, as kernels.py makes them: all kinds of arguments, whole tiles and ragged ones.

Triton compiles other code for numbers that 16 divides. Weights have such sizes, and so do these values, as far as they
stay few: then what is tried is the code that runs.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.kernels.probes import Probes
from qtensor.probes.numbers import CPU, Patches, any_bits, round_, ties, wild
from qtensor.spec import registry as formats
from qtensor.spec.blocks import finite_amax, row_amax
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, row_multiple, specs_of, tensor_wide

MOST = 57344.0, 43008.0  # 448 and 2688, times a power of two: what all values share
ENOUGH = 9000  # numbers: more than a tile of any kernel, but of long rows
SIXTEEN = 16
MOST_COLUMNS = 4096  # of sixteen rows
# bits of the length of rows: from these on, kernels go through them in pieces, and all longer ones are alike
LONG = 16  # where a program holds what shares a scale
WIDE = 11  # elsewhere


class _Encoding(NamedTuple):
    """Calls of one kind."""

    lanes: int  # bits of the length of rows; 0 where blocks are what kernels are made for
    dims: int | None  # of the amax; None: there is none


def encode_probes(recipe: Recipe, dtype: torch.dtype, encode: Callable[..., Any]) -> Probes:
    """Return what a kernel that encodes is tried with.

    Args:
        recipe: of the parts.
        dtype: of the values.
        encode: the definition, for the same arguments.
    """
    by_row = formats.shares_scale_along(recipe, 1, 2) and tensor_wide(recipe) is None
    unblocked = block_multiple(recipe) == 1

    def kind(x: Tensor, amax: Tensor | None = None) -> _Encoding:
        most = LONG if by_row and amax is None else WIDE
        return _Encoding(_lanes(x.shape[1], most) if unblocked else 0, None if amax is None else amax.ndim)

    def calls(kind: _Encoding) -> Iterator[tuple[Any, ...]]:
        for number, x in enumerate(_values(recipe, dtype, kind.lanes, by_row=by_row)):
            tiles = _tiles(x, block_multiple(recipe), row_multiple(recipe))
            values = x.to(torch.float32)
            if kind.dims is None:
                yield tiles, None
            elif kind.dims == 0:
                yield tiles, finite_amax(values)
                # smaller than that of the values, which saturate; no scale follows from the last two
                for amax in (43008.0 * 2.0**-20, 0.0, 2.0**-140)[: 0 if number else 3]:
                    yield tiles, _scalar(amax)
            else:
                own = row_amax(values)
                yield tiles, own
                yield tiles, own.roll(1, 0) * 0.75

    return Probes(kind, calls, lambda *args: encode(*args)[0])


def decode_probes(recipe: Recipe, dtype: torch.dtype, decode: Callable[..., Any]) -> Probes:
    """Return what a kernel that decodes is tried with; arguments as those of `encode_probes`."""
    specs = [spec for spec in specs_of(recipe) if spec.gathered]
    unblocked = block_multiple(recipe) == 1

    def kind(payload: Tensor, *others: Tensor) -> _Encoding:
        dims = next((other.ndim for other, spec in zip(others, specs[1:], strict=True) if not spec.per_row), None)
        return _Encoding(_lanes(payload.shape[1], WIDE) if unblocked else 0, dims)

    def calls(kind: _Encoding) -> Iterator[tuple[Any, ...]]:
        columns = _columns(recipe, kind.lanes)
        shape = (_rows(columns, 1, 3), columns)
        for seed, wide in enumerate((1.0, 3e-5, 2.0**-130, 3e38, float("nan"))):
            parts = []
            for number, spec in enumerate(specs):
                if spec.per_row:
                    parts.append(any_bits(spec.shape(shape), spec.dtype, 10 * seed + number))
                elif kind.dims:
                    parts.append(any_bits((shape[0], 1), torch.float32, seed))
                else:
                    parts.append(_scalar(wide))
            yield _tiles(parts[0], block_multiple(recipe) // specs[0].block, 1), *parts[1:]
            if kind.dims != 0:
                return

    return Probes(kind, calls, decode, any_nan=dtype != torch.float32)


def amax_probes(dtype: torch.dtype, amax: Callable[..., Any]) -> Probes:
    """Return what the kernel that finds the largest finite magnitude is tried with."""

    def calls(kind: object) -> Iterator[tuple[Tensor]]:
        x = wild(dtype, Patches(1, 1, 600, 16)).reshape(-1)
        yield (x,)
        yield (torch.where(x.isfinite(), x / 2**7, x),)
        yield (torch.where(x.isfinite(), -0.0, x),)

    return Probes(lambda x: None, calls, amax)


def _values(recipe: Recipe, dtype: torch.dtype, lanes: int, *, by_row: bool) -> Iterator[Tensor]:
    """Yield values [rows, columns] that reach the branches of a kernel."""
    group, block, columns = row_multiple(recipe), block_multiple(recipe), _columns(recipe, lanes)
    size = columns if by_row else max(block, 4)
    across = columns // size
    patches = Patches(_rows(columns, group, 3 if by_row else 1), group, across, size)
    yield wild(dtype, patches)
    # values that share a scale leave all but the largest magnitudes without codes
    shares = formats.shares_scale_along(recipe, 1, 2)
    for most in MOST if shares and not by_row else MOST[:1]:
        x = round_(dtype, patches, most)
        values = x.to(torch.float32)
        yield ties(x, patches, recipe, formats.shared_amax(values, recipe))
    if shares and not by_row:
        like = wild(dtype, patches)
        yield torch.zeros_like(like).copysign(like)
        yield wild(dtype, patches).clamp(-(2.0**-120), 2.0**-120)


def _tiles(x: Tensor, block: int, group: int) -> Tensor:
    """Return whole blocks as kernels take them, see qtensor/numerics/tiles.py."""
    tiles = (-1, x.shape[1]) if block == 1 else (-1, x.shape[1] // block, block)
    return x.view(-1, group, *tiles[1:]) if group > 1 else x.view(tiles)


def _columns(recipe: Recipe, lanes: int) -> int:
    """Return a length of rows: of few blocks, or one that fills most of so many lanes."""
    if not lanes:
        return (SIXTEEN if row_multiple(recipe) < 64 else 2) * block_multiple(recipe)
    if lanes == LONG:
        return 2**15 + 48
    if lanes == WIDE:
        return 2**10 + 16
    return (1 << lanes) - min(16, (1 << lanes) // 4)


def _rows(columns: int, group: int, least: int) -> int:
    """Return how many groups of rows there are."""
    few = max(-(-ENOUGH // (columns * group)), least)
    return few + -few % SIXTEEN if group == 1 and columns <= MOST_COLUMNS else few


def _lanes(length: int, most: int) -> int:
    """Return how many bits a length takes: as many as the power of two that holds it, which is 16 or more."""
    return min(max((length - 1).bit_length(), 4), most)


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device=CPU)
