"""MXFP8: 32-element blocks, each with a power-of-two scale stored as an E8M0 code; value = q * 2^(code - 127).

    v    = amax * fp32(1 / max_q)                      (amax over the finite elements of a 1x32 or 32x32 block)
    code = exponent of v rounded UP to a power of two   ("floor": the OCP rule floor(log2 amax) - emax, saturating)
    q    = RNE(clamp(x * 2^(127 - code), -max_q, max_q))

Rounding up never saturates an element; it equals TransformerEngine's kernels and torchao's RCEIL mode. Code 0 means
2^-127; code 255 means NaN and marks a block that held an element that is not finite: the whole block decodes to NaN.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from qtensor.blocks import FLT_MAX, MULTIPLES, finite, finite_magnitude, fp32, held_broken, scatter_blocks, tile
from qtensor.float8 import FLOAT8_ELEMENTS, snapped
from qtensor.formats import PartSpec, register
from qtensor.products import Route, register_route, swizzled
from qtensor.recipes import Recipe, check_choice
from qtensor.rounding import onto_grid
from qtensor.tensor import QuantizedTensor

BLOCK = 32
NAN_CODE = 255
SMALLEST_BITS = 0x00400000  # 2^-127, the one scale that is subnormal in fp32
# exponent of the largest element's power of two: 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15
ELEMENT_EMAX = {"e4m3": 8, "e5m2": 15}
# fp32(1 / max_q), exactly representable, so that the product is rounded once
RECIPROCAL_MAX = {name: fp32(1 / largest) for name, (_, largest) in FLOAT8_ELEMENTS.items()}


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: float8 elements in blocks of 32 with E8M0 scales (OCP Microscaling 1.0).

    Args:
        element: "e4m3" or "e5m2".
        blocks: "row" (1x32 along K) or "square" (32x32; the same bytes serve the transposed product).
        scale_rounding: "up" (never saturates) or "floor" (the OCP specification's rule).
        activations: None, or "dynamic": a linear layer quantizes its input too, in 1x32 blocks.

    Raises:
        ValueError: for any other value.
    """

    element: str = "e4m3"
    blocks: str = "row"
    scale_rounding: str = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "element", tuple(FLOAT8_ELEMENTS))
        check_choice(self, "blocks", ("row", "square"))
        check_choice(self, "scale_rounding", ("up", "floor"))


class _MXFP8:
    def parts(self, recipe: MXFP8BlockScaling) -> tuple[PartSpec, ...]:
        dtype, _ = FLOAT8_ELEMENTS[recipe.element]
        return PartSpec("payload", dtype), PartSpec("scale", torch.uint8, block=BLOCK, codes=torch.float8_e8m0fnu)

    def shared_amax(self, x: Tensor, recipe: MXFP8BlockScaling) -> Tensor | None:
        return None

    def encode(self, x: Tensor, recipe: MXFP8BlockScaling, amax: Tensor | None) -> dict[str, Tensor]:
        return self.encode_with(x, recipe, self.quantizer(x, recipe, amax))

    def quantizer(self, x: Tensor, recipe: MXFP8BlockScaling, amax: Tensor | None) -> dict[str, Tensor]:
        return {"scale": _code(_block_amax(x, recipe), recipe).to(torch.uint8)}

    def encode_with(
        self, x: Tensor, recipe: MXFP8BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        dtype, largest = FLOAT8_ELEMENTS[recipe.element]
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, BLOCK)  # [.., K // 32, 32]
        whole = finite(blocks)
        broken = held_broken(whole)
        if recipe.blocks == "square":
            broken = scatter_blocks(broken, BLOCK)
        element = torch.finfo(dtype)
        scaled = (blocks * enc.unsqueeze(-1)).clamp(-largest, largest)
        elements = onto_grid(scaled, element.eps, element.smallest_normal)
        payload = torch.where(whole, elements, math.nan).to(dtype).reshape(x.shape)
        code = quantizer["scale"].to(torch.int32)
        return {"payload": payload, "scale": torch.where(broken > 0, NAN_CODE, code).to(torch.uint8)}

    def grid(self, recipe: MXFP8BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        code = quantizer["scale"].to(torch.int32)
        return _power_of_two(254 - code), _power_of_two(code)

    def snap(self, scaled: Tensor, recipe: MXFP8BlockScaling) -> Tensor:
        return snapped(scaled, recipe.element)

    def candidates(
        self, x: Tensor, recipe: MXFP8BlockScaling, amax: Tensor | None, *, elementwise: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """The codes that MULTIPLES of a block's amax have: all in between, for no multiple is over 1.4 * the one below.

        The elements of 2d up to the largest of d are elements of d, too. So where nothing saturates under d, nothing
        comes nearer to its value under 2d: with `elementwise`, the lowest code that does not saturate is the highest.
        """
        if x.numel() == 0:
            return
        block_amax = _block_amax(x, recipe)
        high = _code((block_amax * MULTIPLES[0]).clamp(max=FLT_MAX), recipe)
        low = _code(block_amax * MULTIPLES[-1], recipe)
        if elementwise:
            high = torch.maximum(torch.minimum(high, _code_up(block_amax, recipe)), low)
        for below in range(int((high - low).amax()) + 1):
            yield {"scale": torch.maximum(high - below, low).to(torch.uint8)}

    def adopt(self, x: Tensor, recipe: MXFP8BlockScaling, scale: Tensor) -> dict[str, Tensor]:
        raise AssertionError("MXFP8 has no tensor-wide scale")

    def decode(self, parts: Mapping[str, Tensor], recipe: MXFP8BlockScaling) -> Tensor:
        code = parts["scale"].to(torch.int32)
        scale = _power_of_two(code)
        scale = torch.where(code == NAN_CODE, math.nan, scale)  # [.., K // 32]
        values = tile(parts["payload"].float(), BLOCK).mul_(scale.unsqueeze(-1))
        return values.reshape(parts["payload"].shape)


def _block_amax(x: Tensor, recipe: MXFP8BlockScaling) -> Tensor:
    """[.., K // 32]: largest finite |x| of each block, that of a square one in each of its rows."""
    amax = finite_magnitude(tile(x, BLOCK)).amax(dim=-1)
    return scatter_blocks(amax, BLOCK) if recipe.blocks == "square" else amax


def _code(amax: Tensor, recipe: MXFP8BlockScaling) -> Tensor:
    """The code (int32) that the recipe gives to blocks of this amax."""
    return _code_up(amax, recipe) if recipe.scale_rounding == "up" else _code_floor(amax, recipe)


def _code_up(amax: Tensor, recipe: MXFP8BlockScaling) -> Tensor:
    """Exponent code (int32) of amax / max_q rounded up to a power of two."""
    bits = (amax * RECIPROCAL_MAX[recipe.element]).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= SMALLEST_BITS))
    return exponent + up.to(torch.int32)


def _code_floor(amax: Tensor, recipe: MXFP8BlockScaling) -> Tensor:
    """floor(log2(amax)) - emax as a code (int32), at least 0."""
    exponent = (amax.view(torch.int32) >> 23) & 0xFF
    return (exponent - ELEMENT_EMAX[recipe.element]).clamp(min=0)


def _power_of_two(code: Tensor) -> Tensor:
    """2^(code - 127) for int32 codes 0..254, built from its bits."""
    return torch.where(code == 0, SMALLEST_BITS, code << 23).view(torch.float32)


class MXFP8Tensor(QuantizedTensor):
    """An MXFP8 quantized tensor: `payload` float8 [.., K]; `scale` uint8 E8M0 codes [.., K // 32]."""


def _multiply(x: Mapping[str, Tensor], w: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The hardware's product. Square blocks are stored a row at a time, so they are row blocks to it."""
    x_scale, w_scale = (swizzled(parts["scale"]).view(torch.float8_e8m0fnu) for parts in (x, w))
    return scaled_mm(
        x["payload"],  # [M, K]
        w["payload"].t(),  # [K, N]
        x_scale,
        ScalingType.BlockWise1x32,
        w_scale,
        ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=dtype,
    )


register(MXFP8BlockScaling, _MXFP8(), MXFP8Tensor)
register_route(MXFP8BlockScaling, Route(multiply=_multiply, capabilities=((10, 0), (11, 0), (12, 0)), columns=32))
