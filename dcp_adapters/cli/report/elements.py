"""Elements at the end of their format's range, found in the payload, and clipped ones, found with dense values.

    at the largest     codes of the largest finite magnitude (448 for E4M3, 57344 for E5M2, 6 for E2M1)
    saturated          those, less one for each scale that has any: the element that a scale was made for belongs there.
                       The others were rounded or clipped to the largest value, and the payload does not tell which: an
                       upper bound of what was clipped.
    clipped            |dense value| > largest * scale by more than half a step, so that rounding does not explain it
    NaN codes          codes of the payload that are NaN or infinite (E2M1 has none)

INT4 is not counted: its scales put the largest element of each group at the end of the range or just beyond.

A scale that is stored several times counts once: square blocks store theirs for every row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcp_adapters.cli.report.tiles import Tile, decoded_parts, matrix_shape
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import row_multiple, specs_of


class _ElementType(NamedTuple):
    """mask: the bits of a code's magnitude. largest: the code of the largest magnitude. fill: a byte of such codes.

    slack: the largest value plus half the step before it, over the largest value.
    """

    mask: int
    largest: int
    fill: int
    slack: float


_TYPES: dict[torch.dtype | None, _ElementType] = {
    torch.float8_e4m3fn: _ElementType(0x7F, 0x7E, 0x7E, 464 / 448),
    torch.float8_e5m2: _ElementType(0x7F, 0x7B, 0x7B, 61440 / 57344),
    torch.float4_e2m1fn_x2: _ElementType(0x07, 0x07, 0x77, 7 / 6),  # two E2M1 codes a byte
}


def counts_elements(recipe: Recipe) -> bool:
    """Return whether the elements of a format are of a type that is counted here."""
    payload, *others = specs_of(recipe)
    return payload.numbers in _TYPES and bool(others)


@dataclass
class ElementCounts:
    """Counts over the pieces of one quantized tensor of a shape [.., N, K]."""

    recipe: Recipe
    shape: tuple[int, ...]
    at_largest: int = 0
    nan_codes: int = 0
    clipped: int = 0

    def __post_init__(self) -> None:
        payload, scale = specs_of(self.recipe)[:2]
        self._type = _TYPES[payload.numbers]
        self._packed = payload.block == 2
        self._block = scale.block if scale.per_row else 0
        self.rows, columns = matrix_shape(self.shape)
        # square blocks that have such an element: they end with each matrix, and so may lie in several pieces
        self._group, self._height = row_multiple(self.recipe), self.shape[-2] if len(self.shape) > 1 else 1
        self._taken = 0
        groups = self.rows // max(self._height, 1) * -(-self._height // self._group) if self._group > 1 else 0
        blocks = -(-columns // self._block) if self._block else 0
        self._squares_taken = torch.zeros((groups, blocks), dtype=torch.bool, device="cpu")
        # one scale a row or one for all: their elements may lie in several pieces
        self._rows_taken = torch.zeros(self.rows if scale.per_row else 1, dtype=torch.bool, device="cpu")

    @property
    def saturated(self) -> int:
        """At the largest, beyond one for each scale."""
        return self.at_largest - self._taken - int(self._squares_taken.sum()) - int(self._rows_taken.sum())

    def add(self, tile: Tile, reference: Tensor | None) -> None:
        """Add one piece, with the dense values of that piece if there are some."""
        codes = tile.parts["payload"].view(torch.uint8)
        if self._packed:
            codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
        magnitudes = codes & self._type.mask
        largest = magnitudes == self._type.largest  # [rows, K]
        self.at_largest += int(largest.sum())
        if not self._packed:
            self.nan_codes += int((magnitudes > self._type.largest).sum())
        if self._block:
            # the last block of a row may hold fewer elements
            padded = F.pad(largest, (0, -largest.shape[-1] % self._block))
            blocks = padded.unflatten(-1, (-1, self._block)).any(-1)  # [rows, blocks]
            if self._group > 1:
                self._take_squares(blocks.cpu(), tile)
            else:
                self._taken += int(blocks.sum())
        elif len(self._rows_taken) == self.rows > 1:
            self._rows_taken[tile.rows] |= largest.any(-1)
        else:
            self._rows_taken |= largest.any()
        if reference is not None:
            # decoding a payload of largest elements gives the limit of every element, whatever scales the format has
            payload = torch.full_like(tile.parts["payload"].view(torch.uint8), self._type.fill)
            parts = {**tile.parts, "payload": payload.view(tile.parts["payload"].dtype)}
            limit = decoded_parts(parts, self.recipe).double().mul_(self._type.slack)
            self.clipped += int((reference.double().abs() > limit).sum())  # under a NaN scale: none

    def _take_squares(self, blocks: Tensor, tile: Tile) -> None:
        """Mark squares that have an element at the largest; `blocks`: bool [rows of the piece, blocks], which do."""
        rows = torch.arange(tile.rows.start, tile.rows.start + len(blocks), dtype=torch.int64, device="cpu")
        of_matrix = rows // self._height * -(-self._height // self._group)
        first = tile.columns.start // self._block
        places = (of_matrix + rows % self._height // self._group, slice(first, first + blocks.shape[1]))
        found = torch.zeros_like(self._squares_taken[:, places[1]], dtype=torch.int32)
        found.index_add_(0, places[0], blocks.to(torch.int32))
        self._squares_taken[:, places[1]] |= found > 0
