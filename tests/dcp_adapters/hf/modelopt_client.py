"""What nvidia-modelopt makes of exports in its layout, in a process of its own: importing it changes classes of torch.

    python modelopt_client.py EXPORT ...

In each directory it leaves `dequantized.st`, every quantized weight in fp32, and `converted.json`, what ModelOpt itself
puts into config.json for the directory's hf_quant_config.json.
"""

import json
import sys
from pathlib import Path

import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor


def dequantized(tensors: dict[str, Tensor], module: str) -> Tensor:
    """A weight in fp32, by the kind that its scales tell."""
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    double = tensors.get(f"{module}.weight_scale_2")
    fp32 = torch.float32
    if double is not None:
        shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
        packed = NVFP4QTensor(shape, fp32, weight)
        return packed.dequantize(dtype=fp32, scale=scale, double_scale=double, block_sizes={-1: 16})
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(weight.shape, fp32, weight).dequantize(dtype=fp32, scale=scale)
    scale = scale.unsqueeze(-1) if scale.ndim else scale
    return FP8QTensor(weight.shape, fp32, weight).dequantize(dtype=fp32, scale=scale)


def main() -> None:
    for directory in map(Path, sys.argv[1:]):
        tensors = load_file(directory / "model.safetensors")
        modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
        weights = {module: dequantized(tensors, module).contiguous() for module in modules}
        save_file(weights, directory / "dequantized.st")
        told = json.loads((directory / "hf_quant_config.json").read_text())
        (directory / "converted.json").write_text(json.dumps(convert_hf_quant_config_format(told)))


if __name__ == "__main__":
    main()
