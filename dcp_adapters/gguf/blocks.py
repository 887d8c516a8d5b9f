"""ggml's blocks of 4-bit floats: the codes and scales of MXFP4 and NVFP4, in the order in which llama.cpp has them.

    MXFP4   17 bytes for 32 columns: the E8M0 scale, then 16 bytes of codes
    NVFP4   36 bytes for 64 columns: four E4M3 scales, one for 16 columns each, then four times 8 bytes of codes
    codes   byte i of a scale's n columns: column i in the low nibble, column n / 2 + i in the high one

In memory a byte holds two neighbouring columns. ggml decodes to `e2m1 * scale`, like `dequantize`: its table has every
code's value doubled, and it halves every scale. NVFP4's global scale is a tensor of its own beside the weight, by which
llama.cpp multiplies products.

Source: ggml-common.h (block_mxfp4, block_nvfp4) and gguf.quants of gguf 0.19.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.spec.codecs.nibbles import unpacked

SIGN = 0x80  # the sign bit of an E4M3 scale, which ggml does not read


def mxfp4_blocks(payload: Tensor, scale: Tensor) -> Tensor:
    """Pack uint8 payload [.., K / 2] and E8M0 scale [.., K / 32] -> uint8 [.., K / 32 * 17]."""
    codes = _pair_halves(payload, 32)  # [.., K / 32, 16]
    return torch.cat([scale.unsqueeze(-1), codes], -1).flatten(-2)


def nvfp4_blocks(payload: Tensor, scale: Tensor) -> Tensor:
    """Pack uint8 payload [.., K / 2] and E4M3 scale [.., K / 16] -> uint8 [.., K / 64 * 36].

    Raises:
        ValueError: a scale is negative.
    """
    scales = scale.view(torch.uint8)
    # 0x80 itself is -0, which without its sign is the same scale.
    if bool((scales > SIGN).any()):
        raise ValueError("a block has a negative scale, and ggml reads NVFP4 scales without their sign")
    codes = _pair_halves(payload, 16).unflatten(-2, (-1, 4)).flatten(-2)  # [.., K / 64, 32]
    return torch.cat([scales.unflatten(-1, (-1, 4)), codes], -1).flatten(-2)


def _pair_halves(payload: Tensor, columns: int) -> Tensor:
    """Turn bytes of neighbours, uint8 [.., K / 2], into bytes of columns i and n / 2 + i, [.., K / n, n / 2].

    Args:
        payload: the codes.
        columns: n, how many columns have one scale.
    """
    halves: Tensor = unpacked(payload).unflatten(-1, (-1, 2, columns // 2))
    return halves[..., 0, :] | halves[..., 1, :] << 4


@dataclass(frozen=True)
class BlockType:
    """A type of ggml.

    Attributes:
        name: in ggml, without GGML_TYPE_.
        columns, nbytes: of a block.
        pack: (payload, scale) -> blocks.
    """

    name: str
    columns: int
    nbytes: int
    pack: Callable[[Tensor, Tensor], Tensor]


# kind of a recipe (dcp_adapters/hf/layouts/layout.py) -> its type
BLOCK_TYPES: Mapping[str, BlockType] = {
    "mxfp4": BlockType("MXFP4", 32, 17, mxfp4_blocks),
    "nvfp4": BlockType("NVFP4", 64, 36, nvfp4_blocks),
}
