"""How far are quantize and dequantize from one copy of the input? And from torchao, eager as it is used?"""

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor as PeerNVFP4

from benchmarks.timing import medians
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize

SHAPE = (2048, 2048)


def run() -> dict[str, dict[str, float]]:
    """Ratios of medians: each operation over one clone of the bf16 input, and the peer over ours."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    recipes = {"float8_row": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
    quantized = {name: quantize(x, recipe) for name, recipe in recipes.items()}
    contenders = {"copy": x.clone}
    for name, recipe in recipes.items():
        contenders[f"quantize {name}"] = lambda recipe=recipe: quantize(x, recipe)
        contenders[f"dequantize {name}"] = quantized[name].dequantize
    contenders["peer mxfp8"] = lambda: MXTensor.to_mx(
        x, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL
    )
    contenders["peer nvfp4"] = lambda: PeerNVFP4.to_nvfp4(x)
    seconds = medians(contenders)
    return {
        "over_one_copy_of_the_input": {name: round(value / seconds["copy"], 2) for name, value in seconds.items()},
        "torchao_eager_over_ours": {
            name: round(seconds[f"peer {name}"] / seconds[f"quantize {name}"], 2) for name in ("mxfp8", "nvfp4")
        },
    }
