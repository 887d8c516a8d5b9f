"""Matrices the other way round: [rows, columns] is read once, tile by tile, and written as [columns, rows].

A tile goes through shared memory, so that whole lines of memory are read and written on both sides. Rows of what is
written may be longer than what there is to write: the rest is zeros, which contractions ignore.

A product of backward sums along rows, or along columns, of the same gradient. Where every row (column) has a Float8
scale of its own amax, two passes give both operands: the amaxes of rows and columns, and then codes, both ways round.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import fp8
from qtensor.numerics.triton_kernels.float8 import scales
from qtensor.numerics.triton_kernels.launching import MOST_IN_A_TILE, as_stored, launch
from qtensor.numerics.triton_kernels.pairs import bits_of, finite

ROWS, COLUMNS = 64, 128  # of a tile: whole sectors of memory (32 bytes) on both sides, also of one-byte elements
TILE: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS}


def transpose(x: Tensor, width: int) -> Tensor:
    """Return [columns, width] of numbers of any kind [rows, columns], with zeros behind the rows."""
    rows, columns = x.shape
    turned = torch.empty(columns, width, dtype=x.dtype, device=x.device)
    launch(_transpose, _programs(width, columns), as_stored(x), as_stored(turned), rows, columns, width, **TILE)
    return turned


def encode_columns(x: Tensor, width: int, *, element: torch.dtype, power_of_two: bool) -> dict[str, Tensor]:
    """Return the Float8 parts of the columns of values [rows, columns], each under its own amax.

    Returns:
        payload: [columns, width], with zeros behind the rows.
        scale: fp32 [columns, 1].
    """
    rows, columns = x.shape
    found = torch.zeros(columns, dtype=torch.int32, device=x.device)
    launch(_column_amax, _programs(rows, columns), x, found, rows, columns, **TILE)
    turned = _parts(columns, width, element, x.device)
    stored = map(as_stored, turned.values())
    constants = {"E4M3": element == torch.float8_e4m3fn, "POWER_OF_TWO": power_of_two, **TILE}
    launch(_encode_columns, _programs(width, columns), x, found, *stored, rows, columns, width, **constants)
    return turned


def encode_both(
    x: Tensor, factors: Tensor | None, widths: tuple[int, int], *, element: torch.dtype, power_of_two: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the Float8 parts of the rows of x * factors, and of the columns of x: those of `encode_columns`.

    Args:
        x: bf16, fp16 or fp32 values [rows, columns].
        factors: of columns, fp32 [1, columns] or, of all, [1, 1]; None: there are none.
        widths: how long the rows of both payloads are; zeros are behind what there is.
        element: of both.
        power_of_two: likewise.
    """
    (rows, columns), (width, tall) = x.shape, widths
    # amaxes of columns behind those of rows
    found = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
    each = 0 if factors is None else 2 if factors.numel() > 1 else 1
    known = found if factors is None else factors.contiguous()
    launch(_both_amax, _programs(rows, columns), x, known, found, rows, columns, FACTORS=each, **TILE)
    straight, turned = _parts(rows, width, element, x.device), _parts(columns, tall, element, x.device)
    stored = [as_stored(part) for parts in (straight, turned) for part in parts.values()]
    constants = {"E4M3": element == torch.float8_e4m3fn, "POWER_OF_TWO": power_of_two, "FACTORS": each, **TILE}
    sizes = rows, columns, width, tall
    launch(_encode_both, _programs(max(tall, rows), max(width, columns)), x, known, found, *stored, *sizes, **constants)
    return straight, turned


def _parts(rows: int, width: int, element: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    return {
        "payload": torch.empty(rows, width, dtype=element, device=device),
        "scale": torch.empty(rows, 1, dtype=torch.float32, device=device),
    }


def _programs(rows: int, columns: int) -> int:
    """Return how many tiles cover a matrix.

    Raises:
        OverflowError: rows or columns longer than the kernels count.
    """
    if max(ROWS * columns, COLUMNS * rows) > MOST_IN_A_TILE:
        raise OverflowError(f"{rows} x {columns} elements, more than kernels written by hand count in a tile")
    return -(-rows // ROWS) * -(-columns // COLUMNS)


@triton.jit
def _transpose(
    x: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column = _tile_at(columns, ROWS, COLUMNS)
    first, lanes, there = _lanes_at(row, column, rows, columns, columns, ROWS, COLUMNS)
    values = tl.load(x + (first + lanes), mask=there, other=0)
    first, lanes, there = _lanes_at(column, row, columns, width, width, COLUMNS, ROWS)
    tl.store(turned + (first + lanes), tl.trans(values), mask=there)


@triton.jit
def _column_amax(
    x: tl.tensor, found: tl.tensor, rows: tl.tensor, columns: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    row, column = _tile_at(columns, ROWS, COLUMNS)
    first, lanes, there = _lanes_at(row, column, rows, columns, columns, ROWS, COLUMNS)
    values = tl.load(x + (first + lanes), mask=there, other=0.0).to(tl.float32)
    lane = tl.arange(0, COLUMNS)
    # numbers without a sign are in the order of their bits, and a maximum does not depend on who comes first
    amax = bits_of(tl.max(tl.abs(finite(values)), axis=0))
    tl.atomic_max(found + (column + lane), amax, mask=lane < columns - column, sem="relaxed")


@triton.jit
def _both_amax(
    x: tl.tensor,
    factors: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column = _tile_at(columns, ROWS, COLUMNS)
    first, lanes, there = _lanes_at(row, column, rows, columns, columns, ROWS, COLUMNS)
    values = tl.load(x + (first + lanes), mask=there, other=0.0).to(tl.float32)
    at, lane = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    amax = bits_of(tl.max(tl.abs(finite(values)), axis=0))
    tl.atomic_max(found + (rows + column + lane), amax, mask=lane < columns - column, sem="relaxed")
    scaled = _times(values, factors, column, columns, FACTORS, COLUMNS)
    own = bits_of(tl.max(tl.abs(finite(scaled)), axis=1))
    tl.atomic_max(found + (row + at), own, mask=at < rows - row, sem="relaxed")


@triton.jit
def _encode_columns(
    x: tl.tensor,
    found: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column = _tile_at(columns, ROWS, COLUMNS)
    first, lanes, there = _lanes_at(row, column, rows, columns, columns, ROWS, COLUMNS)
    values = tl.load(x + (first + lanes), mask=there, other=0.0).to(tl.float32)
    lane = tl.arange(0, COLUMNS)
    known = lane < columns - column
    amax = tl.load(found + (column + lane), mask=known, other=0).to(tl.float32, bitcast=True)
    enc, dec = scales(amax, E4M3, POWER_OF_TWO)
    tl.store(scale + (column + lane), dec, mask=known & (row == 0))
    first, lanes, there = _lanes_at(column, row, columns, width, width, COLUMNS, ROWS)
    tl.store(payload + (first + lanes), tl.trans(fp8.code(values, enc[None, :], E4M3)), mask=there)


@triton.jit
def _encode_both(
    x: tl.tensor,
    factors: tl.tensor,
    found: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    turned: tl.tensor,
    turned_scale: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    tall: tl.tensor,
    E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column = _tile_at(tl.maximum(width, columns), ROWS, COLUMNS)
    first, lanes, there = _lanes_at(row, column, rows, columns, columns, ROWS, COLUMNS)
    values = tl.load(x + (first + lanes), mask=there, other=0.0).to(tl.float32)
    at, lane = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    own, each = at < rows - row, lane < columns - column
    amax = tl.load(found + (rows + column + lane), mask=each, other=0).to(tl.float32, bitcast=True)
    enc, dec = scales(amax, E4M3, POWER_OF_TWO)
    tl.store(turned_scale + (column + lane), dec, mask=each & (row == 0))
    first, lanes, there = _lanes_at(column, row, columns, tall, tall, COLUMNS, ROWS)
    tl.store(turned + (first + lanes), tl.trans(fp8.code(values, enc[None, :], E4M3)), mask=there)
    amax = tl.load(found + (row + at), mask=own, other=0).to(tl.float32, bitcast=True)
    enc, dec = scales(amax, E4M3, POWER_OF_TWO)
    tl.store(scale + (row + at), dec, mask=own & (column == 0))
    scaled = _times(values, factors, column, columns, FACTORS, COLUMNS)
    first, lanes, there = _lanes_at(row, column, rows, width, width, ROWS, COLUMNS)
    tl.store(payload + (first + lanes), fp8.code(scaled, enc[:, None], E4M3), mask=there)


@triton.jit
def _times(
    values: tl.tensor,
    factors: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    FACTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return values [ROWS, COLUMNS] times the factor of all (1) or of their column (2), or as they are (0)."""
    if FACTORS == 1:
        values = values * tl.load(factors)
    if FACTORS == 2:
        lane = tl.arange(0, COLUMNS)
        values = values * tl.load(factors + (column + lane), mask=lane < columns - column, other=0.0)[None, :]
    return values


@triton.jit
def _tile_at(columns: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the first row and the first column of this program's tile."""
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // across
    return group * ROWS, (tl.program_id(0) - group * across) * COLUMNS


@triton.jit
def _lanes_at(
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return (where a tile begins in memory, int64; its lanes, counted from there; which of them there are)."""
    at, lane = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = (at < rows - row)[:, None] & (lane < columns - column)[None, :]
    return row.to(tl.int64) * stride + column, at[:, None] * stride + lane[None, :], there
