"""Float8 in blocks: an fp32 scale for every 128 x 128 or 1 x 128 elements; value = q * scale, q in E4M3 or E5M2.

    amax  = max |x| over the finite elements of the block
    enc   = 1 if amax == 0 else max_q / amax          (one division, inf -> FLT_MAX; power_of_two clears its mantissa)
    scale = 1 / enc
    q     = RNE(clamp(x * enc, -max_q, max_q))

These are the formulas of float8.py for each block, and the blocks of DeepSeek-V3's weights. The last block of a row and
of a column may be smaller, so any N and any K fit. An element that is not finite becomes NaN and affects no other
element, not even in its block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from qtensor.formats.float8 import Float8Tensor, asked_of, grid_of
from qtensor.numerics.fineness import Fineness, fineness, fits
from qtensor.numerics.triton_kernels import ByHand
from qtensor.spec.blocks import BlockFacts, block_amax, encoding_scale, finite, quotient, tile, untile
from qtensor.spec.codecs import fp8
from qtensor.spec.codecs.fp8 import ELEMENTS
from qtensor.spec.codecs.rounding import power_of_two_floor
from qtensor.spec.format import Format, Grain, PartSpec, Route
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register

BLOCK = 128


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8BlockScaling(Recipe):
    """Float8 with one fp32 scale for each block of 128 x 128 or 1 x 128 elements.

    Args:
        element: "e4m3" (largest value 448) or "e5m2" (57344).
        blocks: "square" (128 x 128; the same bytes serve the transposed product) or "row" (1 x 128 along K).
        power_of_two: round the encoding scales down to powers of two.
        activations: None, or "dynamic": a linear layer quantizes its input too, in 1 x 128 blocks (see
            qtensor/products/dynamic.py).

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(256, 512), Float8BlockScaling())
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (256, 512), 'scale': (256, 4)}
        ```
    """

    element: str = "e4m3"
    blocks: str = "square"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "element", tuple(ELEMENTS))
        check_choice(self, "blocks", ("square", "row"))
        check_choice(self, "power_of_two", (False, True))


class _Float8Blocks(Format):
    converts = True
    judges = True

    def parts(self, recipe: Float8BlockScaling) -> tuple[PartSpec, ...]:
        dtype, _ = ELEMENTS[recipe.element]
        return PartSpec("payload", dtype), PartSpec("scale", torch.float32, block=BLOCK, ragged=True)

    def quantizer(
        self, x: Tensor, recipe: Float8BlockScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        return {"amax": block_amax(x, BLOCK, square=recipe.blocks == "square") if blocks is None else blocks.amax}

    def grid(self, recipe: Float8BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return grid_of(quantizer["amax"], recipe.element, power_of_two=recipe.power_of_two)

    def encode_with(
        self, x: Tensor, recipe: Float8BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc  # [.., ceil(K / 128)]
        scaled = untile(tile(x, BLOCK) * enc.unsqueeze(-1), x.shape[-1])
        return {"payload": fp8.encode(scaled, finite(x), recipe.element), "scale": quotient(1.0, enc)}

    def fineness(self, x: Tensor, recipe: Float8BlockScaling) -> tuple[Fineness, Fineness | None]:
        facts = fineness(x, BLOCK, fp8.MANTISSA[recipe.element])
        return facts.spread(BLOCK) if recipe.blocks == "square" else facts, None

    def fitted(
        self, recipe: Float8BlockScaling, facts: Fineness, shared: Fineness | None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        enc = power_of_two_floor(encoding_scale(ELEMENTS[recipe.element][1], facts.amax))
        return {}, enc, fits(enc, facts, fp8.STEP[recipe.element])

    def asked(self, parts: Mapping[str, Tensor], recipe: Float8BlockScaling, name: str, largest: Tensor) -> Tensor:
        return asked_of(parts[name], largest, recipe.element, power_of_two=recipe.power_of_two)

    def grain(self, recipe: Float8BlockScaling) -> Grain:
        return Grain(*fp8.GRAIN[recipe.element])

    def unit(self, scales: Mapping[str, Tensor], recipe: Float8BlockScaling) -> Tensor:
        return scales["scale"] if "scale" in scales else self.grid(recipe, scales)[1]

    def snap(self, scaled: Tensor, recipe: Float8BlockScaling) -> Tensor:
        return fp8.snapped(scaled, recipe.element)

    def by_hand(self, recipe: Float8BlockScaling) -> ByHand:
        dtype, _ = ELEMENTS[recipe.element]
        square = recipe.blocks == "square"
        return ByHand("float8_blocks", {"element": dtype, "square": square, "power_of_two": recipe.power_of_two})

    def decode(self, parts: Mapping[str, Tensor], recipe: Float8BlockScaling) -> Tensor:
        blocks = tile(parts["payload"].float(), BLOCK)  # [.., ceil(K / 128), 128]
        return untile(blocks * parts["scale"].unsqueeze(-1), parts["payload"].shape[-1])


def _multiply(x: Mapping[str, Tensor], w: Mapping[str, Tensor], dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """The hardware's product: 1 x 128 blocks of x by those of w.

    Square blocks are read as row blocks, since their scales are stored for every row, and a shard or a piece of a
    weight may begin within a square. Scales stand column by column, which must be multiples of 16 bytes.
    """
    tokens = x["payload"].shape[0]
    short = -tokens % 4
    payload = torch.nn.functional.pad(x["payload"].view(torch.uint8), (0, 0, 0, short)).view(x["payload"].dtype)
    y = scaled_mm(
        payload,  # [M padded, K]
        w["payload"].t(),  # [K, N]
        _by_columns(torch.nn.functional.pad(x["scale"], (0, 0, 0, short))),
        ScalingType.BlockWise1x128,
        _by_columns(w["scale"]),
        ScalingType.BlockWise1x128,
        output_dtype=dtype,
    )
    return y[:tokens].contiguous()


def _by_columns(scale: Tensor) -> Tensor:
    """[rows, blocks], stored column by column."""
    return scale.t().contiguous().t()


NAMES = {"float8-block": Float8BlockScaling(), "float8-block-row": Float8BlockScaling(blocks="row")}
ROUTE = Route(multiply=_multiply, capabilities=((9, 0),), columns=BLOCK, cuda=(12, 9))
register(Float8BlockScaling, _Float8Blocks(), Float8Tensor, names=NAMES, route=ROUTE)
