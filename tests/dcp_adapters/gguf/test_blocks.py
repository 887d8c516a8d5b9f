"""ggml's blocks decode, by the package gguf, to what our parts decode to."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf")

import gguf
import numpy as np
import torch

from dcp_adapters.gguf.blocks import BLOCK_TYPES, mxfp4_blocks, nvfp4_blocks
from qtensor import MXFP4BlockScaling, NVFP4BlockScaling, QuantizedTensor

ALL_BYTES = torch.arange(256, dtype=torch.int64).to(torch.uint8)


def decoded(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def test_mxfp4_decodes_to_our_values_for_every_scale_and_pair_of_codes() -> None:
    scale = ALL_BYTES[:255].repeat_interleave(16).unsqueeze(1)  # 255 is NaN, and no file gets it
    payload = ALL_BYTES.view(16, 16).repeat(255, 1)
    ours = QuantizedTensor.from_parts({"payload": payload, "scale": scale}, MXFP4BlockScaling(), torch.float32)
    with np.errstate(over="ignore"):  # 6 * 2^127 is inf here and there
        found = decoded(mxfp4_blocks(payload, scale), "MXFP4")
    assert torch.equal(found, ours.dequantize())


def test_nvfp4_decodes_to_our_values_for_every_scale_and_pair_of_codes() -> None:
    """Without the global scale, which is a tensor of its own."""
    scale = ALL_BYTES[:127].view(torch.float8_e4m3fn).repeat_interleave(32).view(-1, 4)  # 127 is NaN
    payload = ALL_BYTES.view(-1, 32).repeat(127, 1)
    assert len(scale) == len(payload)
    parts = {"payload": payload, "scale": scale, "global_scale": torch.tensor(1.0, dtype=torch.float32)}
    ours = QuantizedTensor.from_parts(parts, NVFP4BlockScaling(), torch.float32)
    assert torch.equal(decoded(nvfp4_blocks(payload, scale), "NVFP4"), ours.dequantize())


def test_a_negative_scale_is_refused_and_minus_zero_is_not() -> None:
    payload = torch.full((1, 32), 0x11, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a block has a negative scale, and ggml reads NVFP4 scales without their"):
        nvfp4_blocks(payload, torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float32).to(torch.float8_e4m3fn))
    zero = torch.tensor([[1.0, -0.0, 1.0, 1.0]], dtype=torch.float32).to(torch.float8_e4m3fn)
    assert bool((decoded(nvfp4_blocks(payload, zero), "NVFP4")[:, 16:32] == 0).all())


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_sizes_are_those_of_ggml(kind: str) -> None:
    block = BLOCK_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block.name]] == (block.columns, block.nbytes)
