"""Block scales of groups, as tensor cores read them: each group swizzled by itself, in one tensor.

Tiles are those of `swizzle` (../dynamic.py): 128 rows by 4 blocks, 512 bytes. Of a group they stand together, tile row
by tile row, so a group begins with a tile of its own:

    groups along rows       group e begins at the row sum of round_up(size, 128) of those before it
    groups along columns    group e begins at the byte round_up(M, 128) * sum of round_up(blocks, 4) of those before it

These are the layouts that torch's scaled_grouped_mm asks for (aten/src/ATen/native/cuda/GroupedBlas.cpp, and the
kernels of FBGEMM behind it). Sizes are known to the device alone, so there is as much room as any sizes may need.
"""

import torch
from torch import Tensor

from qtensor.products.dynamic import swizzle
from qtensor.products.grouped.layout import places, spread

TILE = (128, 4)  # rows, blocks
TILE_BYTES = 512


def swizzle_stack(scale: Tensor) -> Tensor:
    """Return scales of a stack of experts, [E, N, blocks], as [E, bytes]."""
    experts, rows, blocks = scale.shape
    padded = torch.nn.functional.pad(scale, (0, 0, 0, -rows % TILE[0]))  # so that no tile spans two experts
    return swizzle(padded.reshape(experts * padded.shape[1], blocks)).reshape(experts, -1)


def swizzle_row_groups(scale: Tensor, ends: Tensor) -> Tensor:
    """Return scales of grouped rows, [T, blocks] uint8, as [rows, blocks padded]."""
    at = places(ends, scale.shape[0], TILE[0], least=0)
    flat = swizzle(spread(scale, at))
    return flat.reshape(at.source.shape[0], -1)


def swizzle_column_groups(scale: Tensor, ends: Tensor) -> Tensor:
    """Return scales of groups along columns, [M, blocks] uint8, the ends in blocks, as [M padded, blocks padded]."""
    blocks = scale.shape[1]
    at = places(ends, blocks, TILE[1], least=0)
    padded = spread(scale.t(), at).t()
    tiles = swizzle(padded).reshape(-1, at.source.shape[0] // TILE[1], TILE_BYTES)  # [tile rows, tiles, bytes]
    high, wide = tiles.shape[:2]
    # where the tiles of a group begin, and how many it has in a row
    stop = torch.cat([at.ends // TILE[1], at.ends.new_full((1,), wide)])
    start = torch.cat([stop.new_zeros(1), stop[:-1]])
    group = at.owner[:: TILE[1]]
    begin, count = start[group], (stop - start)[group]  # [tiles]
    column = torch.arange(wide, dtype=torch.int32, device=scale.device)
    row = torch.arange(high, dtype=torch.int32, device=scale.device).unsqueeze(1)
    to = begin * high + row * count + (column - begin)  # [tile rows, tiles]
    ordered = torch.empty_like(tiles).view(-1, TILE_BYTES)
    ordered[to.reshape(-1).long()] = tiles.reshape(-1, TILE_BYTES)
    return ordered.reshape(high * TILE[0], wide * TILE[1])
