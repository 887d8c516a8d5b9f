"""INT4: whole numbers in groups along K, each with a bf16 scale; value = q * scale, q from -8 to 7.

    scale = bf16_RNE(amax / 7.5), 1 where that is 0    (amax over the finite elements of a group; / rounds to fp32)
    q     = clamp(RNE(x / scale), -8, 7)               (/ rounds to fp32)

The bytes are those of compressed-tensors' group strategy with symmetric weights and bf16 scales. The largest fp32
number over 7.5 is below the largest of bf16, so no scale overflows. A code is stored as q + 8, the low nibble is the
even column. A group that held an element that is not finite gets the scale NaN and decodes to NaN.

For weights that are written once, or through MasterWeightOptimizer. The largest value of a group, where it is positive,
is stored as 7 and not 7.5, so a write that begins with decoded values gets a scale that is smaller by up to 1/15. Plain
optimizers write so in every step.

Searches for scales multiply by what `grid` gives, the fp64 reciprocal of a scale: the product, rounded to fp32, is the
quotient bit for bit. For X / S of whole numbers X < 2^24 and S < 2^8 is never a tie between two fp32 numbers, and
differs from each tie by at least 2^-33 of itself. A reciprocal in fp32 would not do: x * (1 / 3) can miss the ties of
x / 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.numerics.triton_kernels import ByHand
from qtensor.spec.blocks import BlockFacts, block_amax, broken_blocks, finite, tile
from qtensor.spec.codecs import bf16, int4
from qtensor.spec.format import Format, Grain, PartSpec
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

GROUPS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True, repr=False)
class Int4GroupScaling(Recipe):
    """INT4: symmetric 4-bit whole numbers in groups along K with bf16 scales.

    For weights that are calibrated or trained with MasterWeightOptimizer. Plain optimizers requantize decoded values in
    each step, which takes up to 1/15 from the largest of a group each time.

    Args:
        group: how many elements share a scale: 32, 64 or 128.
        activations: None, or "dynamic": a linear layer quantizes its input too, in groups of the same size. No hardware
            route exists: both operands are decoded and multiplied in fp32.

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Int4GroupScaling(group=32))
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 32), 'scale': (4, 2)}
        ```
    """

    group: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "group", GROUPS)


class _Int4(Format):
    judges = True

    def parts(self, recipe: Int4GroupScaling) -> tuple[PartSpec, ...]:
        return PartSpec("payload", torch.uint8, block=2), PartSpec("scale", torch.bfloat16, block=recipe.group)

    def quantizer(
        self, x: Tensor, recipe: Int4GroupScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        own = block_amax(x, _group(recipe), square=False)
        scale = bf16.rounded((own.double() * (1 / 7.5)).to(torch.float32))
        return {"scale": torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)}

    def grid(self, recipe: Int4GroupScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        dec = quantizer["scale"].to(torch.float32)
        return dec.double().reciprocal(), dec

    def encode_with(
        self, x: Tensor, recipe: Int4GroupScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, _group(recipe))  # [.., K // group, group]
        whole = finite(blocks)
        broken = broken_blocks(whole, _group(recipe), square=False)
        scaled = _quotients(blocks, enc.unsqueeze(-1), quantizer["scale"].unsqueeze(-1))
        payload = int4.encode(scaled, whole).reshape(*x.shape[:-1], x.shape[-1] // 2)
        return {"payload": payload, "scale": bf16.marked(quantizer["scale"], broken)}

    def asked(self, parts: Mapping[str, Tensor], recipe: Int4GroupScaling, name: str, largest: Tensor) -> Tensor:
        """An amax over its scale is 7.5 up to 2^-8 of it, which no rounding takes below 7."""
        scale = parts[name].to(torch.float32)
        unknown = scale.isnan() | (scale < torch.finfo(torch.float32).tiny)  # of fewer bits than a normal bf16 number
        return (largest >= int4.LARGEST) | ((largest == 0) & (scale == 1)) | unknown

    def snap(self, scaled: Tensor, recipe: Int4GroupScaling) -> Tensor:
        return int4.snapped(scaled.to(torch.float32))

    def grain(self, recipe: Int4GroupScaling) -> Grain:
        return Grain(17, 2)

    def by_hand(self, recipe: Int4GroupScaling) -> ByHand:
        return ByHand("int4", {"group": recipe.group})

    def decode(self, parts: Mapping[str, Tensor], recipe: Int4GroupScaling) -> Tensor:
        values = int4.decode(parts["payload"])  # [.., K]
        scale = parts["scale"].to(torch.float32)  # NaN for a group that is not finite
        return (tile(values, _group(recipe)) * scale.unsqueeze(-1)).reshape(values.shape)


def _quotients(x: Tensor, enc: Tensor, scale: Tensor) -> Tensor:
    """Quotients x / scale in fp32, rounded once; Triton rounds it wrongly, so there x * `enc`, the fp64 reciprocal."""
    if x.is_cuda and torch.compiler.is_compiling():
        return (x * enc).to(torch.float32)
    return x / scale.to(torch.float32)


def _group(recipe: Int4GroupScaling) -> int:
    """The size of a group; a constant in compiled code, to which a number among the recipe's fields may be a symbol."""
    for size in GROUPS:
        if recipe.group == size:
            return size
    raise AssertionError(recipe)


class Int4Tensor(QuantizedTensor):
    """An INT4 quantized tensor: `payload` uint8 [.., K // 2], `scale` bf16 [.., K // group].

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Int4GroupScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('Int4Tensor', torch.uint8, torch.bfloat16)
        ```
    """


register(
    Int4GroupScaling,
    _Int4(),
    Int4Tensor,
    names={f"int4-{group}": Int4GroupScaling(group=group) for group in GROUPS},
)
