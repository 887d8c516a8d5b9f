"""Directories made by the libraries whose layouts we read: run as a script, for they warn and patch on import.

    python -m tests.dcp_adapters.hf.peers compressed-tensors OUT FP8 NVFP4 W4A16+32 (groups of 32) ...
    python -m tests.dcp_adapters.hf.peers modelopt OUT FP8_DEFAULT_CFG ...

OUT/<scheme>/ is what they export of a tiny Llama; OUT/<scheme>.safetensors holds each quantized weight as they
dequantize it, in fp32.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HIDDEN, INTERMEDIATE, VOCABULARY = 128, 256, 48


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def compressed_tensors(out: Path, presets: list[str]) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    for preset in presets:
        model = llama()
        name, _, group = preset.partition("+")
        scheme = preset_name_to_scheme(name, ["Linear"])
        if group:
            scheme.weights.group_size = int(group)
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        linears = {name: child for name, child in model.named_modules() if hasattr(child, "quantization_scheme")}
        for number, child in enumerate(linears.values()):
            calibrate(child, 1.0 + number / 7)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        expected = {}
        for name, child in linears.items():
            how = child.quantization_scheme
            known = how.weights.type == "float" or "weight_shape" in own(child) or how.weights.strategy == "channel"
            if known and how.weights.symmetric:
                expected[f"{name}.weight"] = values_of(own(child), how.weights)
        target = out / preset
        target.mkdir(parents=True)
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()}, target / "model.safetensors"
        )
        model.config.save_pretrained(target)
        compressor.update_config(str(target))
        save_file(expected, out / f"{preset}.safetensors")


def values_of(tensors: dict[str, Tensor], args: Any) -> Tensor:
    """fp32, by the library's own formula; its compressors round to bf16 in between."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes, scale = tensors.get("weight"), tensors["weight_scale"]
    if args.type == "int" and codes is None:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        codes = unpack_from_int32(tensors["weight_packed"], args.num_bits, tensors["weight_shape"])
    elif codes is None:
        packed = tensors["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
    if args.type == "float" and args.group_size == 32:
        scale = decompress_mx_scale(scale)
    global_scale = tensors.get("weight_global_scale")
    value: Tensor = dequantize(codes.float(), scale.float(), args=args, global_scale=global_scale, dtype=torch.float32)
    return value


def own(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def calibrate(module: Any, amax: float) -> None:
    """What llm-compressor's observers do: scales of the weight from its values, those of the inputs from `amax`."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, weight = module.quantization_scheme, module.weight.detach()
    args, global_scale = scheme.weights, None
    if hasattr(module, "weight_global_scale"):
        global_scale = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        module.weight_global_scale.data = global_scale
    rows, columns = weight.shape
    if args.strategy == "tensor":
        grouped = weight.reshape(1, -1)
    elif args.strategy == "block":
        high, wide = args.block_structure
        short = (0, -columns % wide, 0, -rows % high)
        tiles = torch.nn.functional.pad(weight, short).unflatten(0, (-1, high)).unflatten(-1, (-1, wide))
        grouped = tiles.transpose(1, 2).flatten(2)
    else:
        grouped = weight.reshape(rows, -1, args.group_size or columns)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale, zero = calculate_qparams(low, high, args, global_scale)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape)
    inputs = torch.tensor([amax], dtype=torch.float32)
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data = generate_gparam(-inputs, inputs)
    if hasattr(module, "input_scale"):
        scale, _ = calculate_qparams(-inputs, inputs, scheme.input_activations)
        module.input_scale.data = scale.reshape(module.input_scale.shape)


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


def modelopt(out: Path, names: list[str]) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    for name in names:
        config = dict(getattr(mtq, name.removesuffix("+KV")))
        if name.endswith("+KV"):
            config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
        model = mtq.quantize(llama(), config, forward_loop=lambda model: model(input_ids=torch.arange(32)[None]))
        target = out / name
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=target)
        save_file(dequantized(load_file(target / "model.safetensors")), out / f"{name}.safetensors")


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the classes behind mtq.compress."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    found = {}
    for name, weight in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if scale is None or scale.ndim > 2 or weight.dtype == torch.int8:
            continue
        if weight.dtype == torch.uint8 and scale.shape[1] * 8 != weight.shape[1]:
            continue
        if weight.dtype == torch.uint8:
            shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
            value = NVFP4QTensor(shape, torch.float32, weight).dequantize(
                scale=scale, double_scale=tensors[f"{name}_scale_2"], block_sizes={-1: 16}
            )
        elif scale.dtype == torch.uint8:
            value = MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
        else:
            per_row = scale.reshape(-1, 1) if scale.ndim else scale
            value = FP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=per_row)
        found[name] = value.float().contiguous()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"compressed-tensors": compressed_tensors, "modelopt": modelopt}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
