"""NVFP4: E2M1 elements, two a byte, in 16-blocks with E4M3 scales under one fp32 global scale.

    value        = q * scale * global_scale

    S            = 1 if amax_tensor == 0 else min(2688 / amax_tensor, FLT_MAX)          (2688 = 448 * 6)
    global_scale = 1 / S
    scale        = E4M3_RNE(clamp(min(amax_block * (S * fp32(1/6)), FLT_MAX), 0, 448))
    enc          = min(1 / (scale * global_scale), FLT_MAX)
    q            = E2M1_RNE(clamp(x * enc, -6, 6))

These are the formulas of TransformerEngine's kernels. The low nibble is the even column. A block that held an element
that is not finite gets the scale NaN and decodes to NaN; a block with scale 0 decodes to 0.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fsdp_hooks.torch_private import is_tracing
from qtensor.blocks import (
    FLT_MAX,
    finite,
    finite_amax,
    finite_magnitude,
    fp32,
    held_broken,
    nearest,
    quotient,
    scatter_blocks,
    tile,
)
from qtensor.formats import PartSpec, register
from qtensor.products import Route, register_route, swizzled
from qtensor.recipes import Recipe, check_choice
from qtensor.rounding import onto_grid
from qtensor.tensor import QuantizedTensor

BLOCK = 16
LARGEST = 6.0
EPS, SMALLEST_NORMAL = 0.5, 1.0  # E2M1 has one mantissa bit, and 0.5 as its only subnormal
LARGEST_SCALE, LARGEST_SCALE_CODE = 448.0, 126
SIXTH = fp32(1 / 6)  # fp32(1/6), exactly representable
assert sys.byteorder == "little", "packing counts on it"


@dataclass(frozen=True, kw_only=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 4-bit elements in blocks of 16 with E4M3 scales and one fp32 global scale.

    Args:
        blocks: "row" (1x16 along K) or "square" (16x16).
        activations: None, or "dynamic": a linear layer quantizes its input too, in 1x16 blocks under a global scale a
            row.

    Raises:
        ValueError: for any other value.
    """

    blocks: str = "row"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "blocks", ("row", "square"))


class _NVFP4:
    def parts(self, recipe: NVFP4BlockScaling) -> tuple[PartSpec, ...]:
        return (
            PartSpec("payload", torch.uint8, block=2, codes=torch.float4_e2m1fn_x2),
            PartSpec("scale", torch.float8_e4m3fn, block=BLOCK),
            PartSpec("global_scale", torch.float32, per_row=False),
        )

    def shared_amax(self, x: Tensor, recipe: NVFP4BlockScaling) -> Tensor | None:
        return finite_amax(x)

    def encode(self, x: Tensor, recipe: NVFP4BlockScaling, amax: Tensor | None) -> dict[str, Tensor]:
        return self.encode_with(x, recipe, self.quantizer(x, recipe, amax))

    def quantizer(self, x: Tensor, recipe: NVFP4BlockScaling, amax: Tensor | None) -> dict[str, Tensor]:
        assert amax is not None
        enc = quotient(LARGEST_SCALE * LARGEST, amax).clamp(max=FLT_MAX)
        enc = torch.where(amax == 0, torch.ones_like(amax), enc)
        return _under_global_scale(x, recipe, enc, quotient(1.0, enc))

    def encode_with(
        self, x: Tensor, recipe: NVFP4BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        scale = quantizer["scale"]
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, BLOCK)  # [.., K // 16, 16]
        whole = finite(blocks)
        broken = held_broken(whole)
        if recipe.blocks == "square":
            broken = scatter_blocks(broken, BLOCK)
        scaled = torch.where(whole, (blocks * enc.unsqueeze(-1)).clamp(-LARGEST, LARGEST), 0.0)
        codes = _nearest_code(onto_grid(scaled, EPS, SMALLEST_NORMAL))  # [.., K // 16, 16]
        marked = torch.where(broken > 0, math.nan, scale.to(torch.float32)).to(torch.float8_e4m3fn)
        payload = _packed(codes).reshape(*x.shape[:-1], x.shape[-1] // 2)
        return {"payload": payload, "scale": marked, "global_scale": quantizer["global_scale"]}

    def grid(self, recipe: NVFP4BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        dec = _dec(quantizer)
        return quotient(1.0, dec).clamp(max=FLT_MAX), dec

    def snap(self, scaled: Tensor, recipe: NVFP4BlockScaling) -> Tensor:
        return nearest(scaled, LARGEST, EPS, SMALLEST_NORMAL)

    def candidates(
        self, x: Tensor, recipe: NVFP4BlockScaling, amax: Tensor | None, *, elementwise: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """The positive E4M3 block scales under the global scale of the amax, up to where the whole block becomes 0.

        The elements of 2d up to 6d are elements of d, too, and the next is 8d. So where nothing is above 7d, nothing
        comes nearer to its value under 2d than under d. With `elementwise` the highest code is therefore 7 above the
        lowest like that: 8 codes are a factor of 2, except that subnormal codes, up to 15, may have no half.
        """
        if x.numel() == 0:
            return
        block_amax, global_scale = _block_amax(x, recipe), self.quantizer(x, recipe, amax)["global_scale"]
        codes = torch.arange(1, LARGEST_SCALE_CODE + 1, dtype=torch.uint8, device=x.device)
        dec = _dec({"scale": codes.view(torch.float8_e4m3fn), "global_scale": global_scale})  # [126], ascending
        if elementwise:
            high = (torch.searchsorted(dec * 7.0, block_amax) + 1 + 7).clamp(min=15)
        else:
            # Half of the smallest element, 0.25, is rounded to 0; the slack is more than what enc is rounded by.
            high = torch.searchsorted(dec * (0.25 * (1 - 2.0**-20)), block_amax) + 1
        high = high.clamp(max=LARGEST_SCALE_CODE)
        for below in range(int(high.amax())):
            code = (high - below).clamp(min=1).to(torch.uint8)
            yield {"scale": code.view(torch.float8_e4m3fn), "global_scale": global_scale}

    def adopt(self, x: Tensor, recipe: NVFP4BlockScaling, scale: Tensor) -> dict[str, Tensor]:
        enc = quotient(1.0, scale).clamp(max=FLT_MAX)
        return self.encode_with(x, recipe, _under_global_scale(x, recipe, enc, scale.clone()))

    def decode(self, parts: Mapping[str, Tensor], recipe: NVFP4BlockScaling) -> Tensor:
        values = _value(_unpacked(parts["payload"]))  # [.., K]
        return (tile(values, BLOCK) * _dec(parts).unsqueeze(-1)).reshape(values.shape)


def _dec(scales: Mapping[str, Tensor]) -> Tensor:
    """[.., K // 16]: what one unit of each block's elements is worth."""
    return scales["scale"].float() * scales["global_scale"]


def _under_global_scale(x: Tensor, recipe: NVFP4BlockScaling, enc: Tensor, global_scale: Tensor) -> dict[str, Tensor]:
    """The quantizer of x under a global scale (`enc` is what it is the reciprocal of, both [] fp32)."""
    scale = (_block_amax(x, recipe) * (enc * SIXTH)).clamp(max=LARGEST_SCALE)
    return {"scale": scale.to(torch.float8_e4m3fn), "global_scale": global_scale}


def _block_amax(x: Tensor, recipe: NVFP4BlockScaling) -> Tensor:
    """[.., K // 16]: largest finite |x| of each block, that of a square one in each of its rows."""
    amax = finite_magnitude(tile(x, BLOCK)).amax(dim=-1)
    return scatter_blocks(amax, BLOCK) if recipe.blocks == "square" else amax


def _nearest_code(scaled: Tensor) -> Tensor:
    """E2M1 code (uint8) nearest to each value of at most 6 in magnitude, ties to the even code.

    From 1 on the code is the upper bits of the fp32 number, rounded there, less the exponent's bias; below it counts
    halves, which are the last bits of a sum with 2^22.
    """
    magnitude = scaled.abs()
    bits = magnitude.view(torch.int32)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    halves = (magnitude + 2.0**22).view(torch.int32) - 0x4A800000
    sign = (scaled.view(torch.int32) >> 28) & 8
    return (torch.where(magnitude < SMALLEST_NORMAL, halves, normal) | sign).to(torch.uint8)


def _value(codes: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes, by the same relation of their bits."""
    codes = codes.to(torch.int32)
    magnitude = codes & 7
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude.to(torch.float32) * 0.5, normal)
    return torch.where(codes > 7, -value, value)


def _packed(codes: Tensor) -> Tensor:
    """[.., 16] codes, one a byte -> [.., 8], eight at a time: in a little-endian word the first is the lowest."""
    words = codes.contiguous().view(torch.int64)
    words = (words | (words >> 4)) & 0x00FF00FF00FF00FF
    words = (words | (words >> 8)) & 0x0000FFFF0000FFFF
    return (words | (words >> 16)).to(torch.int32).view(torch.uint8)


def _unpacked(payload: Tensor) -> Tensor:
    """The inverse of `_packed`."""
    # rows are multiples of 8 bytes, but a buffer that holds other things may begin anywhere (a tracer can not ask)
    if not is_tracing() and payload.storage_offset() % 4:
        payload = payload.clone()
    words = payload.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words = (words | (words << 16)) & 0x0000FFFF0000FFFF
    words = (words | (words << 8)) & 0x00FF00FF00FF00FF
    codes = ((words | (words << 4)) & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)
    return codes.view(*payload.shape[:-1], payload.shape[-1] * 2)


class NVFP4Tensor(QuantizedTensor):
    """An NVFP4 quantized tensor: `payload` uint8 [.., K // 2], `scale` E4M3 [.., K // 16], `global_scale` fp32 []."""


def _multiply(x: Mapping[str, Tensor], w: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The hardware's product of elements and block scales in fp32, the global scales applied to its rows and columns.

    (The hardware takes one global scale for all of an operand: not what quantized rows or a gathered weight have.)
    """
    y = scaled_mm(
        x["payload"].view(torch.float4_e2m1fn_x2),  # [M, K // 2]
        w["payload"].view(torch.float4_e2m1fn_x2).t(),  # [K // 2, N]
        swizzled(x["scale"]),
        ScalingType.BlockWise1x16,
        swizzled(w["scale"]),
        ScalingType.BlockWise1x16,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.float32,
    )
    return (y * x["global_scale"] * w["global_scale"].reshape(1, -1)).to(dtype)  # [M, 1] and [1, 1] or [1, N]


register(NVFP4BlockScaling, _NVFP4(), NVFP4Tensor)
# K counts in packed bytes there, which must come in sixteens.
register_route(NVFP4BlockScaling, Route(multiply=_multiply, capabilities=((10, 0), (11, 0), (12, 0)), columns=32))
