"""Tiny models that are quantized, exported and read back by others: what the tests of exports share.

What is expected is written here from the documented layouts alone: names, shapes and numbers of the product's own
tables are not used.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import CompressedTensorsConfig

from dcp_adapters import export_hf
from qtensor import QuantizedTensor, quantize_

if TYPE_CHECKING:
    from qtensor.spec.recipes import Recipe

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PROMPT = torch.tensor([[1, 5, 9, 2, 77]])


def members(layer: str) -> list[str]:
    """The linears of the model that an engine runs as this one layer."""
    parent, _, own = layer.rpartition(".")
    return [f"{parent}.{name}" for name in FUSED.get(own, (own,))] if parent else [layer]


def layers_of(linears: Sequence[str]) -> list[str]:
    """What an engine runs, each linear once: q, k, v and gate, up together."""
    fused = {name: layer for layer, names in FUSED.items() for name in names}
    found = (linear.rpartition(".") for linear in linears)
    return list(dict.fromkeys(f"{parent}{dot}{fused.get(own, own)}" for parent, dot, own in found))


def llama(*, tied: bool = False, layers: int = 2) -> LlamaForCausalLM:
    """A random bf16 model in which linears that engines fuse have one amax, as calibration would leave them."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(8)  # far enough from uniform outputs that greedy tokens have no ties
            else:
                weight.copy_(torch.rand_like(weight) + 0.5)
        for layer in layers_of(linears(model)):
            weights = [model.get_submodule(name).weight for name in members(layer)]
            largest = max(float(weight.abs().max()) for weight in weights)
            for weight in weights:
                weight[0, 0] = largest
    return model


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


@dataclass(frozen=True)
class Exported:
    """A model that was quantized, and what was written of it.

    quantized: module -> its weight. dense: all other tensors. inputs: module -> scale of its inputs.
    """

    path: Path
    model: PreTrainedModel
    quantized: Mapping[str, QuantizedTensor]
    dense: Mapping[str, Tensor]
    inputs: Mapping[str, float] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "config.json").read_text()))

    @property
    def quantization(self) -> dict[str, Any]:
        return dict(self.config["quantization_config"])

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor for file in sorted(self.path.glob("*.safetensors")) for name, tensor in load_file(file).items()
        }

    def of(self, module: str) -> dict[str, Tensor]:
        """The tensors of one module, by their own names."""
        return {
            name.rpartition(".")[2]: tensor
            for name, tensor in self.tensors.items()
            if name.rpartition(".")[0] == module
        }

    def reference(self) -> PreTrainedModel:
        """The unquantized architecture with the dequantized weights in it."""
        # As from_pretrained builds it: .to(bfloat16) would round the frequencies of the rotary embedding.
        model = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16).eval()
        weights = {f"{module}.weight": weight.dequantize(torch.bfloat16) for module, weight in self.quantized.items()}
        model.load_state_dict({**self.dense, **weights})
        return model


def export(
    path: Path,
    plan: Recipe | Mapping[str, Recipe],
    *,
    model: PreTrainedModel | None = None,
    exclude: Sequence[str] = (),
    static: Sequence[str] = (),
    extra: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Exported:
    """Quantize a model and export its state dict.

    Args:
        path: of the export.
        plan: a recipe for all linears but lm_head, or for each glob over modules.
        model: by default a tiny one.
        exclude: globs over modules that stay dense.
        static: ends of the modules' names that get an `input_scale`; those that are fused the same.
        extra: more entries of the state dict.
    """
    model = llama() if model is None else model
    for include, recipe in plan.items() if isinstance(plan, Mapping) else [("*", plan)]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="exclude")  # not every part of a model has what is excluded
            quantize_(model, recipe, include=(include,), exclude=("lm_head", *exclude))
    state = dict(model.state_dict())
    quantized = {
        name.removesuffix(".weight"): value for name, value in state.items() if isinstance(value, QuantizedTensor)
    }
    inputs = (
        {
            module: 0.0123 * (number + 1) / 7
            for number, layer in enumerate(layers_of([name for name in quantized if name.endswith(tuple(static))]))
            for module in members(layer)
        }
        if static
        else {}
    )
    scales = {f"{module}.input_scale": torch.tensor(scale) for module, scale in inputs.items()}
    options = {"config": model.config, "progress": False, **options}
    export_hf({**state, **scales, **(extra or {})}, path, **options)
    dense = {name: value for name, value in state.items() if not isinstance(value, QuantizedTensor)}
    return Exported(path, model, quantized, dense, inputs)


def loaded(path: Path, *, dequantize: bool) -> PreTrainedModel:
    """What transformers reads, its weights dequantized by compressed-tensors: at loading, or in the first forward."""
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    with warnings.catch_warnings():
        # transformers says of every such option that the checkpoint's own config is used beside it.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True, **options)
    model.eval()
    assert model(PROMPT).logits.isfinite().all()
    return model


def greedy(model: PreTrainedModel, prompt: Tensor = PROMPT, tokens: int = 12) -> Tensor:
    """The tokens a model goes on with."""
    attention = torch.ones_like(prompt)
    made = model.generate(
        prompt, attention_mask=attention, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return made[:, prompt.shape[1] :]


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its order."""
    return tensor.reshape(-1).view(torch.uint8)


# -- what a client's arithmetic may change -----------------------------------------------------------------------------


def assert_equal(module: str, got: Tensor, expected: Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), module
    different = got.view(torch.int16) != expected.view(torch.int16)
    different &= (got != 0) | (expected != 0)  # zeros may have either sign
    assert not different.any(), f"{module}: {int(different.sum())} of {got.numel()} elements differ"


def assert_nvfp4(module: str, got: Tensor, weight: QuantizedTensor) -> None:
    """Equal but at ties: there by one step of bf16.

    The file has G = 1/g, so the client computes s/G where we compute s*g; the roundings (of g, s*g, s/G, and of e*...
    on both sides) are at most 2^-24 each, so the fp32 products are at most 5 ulps apart, and so round to the same bf16
    unless a rounding boundary (low half of the bits 0x8000) lies in between.
    """
    product = weight.dequantize(torch.float32)
    expected = product.to(torch.bfloat16)
    low = product.view(torch.int32) & 0xFFFF
    tie = (low - 0x8000).abs() <= 5
    assert_equal(module, torch.where(tie, expected, got), expected)
    steps = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert int((steps * tie).max()) <= 1, module
