"""One contender of another library: reads a model and tokens, leaves the weights that its quantizers round to.

    python -m benchmarks.evaluation_peers DIRECTORY     # run by benchmarks/evaluation_contenders.py

Each library is asked for what its documentation gives for the format: its own scheme, or preset, and its own defaults
besides. Where it folds factors into other weights, or multiplies inputs by them, they are counted in.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader


def by_modelopt(model: Any, rows: Tensor, algorithm: str) -> dict[str, Tensor]:
    """INT4 in groups of 32."""
    import modelopt.torch.quantization as mtq

    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {
                "quantizer_name": "*weight_quantizer",
                "enable": True,
                "cfg": {"num_bits": 4, "block_sizes": {-1: 32}},
            },
            {"quantizer_name": "*lm_head*", "enable": False},
            {"quantizer_name": "*embed_tokens*", "enable": False},
        ],
        "algorithm": {"method": algorithm} | ({"layerwise": {"enable": True}} if algorithm == "gptq" else {}),
    }

    def forward_loop(model: Any) -> None:
        for ids in rows.split(8):
            model(input_ids=ids, use_cache=False)

    mtq.quantize(model, config, forward_loop=forward_loop)
    weights = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled:
            continue
        rounded = quantizer(module.weight)
        factors = getattr(module.input_quantizer, "pre_quant_scale", None)  # [K]; inputs are multiplied by it
        weights[f"{name}.weight"] = rounded if factors is None else rounded * factors
    return weights


def by_llm_compressor(model: Any, rows: Tensor, algorithm: str, format: str) -> dict[str, Tensor]:  # noqa: A002
    """Its scheme for weights alone; `algorithm` is "GPTQ", an observer that finds scales, or "GPTQ <observer>"."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    if format == "INT4 g32":
        weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    else:
        scheme = preset_name_to_scheme(f"{format}A16", ["Linear"])
    observer = algorithm.removeprefix("GPTQ").strip()
    if observer:  # else the preset's own
        scheme.weights.observer = observer
    kind = GPTQModifier if algorithm.startswith("GPTQ") else QuantizationModifier
    modifier = kind(config_groups={"group_0": scheme}, ignore=["lm_head"])
    # a loader, which uses no tokenizer; but oneshot insists on having one
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"": 0})))
    data = DataLoader([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows], batch_size=1)
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=data,
        recipe=modifier,
        max_seq_length=rows.shape[1],
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
    )
    found = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None and name != "lm_head":
            zero, shared = getattr(module, "weight_zero_point", None), getattr(module, "weight_global_scale", None)
            args = module.quantization_scheme.weights
            found[f"{name}.weight"] = fake_quantize(module.weight, module.weight_scale, zero, args, global_scale=shared)
    return found


@torch.no_grad()
def main(directory: Path) -> None:
    """Reads task.json, dense/ and ids.safetensors there; writes weights.safetensors."""
    from transformers import LlamaForCausalLM

    task = json.loads((directory / "task.json").read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    model: Any = LlamaForCausalLM.from_pretrained(directory / "dense", dtype=torch.float32).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = load_file(directory / "ids.safetensors")["ids"]
    algorithm = task["algorithm"].partition(": ")[2]
    if task["library"] == "ModelOpt":
        weights = by_modelopt(model, rows, algorithm)
    else:
        weights = by_llm_compressor(model, rows, algorithm, task["format"])
    if len(weights) != 7 * len(model.model.layers):
        raise RuntimeError(f"{len(weights)} linears were quantized, expected 7 in each layer")
    same = [name for name, weight in weights.items() if torch.equal(weight, before[name])]
    if same:
        raise RuntimeError(f"{same[0]} is what it was before")
    for name, value in model.named_parameters():
        if name in before and name not in weights:
            weights[name] = value  # norms that factors were folded into
    found = {name: weight.detach().float().contiguous() for name, weight in weights.items()}
    save_file(found, directory / "weights.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
