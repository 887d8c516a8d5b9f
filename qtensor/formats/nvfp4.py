"""NVFP4: E2M1 elements, two a byte, in 16-blocks with E4M3 scales under one fp32 global scale.

    value        = q * scale * global_scale

    S            = 1 if amax_tensor == 0 else min(2688 / amax_tensor, FLT_MAX)          (2688 = 448 * 6)
    global_scale = 1 / S
    scale        = E4M3_RNE(clamp(min(amax_block * (S * fp32(1/6)), FLT_MAX), 0, 448))
    enc          = min(1 / (scale * global_scale), FLT_MAX)
    q            = E2M1_RNE(clamp(x * enc, -6, 6))

These are the formulas of TransformerEngine's kernels. The low nibble is the even column. A block that held an element
that is not finite gets the scale NaN and decodes to NaN; a block with scale 0 decodes to 0.

With scale_choice="4over6" (Cook et al. 2025, "Four Over Six", arXiv 2512.02010) a block's amax becomes 6 or 4, what
changes the block less: the widest step is a third of the amax then, between 4 and 6, or a quarter, between 3 and 4. The
larger scale must be an E4M3 number as well, so S leaves room for it, as there and in TransformerEngine:

    S            = 1 if amax_tensor == 0 else min(1536 / amax_tensor, FLT_MAX)          (1536 = 256 * 6)
    six, four    = the scale as above; E4M3_RNE(clamp(min(amax_block * (S * fp32(1/6)), FLT_MAX) * 1.5, 0, 448))
    scale        = four if error(four) < error(six) else six
    error(scale) = sum of fp32(q * (scale * global_scale) - x)^2 over the block, in fp64 (see _squared_error)
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from qtensor.numerics import kernels, transposing
from qtensor.numerics.fineness import ORIGIN, Fineness, fineness
from qtensor.numerics.triton_kernels import ByHand
from qtensor.products.dynamic import swizzle
from qtensor.spec.blocks import (
    FLT_MAX,
    BlockFacts,
    block_amax,
    encoding_scale,
    finite,
    fp32,
    marked_blocks,
    marks,
    quotient,
    scatter_blocks,
    tile,
)
from qtensor.spec.codecs import e2m1, e8m0
from qtensor.spec.codecs.hashing import bits_along
from qtensor.spec.format import Format, Grain, PartSpec, Route
from qtensor.spec.recipes import IF_SET, Recipe, check_choice
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

BLOCK = 16
LARGEST_SCALE, LEAST_SCALE = 448.0, 2.0**-9
LARGEST_OF_SIX = 256.0  # with 4over6: 1.5 times as much, 384, is an E4M3 number, too
E4M3_EXPONENTS = (-9, 8)  # of the least and the largest power of two among E4M3 scales
SIXTH = fp32(1 / 6)  # fp32(1/6), exactly representable


@dataclass(frozen=True, kw_only=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 4-bit elements in blocks of 16 with E4M3 scales and one fp32 global scale.

    Args:
        blocks: "row" (1x16 along K) or "square" (16x16).
        scale_choice: None: the largest element of a block becomes 6. "4over6": 6 or 4, by the smaller squared error of
            the block; for blocks="row", and not for gradients. Masters of such weights can be no remainders.
        activations: None, or "dynamic": a linear layer quantizes its input too, in 1x16 blocks under a global scale a
            row.
        gradients: None, or with activations="dynamic" the recipe that NVIDIA trains with, "nvfp4": both products of
            backward are of NVFP4, gradients are rounded stochastically, and the operands of the weight's gradient are
            rotated by a random Hadamard matrix along tokens (qtensor/products/backward_operands.py). "nvfp4-nearest"
            leaves out the first of these two, "nvfp4-unrotated" the second.

    Raises:
        ValueError: for any other value; scale_choice="4over6" with square blocks.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), NVFP4BlockScaling())
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 32), 'scale': (4, 4), 'global_scale': ()}
        ```
    """

    gradient_elements: ClassVar[tuple[str, ...]] = ("nvfp4", "nvfp4-nearest", "nvfp4-unrotated")

    blocks: str = "row"
    scale_choice: str | None = dataclasses.field(default=None, metadata=IF_SET)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "blocks", ("row", "square"))
        check_choice(self, "scale_choice", (None, "4over6"))
        if self.scale_choice is not None and self.blocks != "row":
            raise ValueError(
                f"NVFP4BlockScaling: scale_choice={self.scale_choice!r} is not offered for blocks={self.blocks!r}, "
                "where shards that hold pieces of a block would have to agree on its errors, too; take "
                'blocks="row", or leave scale_choice None'
            )

    @property
    def of_gradients(self) -> Recipe:
        """The same blocks without a choice of scales: one by the error of rounding to nearest is for other operands."""
        return dataclasses.replace(self.of_backward, scale_choice=None)  # type: ignore[call-arg]

    @property
    def rotates_tokens(self) -> bool:
        """As `gradients` says."""
        return self.gradients in ("nvfp4", "nvfp4-nearest")

    @property
    def draws_gradients(self) -> bool:
        """As `gradients` says."""
        return self.gradients in ("nvfp4", "nvfp4-unrotated")


class _NVFP4(Format):
    converts = True
    judges = True
    exact_in_bf16 = True
    draws = True

    def parts(self, recipe: NVFP4BlockScaling) -> tuple[PartSpec, ...]:
        return (
            PartSpec("payload", torch.uint8, block=2, codes=torch.float4_e2m1fn_x2),
            PartSpec("scale", torch.float8_e4m3fn, block=BLOCK),
            PartSpec("global_scale", torch.float32, per_row=False),
        )

    def quantizer(
        self, x: Tensor, recipe: NVFP4BlockScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        assert amax is not None
        largest = LARGEST_SCALE if recipe.scale_choice is None else LARGEST_OF_SIX
        enc = encoding_scale(largest * e2m1.LARGEST, amax)
        return _under_global_scale(x, recipe, enc, quotient(1.0, enc), blocks)

    def grid(self, recipe: NVFP4BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        dec = quantizer["scale"].float() * quantizer["global_scale"]
        return quotient(1.0, dec).clamp(max=FLT_MAX), dec

    def encode_with(
        self, x: Tensor, recipe: NVFP4BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, BLOCK)  # [.., K // 16, 16]
        whole = finite(blocks)
        broken = marked_blocks(quantizer, whole, BLOCK, square=recipe.blocks == "square")
        drawn = tile(bits_along(quantizer["keys"], x.shape[-1]), BLOCK) if "keys" in quantizer else None
        payload = e2m1.encode(blocks * enc.unsqueeze(-1), whole, drawn).reshape(*x.shape[:-1], x.shape[-1] // 2)
        marked = torch.where(broken > 0, math.nan, quantizer["scale"].to(torch.float32)).to(torch.float8_e4m3fn)
        return {"payload": payload, "scale": marked, "global_scale": quantizer["global_scale"]}

    def adopt(
        self, x: Tensor, recipe: NVFP4BlockScaling, scale: Tensor, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        enc = quotient(1.0, scale).clamp(max=FLT_MAX)
        return self.encode_with(x, recipe, _under_global_scale(x, recipe, enc, scale.clone(), blocks))

    def fineness(self, x: Tensor, recipe: NVFP4BlockScaling) -> tuple[Fineness, Fineness | None]:
        facts = fineness(x, BLOCK, e2m1.MANTISSA)
        facts = facts.spread(BLOCK) if recipe.blocks == "square" else facts
        too_wide = (_least_exponent(facts.amax) > _largest_exponent(facts.depth)) & (facts.depth > 0)
        mixed = (facts.nan * facts.number > 0) | (facts.broken > 0)
        facts = facts._replace(broken=(too_wide | mixed).to(torch.float32))
        return facts, facts.joined()

    def fitted(
        self, recipe: NVFP4BlockScaling, facts: Fineness, shared: Fineness
    ) -> tuple[dict[str, Tensor], None, Tensor]:
        top = (_least_exponent(shared.amax) - E4M3_EXPONENTS[1]).clamp(min=-126)  # of the global scale
        least = (top + E4M3_EXPONENTS[0]).clamp(min=-126)
        holds = (shared.amax > 0) & (shared.broken == 0) & (_largest_exponent(shared.depth) >= least)
        exponent = torch.maximum(_least_exponent(facts.amax), least)
        scale = torch.where(facts.amax > 0, e8m0.power_of_two(exponent - top + 127), 0.0)
        return {"scale": scale.to(torch.float8_e4m3fn), "global_scale": e8m0.power_of_two(top + 127)}, None, holds

    def asked(self, parts: Mapping[str, Tensor], recipe: NVFP4BlockScaling, name: str, largest: Tensor) -> Tensor:
        """A block by its largest element, the global scale by the largest scale of a block.

        amax / (scale * global_scale) is 6 up to half a step of the scale: above 5.6 for a normal one, 4.5 for twice the
        least scale and 3 for the least; rounding stochastically may take it to the element before. The largest scale is
        448. Scales of 0, and those in whose products fp32 loses bits, say nothing.

        A scale for 4 is that of an amax over 4: above 3.5 from four times the least scale on, above 3.3, 3 and 2 below;
        stochastically, the element before. The largest scale for 6 is 256.
        """
        wide, chosen = parts["global_scale"], recipe.scale_choice is not None
        if name == "global_scale":
            top = LARGEST_OF_SIX if chosen else LARGEST_SCALE
            return (largest >= top) | ((largest == 0) & (wide == 1)) | (wide < torch.finfo(torch.float32).tiny)
        scale = parts["scale"].to(torch.float32)
        made = (largest >= 4) | ((largest >= 3) & (scale == LEAST_SCALE))
        if chosen:
            made = (largest >= 3) | ((largest >= 2) & (scale <= 3 * LEAST_SCALE))
        return made | (scale == 0) | scale.isnan() | (scale * wide < torch.finfo(torch.float32).tiny)

    def snap(self, scaled: Tensor, recipe: NVFP4BlockScaling) -> Tensor:
        return e2m1.snapped(scaled)

    def without_factors(
        self, parts: Mapping[str, Tensor], recipe: NVFP4BlockScaling
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        one = torch.ones((), dtype=torch.float32, device=parts["payload"].device)
        return {**parts, "global_scale": one}, parts["global_scale"]

    def grain(self, recipe: NVFP4BlockScaling) -> Grain | None:
        # a choice between two scales depends on all elements of a block, whichever way each is rounded
        return Grain(*e2m1.GRAIN) if recipe.scale_choice is None else None

    def unit(self, scales: Mapping[str, Tensor], recipe: NVFP4BlockScaling) -> Tensor:
        """The product of both scales; where that of the block is 0 or the least, its largest element says little.

        Such a block may hold values up to 9 times the least scale, which all are below 16 times it.
        """
        least = scales["global_scale"] * LEAST_SCALE
        dec = scales["scale"].float() * scales["global_scale"]
        return torch.where(dec <= least, least * 16, dec)

    def crosses(
        self,
        before: Tensor,
        after: Tensor,
        recipe: NVFP4BlockScaling,
        quantizer: Mapping[str, Tensor],
        amax: Tensor | None,
    ) -> Tensor:
        """In blocks under the least scale or 0 (see `unit`), where the magnitude by itself would get another one."""
        assert amax is not None
        enc = encoding_scale(LARGEST_SCALE * e2m1.LARGEST, amax) * SIXTH
        enc = enc.unsqueeze(-1) if enc.ndim else enc
        own, new = ((one * enc).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float() for one in (before, after))
        return (quantizer["scale"].float() <= LEAST_SCALE).unsqueeze(-1) & (own != new)

    def turned(
        self, parts: Mapping[str, Tensor], recipe: NVFP4BlockScaling, multiple: int
    ) -> tuple[dict[str, Tensor], Tensor] | None:
        """Of square blocks: the same elements and scales; the global scales are factors of the rows, now columns.

        Rows of a block that shards have cut, and written each by itself, may have different scales. The largest of them
        serves the whole block then, and elements under the others are rounded once more.
        """
        if recipe.blocks != "square":
            return None
        rest, factors = self.without_factors(parts, recipe)
        values = transposing.turned(kernels.decode(rest, recipe, torch.bfloat16), multiple)  # [K, N padded], exact
        scale = scatter_blocks(parts["scale"].to(torch.float32), BLOCK)[::BLOCK]  # [N // 16, K // 16]
        turned = scale.t().repeat_interleave(BLOCK, dim=0)  # [K, N // 16]
        short = values.shape[1] // BLOCK - turned.shape[1]
        quantizer = {
            "scale": torch.nn.functional.pad(turned, (0, short)).to(torch.float8_e4m3fn),
            "global_scale": rest["global_scale"],
        }
        return kernels.encode_under(values, recipe.of_rows, quantizer), factors.reshape(1, -1)

    def column_factors(self, parts: Mapping[str, Tensor], recipe: NVFP4BlockScaling) -> Tensor | None:
        """The global scales, of square blocks."""
        return parts["global_scale"].reshape(1, -1) if recipe.blocks == "square" else None

    def by_hand(self, recipe: NVFP4BlockScaling) -> ByHand | None:
        if recipe.scale_choice is not None:
            return None  # they know one scale for an amax
        return ByHand("nvfp4", {"square": recipe.blocks == "square"}, wide=True)

    def decode(self, parts: Mapping[str, Tensor], recipe: NVFP4BlockScaling) -> Tensor:
        values = e2m1.decode(parts["payload"])  # [.., K]
        dec = parts["scale"].float() * parts["global_scale"]  # NaN for a block that is not finite
        return (tile(values, BLOCK) * dec.unsqueeze(-1)).reshape(values.shape)


def _under_global_scale(
    x: Tensor, recipe: NVFP4BlockScaling, enc: Tensor, global_scale: Tensor, blocks: BlockFacts | None
) -> dict[str, Tensor]:
    """The quantizer of x under a global scale = 1 / `enc` (fp32, [] or one a row)."""
    own = block_amax(x, BLOCK, square=recipe.blocks == "square") if blocks is None else blocks.amax
    six = own * (enc * SIXTH)
    scale = six.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    if recipe.scale_choice is not None:
        scale = _of_less_error(x, scale, (six * 1.5).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn), global_scale)
    return {"scale": scale, "global_scale": global_scale, **marks(blocks)}


def _of_less_error(x: Tensor, six: Tensor, four: Tensor, global_scale: Tensor) -> Tensor:
    """The scales [.., K // 16], each of `four` where it changes its block less than that of `six` does."""
    blocks = tile(x, BLOCK)  # [.., K // 16, 16]
    errors = [_squared_error(blocks, scale.to(torch.float32) * global_scale) for scale in (six, four)]
    chosen = torch.where(errors[1] < errors[0], four.to(torch.float32), six.to(torch.float32))
    return chosen.to(torch.float8_e4m3fn)


def _squared_error(blocks: Tensor, dec: Tensor) -> Tensor:
    """fp64 [.., K // 16]: what rounding under a scale of the value `dec` changes, squared and summed over each block.

    A choice decides bytes, so it must not depend on who computes it. Products of an element and a scale, and of a
    rounded difference with itself, are exact in fp64, so it is the same whether they are contracted with what follows;
    sums are taken in halves.
    """
    scaled = blocks * quotient(1.0, dec).clamp(max=FLT_MAX).unsqueeze(-1)
    changed = e2m1.rounded(scaled).double() * dec.double().unsqueeze(-1) - blocks.double()
    changed = changed.to(torch.float32).double()
    found = changed * changed
    while found.shape[-1] > 1:
        half = found.shape[-1] // 2
        found = found[..., :half] + found[..., half:]
    return found.squeeze(-1)


def _least_exponent(amax: Tensor) -> Tensor:
    """int32: the least t for which 6 * 2^t is no less than a magnitude that an element times a power of two has."""
    return e8m0.code_up(amax * SIXTH) - 127


def _largest_exponent(depth: Tensor) -> Tensor:
    """int32: the largest t for which 2^t times half, the least element, is no more than the least 2^p."""
    return (ORIGIN - depth).to(torch.int32) + 1


class NVFP4Tensor(QuantizedTensor):
    """An NVFP4 quantized tensor: `payload` uint8 [.., K // 2], `scale` E4M3 [.., K // 16], `global_scale` fp32 [].

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), NVFP4BlockScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('NVFP4Tensor', torch.uint8, torch.float8_e4m3fn)
        ```
    """


def _multiply(x: Mapping[str, Tensor], w: Mapping[str, Tensor], dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """The hardware's product of elements and block scales in fp32, then times the global scales by row and column.

    (The hardware takes one global scale for a whole operand, but quantized rows and a gathered weight have several.)
    """
    y = scaled_mm(
        x["payload"].view(torch.float4_e2m1fn_x2),  # [M, K // 2]
        w["payload"].view(torch.float4_e2m1fn_x2).t(),  # [K // 2, N]
        swizzle(x["scale"]),
        ScalingType.BlockWise1x16,
        swizzle(w["scale"]),
        ScalingType.BlockWise1x16,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.float32,
    )
    return (y * x["global_scale"] * w["global_scale"].reshape(1, -1)).to(dtype)  # [M, 1] and [1, 1] or [1, N]


register(
    NVFP4BlockScaling,
    _NVFP4(),
    NVFP4Tensor,
    names={
        "nvfp4": NVFP4BlockScaling(),
        "nvfp4-square": NVFP4BlockScaling(blocks="square"),
        "nvfp4-4over6": NVFP4BlockScaling(scale_choice="4over6"),
    },
    # scaled_mm needs a multiple of 16 packed bytes, which is 32 columns.
    route=Route(multiply=_multiply, capabilities=((10, 0), (11, 0), (12, 0)), columns=32),
)
