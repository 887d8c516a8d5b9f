"""Float8: what qtensor/formats/float8.py defines, in one pass over memory.

Where each row has a scale of its own amax, a row is a block, which a program holds in registers while it finds the
amax. Rows that are too long for it are read twice: once for the amax, and once under it, as any amax that is given.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import fp8
from qtensor.numerics.triton_kernels.launching import (
    DECODED,
    ELEMENTS,
    ENCODED,
    MOST_IN_A_TILE,
    WARPS,
    Parts,
    as_stored,
    encode_blocks,
    launch,
    made,
    tile_of,
)
from qtensor.numerics.triton_kernels.pairs import (
    FLT_MAX,
    INF_BITS,
    bits_of,
    blocks_at,
    largest_number,
    number_of,
    place,
    rounded,
    whole,
)
from qtensor.numerics.triton_kernels.reductions import amax_of_parts, row_amax

LONGEST = 2**15  # elements of a row that the threads of a program hold
REGISTERS = 128  # of a thread at most, which a multiprocessor has for
MOST_WARPS = 16
WIDEST = 1024  # columns of a tile of many rows


def encode(
    x: Tensor, amax: Tensor | None, *, element: torch.dtype, power_of_two: bool, out: Parts = None
) -> dict[str, Tensor]:
    """Return the parts of values [rows, K] under an amax, fp32 [], [rows, 1] or, in parts of it, [parts].

    None: under that of each row.
    """
    length = x.shape[1]
    if amax is None and length <= LONGEST:
        return encode_own(x.unsqueeze(1), element=element, power_of_two=power_of_two, square=1, out=out)
    wide = row_amax(x) if amax is None else amax
    parts = {
        "payload": made(out, "payload", x.shape, element, x.device),
        "scale": made(out, "scale", wide.shape if wide.ndim == 2 else (), torch.float32, x.device),
    }
    e4m3 = element == torch.float8_e4m3fn
    stored = map(as_stored, parts.values())
    constants = {"E4M3": e4m3, "POWER_OF_TWO": power_of_two, "IN_PARTS": wide.ndim == 1}
    launch_rows(_encode_under, ENCODED, x, wide, *stored, **constants)
    return parts


def encode_own(
    x: Tensor, *, element: torch.dtype, power_of_two: bool, square: int, out: Parts = None
) -> dict[str, Tensor]:
    """Return the parts of values [.., blocks, block], each under its own amax; `square`: the rows of a block."""
    length = x.shape[-1]
    lanes = max(triton.next_power_of_2(length), 16)
    elements = max(tile_of(ENCODED, 1), square * lanes)
    return encode_blocks(
        _encode,
        x,
        length,
        payload=element,
        scale=torch.float32,
        tile=elements // lanes,
        square=square,
        out=out,
        num_warps=min(elements // tile_of(ENCODED, 1) * WARPS, MOST_WARPS),
        maxnreg=REGISTERS,
        E4M3=element == torch.float8_e4m3fn,
        POWER_OF_TWO=power_of_two,
        SQUARE=square,
        LANES=lanes,
    )


def decode(payload: Tensor, scale: Tensor, *, dtype: torch.dtype, element: torch.dtype, power_of_two: bool) -> Tensor:
    """Return the values of a payload [rows, K]; scales are fp32 [] or [rows, 1]."""
    values = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    e4m3 = element == torch.float8_e4m3fn
    launch_rows(_decode, DECODED, as_stored(payload), scale, values, E4M3=e4m3, ELEMENT=ELEMENTS[dtype])
    return values


def launch_rows(kernel: Any, elements: int, first: Tensor, wide: Tensor, *others: Tensor, **constants: Any) -> None:
    """Launch kernel(first, wide, *others, length, rows, ..) on tensors [rows, K]; `wide` is [], [parts] or [rows, 1].

    A program has some rows of some columns, and each of its threads so many elements.
    """
    wide = wide.to(first.device).contiguous()
    rows, width, programs = tile_of_rows(first.shape, elements)
    constants |= {"BY_ROW": wide.ndim == 2, "ROWS": rows, "WIDTH": width}
    launch(kernel, programs, first, wide, *others, first.shape[1], first.shape[0], **constants)


def tile_of_rows(shape: torch.Size, elements: int) -> tuple[int, int, int]:
    """Return (rows, columns of a program whose threads take so many elements each; programs) for values [rows, K].

    Raises:
        OverflowError: rows longer than the kernels count.
    """
    width = min(max(triton.next_power_of_2(shape[1]), 16), WIDEST)
    rows = tile_of(elements, width)
    if rows * shape[1] > MOST_IN_A_TILE:
        raise OverflowError(f"{rows} rows of {shape[1]} elements, more than kernels written by hand count in a tile")
    return rows, width, triton.cdiv(shape[0], rows) * triton.cdiv(shape[1], width)


@triton.jit
def _encode(
    x: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    length: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, SQUARE, TILE)
    lane = tl.arange(0, LANES)[None, :]
    lanes, known = at[:, None] * length + lane, there[:, None] & (lane < length)
    values = tl.load(x + (first * length + lanes), mask=known, other=0.0).to(tl.float32)
    enc, dec = scales(largest_number(tl.abs(whole(values)), SQUARE), E4M3, POWER_OF_TWO)
    tl.store(scale + (first + at), dec, mask=there)
    tl.store(payload + (first * length + lanes), fp8.code(values, enc[:, None], E4M3), mask=known)


@triton.jit
def _encode_under(
    x: tl.tensor,
    amax: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    length: tl.tensor,
    rows: tl.tensor,
    E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BY_ROW: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row, column, there, lanes, known = rows_of(place(IN_PARTS), length, rows, ROWS, WIDTH)
    values = tl.load(x + (row.to(tl.int64) * length + column + lanes), mask=known, other=0.0).to(tl.float32)
    if BY_ROW:
        own = row + tl.arange(0, ROWS)
        enc, dec = scales(tl.load(amax + own, mask=there, other=0.0), E4M3, POWER_OF_TWO)
        tl.store(scale + own, dec, mask=there & (column == 0))
        enc = enc[:, None]
    else:
        wide = amax_of_parts(amax) if IN_PARTS else tl.load(amax)
        enc, dec = scales(wide, E4M3, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            tl.store(scale, dec)
    code = fp8.code(values, enc, E4M3)
    tl.store(payload + (row.to(tl.int64) * length + column + lanes), code, mask=known)


@triton.jit
def _decode(
    payload: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    length: tl.tensor,
    rows: tl.tensor,
    ELEMENT: tl.constexpr,
    E4M3: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row, column, there, lanes, known = rows_at(length, rows, ROWS, WIDTH)
    code = tl.load(payload + (row.to(tl.int64) * length + column + lanes), mask=known, other=0)
    dec = tl.load(scale + (row + tl.arange(0, ROWS)), mask=there, other=0.0)[:, None] if BY_ROW else tl.load(scale)
    value = rounded(fp8.value(code, E4M3) * dec, ELEMENT)
    tl.store(values + (row.to(tl.int64) * length + column + lanes), value, mask=known)


@triton.jit
def scales(amax: tl.tensor, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """Return (1 / scale, scale) for amaxes of tensors, rows or blocks."""
    enc = tl.minimum(tl.math.div_rn(448.0 if E4M3 else 57344.0, amax), FLT_MAX)
    enc = tl.where(amax == 0.0, 1.0, enc)
    if POWER_OF_TWO:
        enc = number_of(bits_of(enc) & INF_BITS)
    return enc, tl.math.div_rn(1.0, enc)


@triton.jit
def rows_at(length: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return `rows_of` the tile of this program."""
    return rows_of(tl.program_id(0), length, rows, ROWS, WIDTH)


@triton.jit
def rows_of(tile: tl.tensor, length: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return (first row, first column of a tile; which of its ROWS rows exist; its lanes; which of them exist).

    Lanes are counted from the first one.
    """
    across = tl.cdiv(length, WIDTH)
    group = tile // across
    row, column = group * ROWS, (tile - group * across) * WIDTH
    at, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    there = at < rows - row
    return row, column, there, at[:, None] * length + lane, there[:, None] & (lane < length - column)
