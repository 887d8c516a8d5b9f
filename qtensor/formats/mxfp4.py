"""MXFP4: E2M1 elements, two a byte, in 32-blocks with power-of-two scales as E8M0 codes; value = q * 2^(code - 127).

    v    = amax * fp32(1 / 6)                           (amax over the finite elements of a 1x32 block)
    code = exponent of v rounded UP to a power of two   ("floor": the OCP rule floor(log2 amax) - 2, saturating)
    q    = E2M1_RNE(clamp(x * 2^(127 - code), -6, 6))

These are torchao's RCEIL and FLOOR modes. The low nibble is the even column. Code 255 means NaN and marks a block with
an element that is not finite; the whole block decodes to NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.numerics.triton_kernels import ByHand
from qtensor.spec.blocks import BlockFacts, block_amax, broken_blocks, finite, fp32, tile
from qtensor.spec.codecs import e2m1, e8m0
from qtensor.spec.format import Format, Grain, PartSpec
from qtensor.spec.recipes import Recipe, check_choice
from qtensor.spec.registry import register
from qtensor.tensor.quantized_tensor import QuantizedTensor

BLOCK = 32
SIXTH = fp32(1 / e2m1.LARGEST)
EMAX = 2  # exponent of the largest element's power of two: 6 = 1.5 * 2^2


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP4BlockScaling(Recipe):
    """MXFP4: 4-bit elements in blocks of 32 along K with E8M0 scales (OCP Microscaling 1.0).

    Args:
        scale_rounding: "up" (never saturates) or "floor" (the OCP specification's rule).
        activations: None, or "dynamic": a linear layer quantizes its input too, in 1x32 blocks. Both operands are
            decoded and multiplied in fp32: torch's scaled_mm has no MXFP4 that every build for CUDA offers.

    Raises:
        ValueError: for any other value.

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), MXFP4BlockScaling())
        >>> {name: tuple(part.shape) for name, part in q.parts().items()}
        {'payload': (4, 32), 'scale': (4, 2)}
        ```
    """

    scale_rounding: str = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "scale_rounding", ("up", "floor"))


class _MXFP4(Format):
    judges = True
    exact_in_bf16 = True

    def parts(self, recipe: MXFP4BlockScaling) -> tuple[PartSpec, ...]:
        return (
            PartSpec("payload", torch.uint8, block=2, codes=torch.float4_e2m1fn_x2),
            PartSpec("scale", torch.uint8, block=BLOCK, codes=torch.float8_e8m0fnu),
        )

    def quantizer(
        self, x: Tensor, recipe: MXFP4BlockScaling, amax: Tensor | None, blocks: BlockFacts | None = None
    ) -> dict[str, Tensor]:
        own = block_amax(x, BLOCK, square=False)
        code = e8m0.code_up(own * SIXTH) if recipe.scale_rounding == "up" else e8m0.code_floor(own, EMAX)
        return {"scale": code.to(torch.uint8)}

    def grid(self, recipe: MXFP4BlockScaling, quantizer: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return e8m0.grid(quantizer["scale"])

    def encode_with(
        self, x: Tensor, recipe: MXFP4BlockScaling, quantizer: Mapping[str, Tensor], enc: Tensor | None = None
    ) -> dict[str, Tensor]:
        enc = self.grid(recipe, quantizer)[0] if enc is None else enc
        blocks = tile(x, BLOCK)  # [.., K // 32, 32]
        whole = finite(blocks)
        broken = broken_blocks(whole, BLOCK, square=False)
        payload = e2m1.encode(blocks * enc.unsqueeze(-1), whole).reshape(*x.shape[:-1], x.shape[-1] // 2)
        return {"payload": payload, "scale": e8m0.marked(quantizer["scale"], broken)}

    def asked(self, parts: Mapping[str, Tensor], recipe: MXFP4BlockScaling, name: str, largest: Tensor) -> Tensor:
        return e8m0.asked(parts[name], largest, e2m1.LARGEST / 2 if recipe.scale_rounding == "up" else 2.0**EMAX)

    def snap(self, scaled: Tensor, recipe: MXFP4BlockScaling) -> Tensor:
        return e2m1.snapped(scaled)

    def grain(self, recipe: MXFP4BlockScaling) -> Grain:
        return Grain(*e2m1.GRAIN)

    def by_hand(self, recipe: MXFP4BlockScaling) -> ByHand:
        return ByHand("mxfp4", {"scale_rounding": recipe.scale_rounding})

    def decode(self, parts: Mapping[str, Tensor], recipe: MXFP4BlockScaling) -> Tensor:
        values = e2m1.decode(parts["payload"])  # [.., K]
        return (tile(values, BLOCK) * e8m0.decode(parts["scale"]).unsqueeze(-1)).reshape(values.shape)


class MXFP4Tensor(QuantizedTensor):
    """An MXFP4 quantized tensor: `payload` uint8 [.., K // 2]; `scale` uint8 E8M0 codes [.., K // 32].

    Example:
        ```python
        >>> q = quantize(torch.randn(4, 64), MXFP4BlockScaling())
        >>> type(q).__name__, q.payload.dtype, q.scale.dtype
        ('MXFP4Tensor', torch.uint8, torch.uint8)
        ```
    """


register(
    MXFP4BlockScaling,
    _MXFP4(),
    MXFP4Tensor,
    names={"mxfp4": MXFP4BlockScaling(), "mxfp4-floor": MXFP4BlockScaling(scale_rounding="floor")},
)
