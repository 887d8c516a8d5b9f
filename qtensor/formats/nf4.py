"""NF4: quantiles of the normal distribution in blocks along K, each with an fp32 scale; value = q * scale, |q| <= 1.

    scale = amax                                         (over the finite elements of a block)
    q     = the element nearest to x * (1 / max(scale, 1e-38)), ties down     (1 / and * round to fp32)

The bytes are those of bitsandbytes' quantize_4bit on a CPU for each row whose K is a multiple of the block, but for the
order of nibbles: here the low nibble is the even column, there the high one. A block that held an element that is not
finite gets the scale NaN and decodes to NaN. bitsandbytes can quantize the scales, too ("double quantization", in
blocks of 256 that run on over the ends of rows): such scales are no part of a row, so here they stay in fp32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.spec.blocks import BlockFacts, block_amax, broken_blocks, finite, fp32, quotient, tile
from qtensor.spec.codecs import nf4
from qtensor.spec.format import Format, Grain, PartSpec
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

BLOCKS = (32, 64, 128)
LEAST = fp32(1e-38)  # what x is divided by, a subnormal number


@dataclass(frozen=True, kw_only=True, repr=False)
class NF4BlockScaling(Recipe):
    """NF4: 4-bit quantiles of the normal distribution in blocks along K with fp32 scales (QLoRA's data type).

    Args:
        block: how many elements share a scale: 32, 64 or 128.
        activations: None, or "dynamic": a linear layer quantizes its input too, in blocks of the same size. No hardware
            route exists: both operands are decoded and multiplied in fp32.

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 128), NF4BlockScaling())
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 64), 'scale': (4, 2)}
        ```
    """

    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "block", BLOCKS)


class _NF4(Format):
    judges = True

    def parts(self, recipe: NF4BlockScaling) -> tuple[PartSpec, ...]:
        scale = PartSpec("scale", torch.float32, block=recipe.block, zeros=True)
        return PartSpec("payload", torch.uint8, block=2), scale

    def quantizer(
        self, x: Tensor, recipe: NF4BlockScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        return {"scale": block_amax(x, _block(recipe), square=False)}

    def grid(self, recipe: NF4BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return quotient(1.0, quantizer["scale"].clamp(min=LEAST)), quantizer["scale"]

    def encode_with(
        self, x: Tensor, recipe: NF4BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, _block(recipe))  # [.., K // block, block]
        whole = finite(blocks)
        broken = broken_blocks(whole, _block(recipe), square=False)
        payload = nf4.encode(blocks * enc.unsqueeze(-1), whole).reshape(*x.shape[:-1], x.shape[-1] // 2)
        return {"payload": payload, "scale": torch.where(broken > 0, torch.nan, quantizer["scale"])}

    def asked(self, parts: Mapping[str, Tensor], recipe: NF4BlockScaling, name: str, largest: Tensor) -> Tensor:
        """An amax over itself is 1 or an ulp less, which rounding stochastically may take to the element before."""
        scale = parts[name]
        unknown = scale.isnan() | ((scale < torch.finfo(torch.float32).tiny) & (scale > 0))
        return (largest >= -nf4.TABLE[1]) | ((largest == 0) & (scale == 0)) | unknown

    def snap(self, scaled: Tensor, recipe: NF4BlockScaling) -> Tensor:
        return nf4.snapped(scaled)

    def grain(self, recipe: NF4BlockScaling) -> Grain:
        return Grain(*nf4.GRAIN)

    def decode(self, parts: Mapping[str, Tensor], recipe: NF4BlockScaling) -> Tensor:
        values = nf4.decode(parts["payload"])  # [.., K]
        return (tile(values, _block(recipe)) * parts["scale"].unsqueeze(-1)).reshape(values.shape)


def _block(recipe: NF4BlockScaling) -> int:
    """The size of a block; a constant in compiled code, to which a number among the recipe's fields may be a symbol."""
    for size in BLOCKS:
        if recipe.block == size:
            return size
    raise AssertionError(recipe)


class NF4Tensor(QuantizedTensor):
    """An NF4 quantized tensor: `payload` uint8 [.., K // 2], `scale` fp32 [.., K // block].

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), NF4BlockScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('NF4Tensor', torch.uint8, torch.float32)
        ```
    """


NAMES = {"nf4": NF4BlockScaling(), **{f"nf4-{block}": NF4BlockScaling(block=block) for block in BLOCKS if block != 64}}
register(NF4BlockScaling, _NF4(), NF4Tensor, names=NAMES)
