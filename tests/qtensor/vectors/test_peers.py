"""Where other libraries have a recipe of the vectors: in which cases they give its bytes, as docs/numerics.md says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.qtensor.recipes_under_test import raw
from tests.qtensor.vectors.test_vectors import read

Parts = dict[str, Tensor]
pytestmark = pytest.mark.full

PLAIN = {"ties", "zeros", "all_zero", "typical"}
SAME = {  # (library, file): the cases that have the same bytes; limits_0, limits_1, .. of NVFP4 count as one
    **{("torchao", f"mxfp8_{element}_1x32_up"): PLAIN for element in ("e4m3", "e5m2")},
    **{("torchao", f"mxfp8_{element}_1x32_floor"): PLAIN | {"turns"} for element in ("e4m3", "e5m2")},
    ("torchao", "mxfp4_up"): PLAIN,
    ("torchao", "mxfp4_floor"): PLAIN | {"turns"},
    ("torchao", "nvfp4_1x16"): {"ties", "typical"},
    ("modelopt", "mxfp8_e4m3_1x32_up"): PLAIN,
    ("modelopt", "mxfp4_up"): {"typical"},
    ("modelopt", "nvfp4_1x16"): {"typical"},
    ("torchao", "int8_row"): {"ties", "typical"},
    ("compressed-tensors", "int8_row"): {"turns", "typical"},
    **{("bitsandbytes", f"nf4_{block}"): PLAIN | {"turns", "limits"} for block in (32, 64, 128)},
    **{("compressed-tensors", f"int4_{group}"): {"ties", "turns", "typical"} for group in (32, 64, 128)},
}


def torchao_int8(x: Tensor, recipe: dict[str, Any]) -> Parts:
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.int8 import int8_tensor

    held = int8_tensor.Int8Tensor.from_hp(x.float(), PerRow())
    return {"payload": held.qdata, "scale": held.scale}


def torchao(x: Tensor, recipe: dict[str, Any]) -> Parts:
    if recipe["type"] == "Int8RowScaling":
        return torchao_int8(x, recipe)
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    if recipe["type"] == "NVFP4BlockScaling":
        wide = nvfp4_tensor.per_tensor_amax_to_scale(x.float().abs().max())
        scale, payload = nvfp4_tensor.nvfp4_quantize(x, 16, wide)
        return {"payload": payload, "scale": scale, "global_scale": wide}
    mode = ScaleCalculationMode.RCEIL if recipe["scale_rounding"] == "up" else ScaleCalculationMode.FLOOR
    elements = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, None: torch.float4_e2m1fn_x2}
    scale, payload = mx_tensor.to_mx(x, elements[recipe.get("element")], 32, mode)
    return {"payload": payload, "scale": scale}


def modelopt(x: Tensor, recipe: dict[str, Any]) -> Parts:
    from modelopt.torch.quantization.qtensor import mxfp4_tensor, mxfp8_tensor, nvfp4_tensor

    if recipe["type"] == "NVFP4BlockScaling":
        held, scale, wide = nvfp4_tensor.NVFP4QTensor.quantize(x.float(), 16)
        return {"payload": held._quantized_data, "scale": scale, "global_scale": wide}
    if recipe["type"] == "MXFP4BlockScaling":
        held, scale = mxfp4_tensor.MXFP4QTensor.quantize(x.float(), 32)
    else:
        held, scale = mxfp8_tensor.MXFP8QTensor.quantize(x.float())
    return {"payload": held._quantized_data, "scale": scale}


def compressed_tensors(x: Tensor, recipe: dict[str, Any]) -> Parts:
    from compressed_tensors import quantization
    from compressed_tensors.compressors import pack_quantized
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import helpers

    if recipe["type"] == "Int8RowScaling":
        args = quantization.QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
        x = x.float()
        scale, zero_point = helpers.calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
        return {"payload": forward.quantize(x, scale, zero_point, args, dtype=torch.int8), "scale": scale}
    group = recipe["group"]
    args = quantization.QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    blocks = x.unflatten(-1, (-1, group))
    scale, zero_point = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    scale = scale.to(torch.bfloat16)
    codes = forward.quantize(x.float(), scale.float(), zero_point, args, dtype=torch.int8)
    return {"payload": pack_quantized.helpers.pack_to_int32(codes, 4), "scale": scale}


def bitsandbytes(x: Tensor, recipe: dict[str, Any]) -> Parts:
    from bitsandbytes import functional

    payload, state = functional.quantize_4bit(x.contiguous(), blocksize=recipe["block"], quant_type="nf4")
    return {"payload": payload >> 4 | payload << 4, "scale": state.absmax}  # there the high nibble comes first


QUANTIZE: dict[str, tuple[str, Callable[[Tensor, dict[str, Any]], Parts]]] = {
    "torchao": ("torchao", torchao),
    "modelopt": ("modelopt", modelopt),
    "compressed-tensors": ("compressed_tensors", compressed_tensors),
    "bitsandbytes": ("bitsandbytes", bitsandbytes),
}


@pytest.mark.parametrize(("library", "name"), SAME)
def test_other_libraries_give_these_bytes_where_the_page_says(library: str, name: str) -> None:
    module, quantize = QUANTIZE[library]
    recipe, cases = read(name)
    other: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their kernels for other machines, and NaN
        pytest.importorskip(module)
        for case, tensors in cases.items():
            found = quantize(tensors["input"], recipe)
            if not all(torch.equal(raw(part), raw(tensors[what])) for what, part in found.items()):
                other.add(case.partition("_")[0] if case.startswith("limits") else case)
    assert {*cases} - other - {case for case in cases if case.startswith("limits_")} == SAME[library, name]
