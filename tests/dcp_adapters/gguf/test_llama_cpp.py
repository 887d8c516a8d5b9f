"""GGUF files in llama.cpp, on a CPU: its next tokens are those of our weights.

llama.cpp rounds the inputs of quantized linears to 8 bits (Q8_0) and those of bf16 ones to bf16; the rest is fp32. The
reference is transformers in fp32 with the decoded weights, and with inputs rounded in the same way. Tokens come as log
probabilities of the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("xllamacpp")
pytest.importorskip("transformers")

import torch
import xllamacpp
from torch import Tensor
from transformers import LlamaForCausalLM

from dcp_adapters import export_gguf
from examples import smollm2
from qtensor import MXFP4BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize_
from tests.dcp_adapters.gguf import files
from tests.dcp_adapters.hf.exports import llama

if TYPE_CHECKING:
    from qtensor.spec.recipes import Recipe

every_recipe = pytest.mark.parametrize("recipe", [MXFP4BlockScaling(), NVFP4BlockScaling()], ids=["mxfp4", "nvfp4"])


def next_tokens(path: Path, prompt: list[int], count: int, vocabulary: int) -> tuple[list[int], Tensor]:
    """Greedy tokens, and the log probabilities of all of the vocabulary at each: fp32 [tokens, vocabulary]."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 64, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    (choice,) = server.handle_completions({**asked, "n_probs": vocabulary, "logprobs": vocabulary})["choices"]
    rows = choice["logprobs"]["content"]
    found = torch.full((len(rows), vocabulary), float("nan"), dtype=torch.float32)
    for row, told in zip(found, rows, strict=True):
        for each in told["top_logprobs"]:
            row[each["id"]] = each["logprob"]
    return [row["id"] for row in rows], found


def q8_0(x: Tensor) -> Tensor:
    """The values of ggml's codes of x [.., K]: 8 bits under an fp16 scale for 32 columns (quantize_row_q8_0)."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    codes = torch.round(blocks * (127 / amax).nan_to_num(posinf=0))
    return (codes * (amax / 127).half().float()).flatten(-2)


@torch.no_grad()
def reference(model: LlamaForCausalLM, tokens: list[int], start: int, *, rounded: bool) -> Tensor:
    """Log probabilities of what follows tokens[: start], tokens[: start + 1], ...; in fp32 but for rounded inputs."""
    plain = LlamaForCausalLM(model.config).float().eval()
    for name, value in model.state_dict().items():
        plain.get_parameter(name).copy_(
            value.dequantize(torch.float32) if isinstance(value, QuantizedTensor) else value
        )
        module = plain.get_submodule(name.removesuffix(".weight"))
        if rounded and isinstance(value, QuantizedTensor):
            module.register_forward_pre_hook(lambda _, args: q8_0(args[0]))
    if rounded:
        plain.lm_head.register_forward_pre_hook(lambda _, args: args[0].bfloat16().float())
    return plain(torch.tensor([tokens])).logits[0, start - 1 :].log_softmax(-1)


def error(found: Tensor, exact: Tensor) -> float:
    """Root of the mean square of a difference."""
    return float((found - exact).square().mean().sqrt())


@every_recipe
def test_a_small_model_computes_with_our_bytes(tmp_path: Path, recipe: Recipe) -> None:
    """Two layers: what is not modelled is the order of sums, and codes of inputs on a tie, a few of thousands."""
    model = llama()
    quantize_(model, recipe, exclude=("lm_head",))
    like = files.like(tmp_path / "like.gguf", model, rope_freqs=False)
    path = export_gguf(model, tmp_path / "out.gguf", like=like, progress=False)
    prompt = [1, 5, 9, 2, 77]
    tokens, found = next_tokens(path, prompt, 6, model.config.vocab_size)
    exact = reference(model, [*prompt, *tokens[:-1]], len(prompt), rounded=True)
    apart = error(reference(model, [*prompt, *tokens[:-1]], len(prompt), rounded=False), exact)
    off = (found - exact).abs().amax(1)
    assert float(off.median()) < 2**-17  # some bits of 2^-20, which is one of a log probability between 8 and 16
    assert error(found, exact) < apart / 8  # with codes on a tie
    assert apart < float(exact.std()) / 8  # a wrong scale, block or row would not hide in it


@pytest.mark.full
def test_the_real_model_makes_the_text_of_its_weights(tmp_path: Path) -> None:
    """SmolLM2, all of it, in the recipe with more to it; the small model is run in each.

    Roundings of inputs grow through 30 layers, so llama.cpp is as near to exact arithmetic as our model of it is, not
    nearer to that model.
    """
    model = LlamaForCausalLM(smollm2.config()).to(torch.bfloat16).eval()
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in smollm2.iter_weights(params):
            params[name].copy_(weight)
    quantize_(model, NVFP4BlockScaling(), exclude=("lm_head",))
    path = export_gguf(model, tmp_path / "out.gguf", like=smollm2.find_gguf(), progress=False)
    prompt = smollm2.tokenizer()("The capital of France is").input_ids
    tokens, found = next_tokens(path, prompt, 3, model.config.vocab_size)
    sequence = [*prompt, *tokens[:-1]]
    exact = reference(model, sequence, len(prompt), rounded=False)
    theirs = reference(model, sequence, len(prompt), rounded=True)
    assert error(found, exact) < 2 * error(theirs, exact) < float(exact.std()) / 4
    chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]  # no other token is ahead by more than both errors
    assert bool((exact.amax(1) - chosen <= 4 * (theirs - exact).abs().amax(1)).all())
