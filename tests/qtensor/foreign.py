"""A format of somebody else's: blocks of 128, elements that torch has no dtype for, scales as codes or in bf16.

Under "tail" the last block of a row may be smaller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.spec import registry as formats
from qtensor.spec.blocks import finite_magnitude, tile
from qtensor.spec.format import Format, PartSpec
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

BLOCK = 128
SCALES = {"bytes": torch.uint8, "bf16": torch.bfloat16, "tail": torch.uint8}


def _power_of_two(code: Tensor) -> Tensor:
    return (code.clamp(1, 254) << 23).view(torch.float32)


def _blocks(x: Tensor) -> Tensor:
    """[.., K] -> [.., blocks, 128], 0 behind K."""
    return tile(torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)), BLOCK)


def _row(blocks: Tensor, columns: int) -> Tensor:
    """The inverse."""
    return blocks.flatten(-2)[..., :columns].contiguous()


class ForeignFormat(Format):
    """element = round(x / scale) + 128 as uint8, 0: NaN; scale = 2^k, stored as k + 127 or as a bf16 number."""

    def parts(self, recipe: Any) -> tuple[PartSpec, ...]:
        ragged = recipe.scales == "tail"
        return PartSpec("payload", torch.uint8), PartSpec("spread", SCALES[recipe.scales], block=BLOCK, ragged=ragged)

    def quantizer(self, x: Tensor, recipe: Any, amax: Tensor | None, blocks: Any = None) -> dict[str, Tensor]:
        bits = finite_magnitude(_blocks(x)).amax(-1).view(torch.int32)
        code = (((bits >> 23) & 0xFF) + 1 - 6).clamp(1, 254)  # amax / scale < 2^7
        return {"spread": _power_of_two(code).bfloat16() if recipe.scales == "bf16" else code.to(torch.uint8)}

    def grid(self, recipe: Any, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        dec = quantizer["spread"]
        dec = dec.float() if recipe.scales == "bf16" else _power_of_two(dec.to(torch.int32))
        return 1 / dec, dec

    def encode_with(
        self, x: Tensor, recipe: Any, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        elements = (_blocks(x) * enc.unsqueeze(-1)).round().clamp(-127, 127) + 128
        elements = torch.where(_blocks(x).abs() < math.inf, elements, 0.0)
        return {"payload": _row(elements.to(torch.uint8), x.shape[-1]), **quantizer}

    def snap(self, scaled: Tensor, recipe: Any) -> Tensor:
        return scaled.round().clamp(-127, 127)

    def decode(self, parts: Mapping[str, Tensor], recipe: Any) -> Tensor:
        payload = _blocks(parts["payload"])
        values = (payload.float() - 128) * self.grid(recipe, parts)[1].unsqueeze(-1)
        return _row(torch.where(payload == 0, math.nan, values), parts["payload"].shape[-1])


class ForeignTensor(QuantizedTensor):
    """payload uint8 [.., K]; spread uint8 or bf16 [.., K // 128]."""


@contextmanager
def foreign_format() -> Iterator[Any]:
    """The recipe type, known to the library inside."""

    @dataclass(frozen=True, kw_only=True, repr=False)
    class Foreign128(Recipe):
        scales: str = "bytes"

        def __post_init__(self) -> None:
            super().__post_init__()
            check_choice(self, "scales", tuple(SCALES))

    register(Foreign128, ForeignFormat(), ForeignTensor)
    try:
        yield Foreign128
    finally:
        forget(Foreign128)


def forget(recipe_type: Any) -> None:
    """Undo `register`."""
    del formats._registered[recipe_type], Recipe.registry[recipe_type.__name__]
    for cached in (specs_of, formats.block_multiple, formats.column_multiple):
        assert isinstance(cached, functools._lru_cache_wrapper)
        cached.cache_clear()
