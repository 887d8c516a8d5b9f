"""Calls of the kernels that write matrices the other way round, as transposing.py makes them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.kernels.probes import Probes
from qtensor.probes.numbers import CPU, Patches, any_bytes, round_, ties, wild
from qtensor.spec import registry as formats
from qtensor.spec.recipes import Recipe

ROWS, COLUMNS = 80, 144  # more than a tile, both ways, and 16 divides them
WIDE = 96  # rows of what is written, zeros behind


def transpose_probes(transpose: Callable[..., Any]) -> Probes:
    """Return what the kernel that moves numbers alone is tried with; `transpose` is its definition."""

    def calls(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        yield any_bytes((ROWS, COLUMNS), dtype), WIDE

    return Probes(lambda x, width: x.dtype, calls, transpose, source=_source)


def columns_probes(recipe: Recipe, dtype: torch.dtype, encode: Callable[..., Any]) -> Probes:
    """Return what the kernel that encodes columns is tried with; `encode` is its definition."""

    def calls(kind: object) -> Iterator[tuple[Tensor]]:
        for x in _matrices(recipe, dtype):
            yield (x,)

    return Probes(lambda x: None, calls, encode, source=_source)


def both_probes(recipe: Recipe, dtype: torch.dtype, encode: Callable[..., Any]) -> Probes:
    """Return what the kernel that encodes rows and columns is tried with; `encode` is its definition."""

    def kind(x: Tensor, factors: Tensor | None) -> int | None:
        return None if factors is None else min(factors.numel(), 2)

    def calls(kind: int | None) -> Iterator[tuple[Any, ...]]:
        for number, x in enumerate(_matrices(recipe, dtype)):
            # powers of two leave values beside ties where they are
            factors = torch.exp2(torch.arange(COLUMNS, dtype=torch.float32, device=CPU) % 5 - 3).view(1, -1)
            factors = factors * (1.7 if number == 0 else 1.0)
            yield x, None if kind is None else factors[:, :1].contiguous() if kind == 1 else factors

    return Probes(kind, calls, encode, source=_source)


def _matrices(recipe: Recipe, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield values of all magnitudes, and values beside ties of the scales of rows, and of columns."""
    yield wild(dtype, Patches(ROWS, 1, COLUMNS // 16, 16))
    for rows, columns in ((ROWS, COLUMNS), (COLUMNS, ROWS)):
        patches = Patches(rows, 1, 1, columns)
        x = round_(dtype, patches, 57344.0)
        x = ties(x, patches, recipe, formats.shared_amax(x.to(torch.float32), recipe))
        yield x if rows == ROWS else x.t().contiguous()


def _source(args: tuple[Any, ...], name: str, place: int, entries: int) -> list[Tensor]:
    """Return the value that a code is made of; those of a scale are a whole row or column, which nobody would read."""
    if name.endswith("scale"):
        return []
    straight = name.startswith("0.")
    line, at = divmod(place, entries // (ROWS if straight else COLUMNS))
    row, column = (line, at) if straight else (at, line)
    return [args[0][row, column : column + 1]] if row < ROWS and column < COLUMNS else []
