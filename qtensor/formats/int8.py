"""INT8: whole numbers with one fp32 scale a row; value = q * scale, q from -128 to 127.

    scale = max(amax / 127.5, 2^-126)          (amax over the elements of a row; / rounds to fp32)
    q     = clamp(RNE(x * (1 / scale)), -128, 127)      (1 / and * round to fp32)

The bytes are those of torchao's Int8Tensor a row, symmetric, made from fp32; torchao lets no scale be less than 2^-23.
Those of compressed-tensors' channel strategy have the same scales, and codes that differ next to ties, where a quotient
and a product with a reciprocal round apart. A row that held an element that is not finite gets the scale NaN and zeros
as codes, and decodes to NaN.

For weights that are written once, or through MasterWeightOptimizer. The largest value of a row is stored as 127 or -128
and not 127.5, so a write that begins with decoded values gets a scale that is smaller by 1/255 or greater by that.
Plain optimizers write so in every step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.spec.blocks import BlockFacts, finite, quotient
from qtensor.spec.codecs import int8
from qtensor.spec.format import Format, Grain, PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

LEAST = torch.finfo(torch.float32).tiny  # scale: the reciprocal of each is finite, and a normal number


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8RowScaling(Recipe):
    """INT8: symmetric 8-bit whole numbers with one fp32 scale a row.

    For weights that are calibrated or trained with MasterWeightOptimizer. Plain optimizers requantize decoded values in
    each step, which moves the largest of a row by 1/255 each time.

    Args:
        activations: None, or "dynamic": a linear layer quantizes its input too, each row (token) under one scale. GPUs
            multiply the whole numbers in bf16, which holds them, and the scales are factors of the sums.

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Int8RowScaling())
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 64), 'scale': (4, 1)}
        ```
    """


class _Int8(Format):
    judges = True
    exact_in_bf16 = True
    marks_rows = True

    def parts(self, recipe: Int8RowScaling) -> tuple[PartSpec, ...]:
        return PartSpec("payload", torch.int8), PartSpec("scale", torch.float32, block=0)

    def quantizer(
        self, x: Tensor, recipe: Int8RowScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        assert amax is not None
        # in fp64, as backends divide by a constant in their own ways; it rounds to the fp32 quotient
        scale = (amax.double() * (1 / 127.5)).to(torch.float32).clamp(min=LEAST)
        return {"scale": torch.where(amax < torch.inf, scale, torch.nan)}

    def grid(self, recipe: Int8RowScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return quotient(1.0, quantizer["scale"]), quantizer["scale"]

    def encode_with(
        self, x: Tensor, recipe: Int8RowScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        return _marked(x, x * enc, quantizer["scale"])

    def adopt(
        self, x: Tensor, recipe: Int8RowScaling, scale: Tensor, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        return _marked(x, x / scale, torch.where(scale < torch.inf, scale, torch.nan))

    def asked(self, parts: Mapping[str, Tensor], recipe: Int8RowScaling, name: str, largest: Tensor) -> Tensor:
        """An amax over its scale is 127.5 up to 2^-23 of it, which no rounding takes below 127."""
        scale = parts[name]
        return (largest >= int8.LARGEST) | scale.isnan() | (scale == LEAST)

    def grain(self, recipe: Int8RowScaling) -> Grain:
        return Grain(21, 6)  # 2^6 of the largest unit is 2^127, below which a lattice begins

    def snap(self, scaled: Tensor, recipe: Int8RowScaling) -> Tensor:
        return int8.snapped(scaled)

    def decode(self, parts: Mapping[str, Tensor], recipe: Int8RowScaling) -> Tensor:
        return parts["payload"].float().mul_(parts["scale"])

    def without_factors(
        self, parts: Mapping[str, Tensor], recipe: Int8RowScaling
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        return {**parts, "scale": torch.ones_like(parts["scale"])}, parts["scale"]


def _marked(x: Tensor, scaled: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The parts of x, and NaN with zeros for rows that are not finite, here or in another piece of the row."""
    whole = finite(x).all(dim=-1, keepdim=True) & (scale < torch.inf)  # [.., N, 1]
    return {"payload": int8.encode(scaled, whole), "scale": torch.where(whole, scale, torch.nan)}


class Int8Tensor(QuantizedTensor):
    """An INT8 quantized tensor: `payload` int8 [.., K], `scale` fp32 [.., 1].

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), Int8RowScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('Int8Tensor', torch.int8, torch.float32)
        ```
    """


register(Int8RowScaling, _Int8(), Int8Tensor, names={"int8-row": Int8RowScaling()})
