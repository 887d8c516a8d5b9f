"""MXFP8: 32-element blocks, each with a power-of-two scale stored as an E8M0 code; value = q * 2^(code - 127).

    v    = amax * fp32(1 / max_q)                      (amax over the finite elements of a 1x32 or 32x32 block)
    code = exponent of v rounded UP to a power of two   ("floor": the OCP rule floor(log2 amax) - emax, saturating)
    q    = RNE(clamp(x * 2^(127 - code), -max_q, max_q))

Rounding up never saturates an element; it equals TransformerEngine's kernels and torchao's RCEIL mode. Code 0 means
2^-127. Code 255 means NaN and marks a block with an element that is not finite; the whole block decodes to NaN.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import (  # type: ignore[attr-defined] # torch's stubs lack grouped products
    ScalingType,
    SwizzleType,
    scaled_grouped_mm,
    scaled_mm,
)

from qtensor.numerics.triton_kernels import ByHand
from qtensor.products.dynamic import swizzle
from qtensor.spec.blocks import BlockFacts, block_amax, finite, fp32, marked_blocks, marks, tile
from qtensor.spec.codecs import e8m0, fp8
from qtensor.spec.codecs.fp8 import ELEMENTS
from qtensor.spec.format import Format, Grain, GroupedRoute, PartSpec, Route
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

BLOCK = 32
# exponent of the largest element's power of two: 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15
ELEMENT_EMAX = {"e4m3": 8, "e5m2": 15}
# fp32(1 / max_q), exactly representable, so that the product is rounded once
RECIPROCAL_MAX = {name: fp32(1 / largest) for name, (_, largest) in ELEMENTS.items()}


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: float8 elements in blocks of 32 with E8M0 scales (OCP Microscaling 1.0).

    Args:
        element: "e4m3" or "e5m2".
        blocks: "row" (1x32 along K) or "square" (32x32; the same bytes serve the transposed product).
        scale_rounding: "up" (never saturates) or "floor" (the OCP specification's rule).
        activations: None, or "dynamic": a linear layer quantizes its input too, in 1x32 blocks.
        gradients: None, or with activations="dynamic" the element of gradients, "e4m3", as TransformerEngine has it:
            both products of backward are then low-precision ones, see qtensor/products/gradients.py.

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), MXFP8BlockScaling())
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 64), 'scale': (4, 2)}
        ```
    """

    gradient_elements: ClassVar[tuple[str, ...]] = ("e4m3",)

    element: str = "e4m3"
    blocks: str = "row"
    scale_rounding: str = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "element", tuple(ELEMENTS))
        check_choice(self, "blocks", ("row", "square"))
        check_choice(self, "scale_rounding", ("up", "floor"))

    @property
    def of_backward(self) -> Recipe:
        """Scales rounded up, always: "floor" would clamp finite gradients, and values of square blocks cut along N."""
        return dataclasses.replace(super().of_backward, scale_rounding="up")  # type: ignore[call-arg]


class _MXFP8(Format):
    judges = True
    exact_in_bf16 = True

    def parts(self, recipe: MXFP8BlockScaling) -> tuple[PartSpec, ...]:
        dtype, _ = ELEMENTS[recipe.element]
        return PartSpec("payload", dtype), PartSpec("scale", torch.uint8, block=BLOCK, codes=torch.float8_e8m0fnu)

    def quantizer(
        self, x: Tensor, recipe: MXFP8BlockScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        own = block_amax(x, BLOCK, square=recipe.blocks == "square") if blocks is None else blocks.amax
        if recipe.scale_rounding == "up":
            code = e8m0.code_up(own * RECIPROCAL_MAX[recipe.element])
        else:
            code = e8m0.code_floor(own, ELEMENT_EMAX[recipe.element])
        return {"scale": code.to(torch.uint8), **marks(blocks)}

    def grid(self, recipe: MXFP8BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return e8m0.grid(quantizer["scale"])

    def encode_with(
        self, x: Tensor, recipe: MXFP8BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, BLOCK)  # [.., K // 32, 32]
        whole = finite(blocks)
        broken = marked_blocks(quantizer, whole, BLOCK, square=recipe.blocks == "square")
        payload = fp8.encode(blocks * enc.unsqueeze(-1), whole, recipe.element).reshape(x.shape)
        return {"payload": payload, "scale": e8m0.marked(quantizer["scale"], broken)}

    def asked(self, parts: Mapping[str, Tensor], recipe: MXFP8BlockScaling, name: str, largest: Tensor) -> Tensor:
        up = recipe.scale_rounding == "up"
        least = ELEMENTS[recipe.element][1] / 2 if up else 2.0 ** ELEMENT_EMAX[recipe.element]
        return e8m0.asked(parts[name], largest, least)

    def snap(self, scaled: Tensor, recipe: MXFP8BlockScaling) -> Tensor:
        return fp8.snapped(scaled, recipe.element)

    def grain(self, recipe: MXFP8BlockScaling) -> Grain:
        # elements that saturate stand for values up to twice their power of two
        saturates = recipe.element == "e4m3" and recipe.scale_rounding == "floor"
        bits, least = fp8.GRAIN[recipe.element]
        return Grain(bits - saturates, least)

    def by_hand(self, recipe: MXFP8BlockScaling) -> ByHand:
        dtype, _ = ELEMENTS[recipe.element]
        square = recipe.blocks == "square"
        return ByHand("mxfp8", {"element": dtype, "square": square, "scale_rounding": recipe.scale_rounding})

    def decode(self, parts: Mapping[str, Tensor], recipe: MXFP8BlockScaling) -> Tensor:
        scale = e8m0.decode(parts["scale"])  # [.., K // 32]
        return tile(parts["payload"].float(), BLOCK).mul_(scale.unsqueeze(-1)).reshape(parts["payload"].shape)


class MXFP8Tensor(QuantizedTensor):
    """An MXFP8 quantized tensor: `payload` float8 [.., K]; `scale` uint8 E8M0 codes [.., K // 32].

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), MXFP8BlockScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('MXFP8Tensor', torch.float8_e4m3fn, torch.uint8)
        ```
    """


def _multiply(x: Mapping[str, Tensor], w: Mapping[str, Tensor], dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """The hardware's product. It reads square blocks as row blocks, since their scales are stored for every row."""
    x_scale, w_scale = (swizzle(parts["scale"]).view(torch.float8_e8m0fnu) for parts in (x, w))
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


def _multiply_rows(
    x: Mapping[str, Tensor], w: Mapping[str, Tensor], ends: Tensor, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    """The hardware's grouped product: tokens [T, K] by the matrix [N, K] of their group."""
    from qtensor.products.grouped.scales import swizzle_row_groups, swizzle_stack

    return _multiply_groups(
        x["payload"].contiguous(),  # [T, K]
        w["payload"].transpose(-2, -1),  # [E, K, N]
        swizzle_row_groups(x["scale"], ends),
        swizzle_stack(w["scale"]),
        ends,
        dtype,
    )


def _multiply_columns(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], ends: Tensor, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    """The same along tokens: columns [M, W] by [L, W], groups of whole blocks."""
    from qtensor.products.grouped.scales import swizzle_column_groups

    return _multiply_groups(
        a["payload"],  # [M, W]
        b["payload"].t(),  # [W, L]
        swizzle_column_groups(a["scale"], ends // BLOCK),
        swizzle_column_groups(b["scale"], ends // BLOCK),
        ends,
        dtype,
    )


def _multiply_groups(  # noqa: PLR0913, PLR0917 - two operands, their scales, and how
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    y: Tensor = scaled_grouped_mm(
        a,
        b,
        a_scale.view(torch.float8_e8m0fnu),
        ScalingType.BlockWise1x32,
        b_scale.view(torch.float8_e8m0fnu),
        ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        offs=ends,
        output_dtype=dtype,
    )
    return y


GROUPED = GroupedRoute(rows=_multiply_rows, columns=_multiply_columns, capabilities=((10, 0),), multiple=32)
ROUTE = Route(multiply=_multiply, capabilities=((10, 0), (11, 0), (12, 0)), columns=32, grouped=GROUPED)
register(
    MXFP8BlockScaling,
    _MXFP8(),
    MXFP8Tensor,
    names={"mxfp8": MXFP8BlockScaling(), "mxfp8-square": MXFP8BlockScaling(blocks="square")},
    route=ROUTE,
)
