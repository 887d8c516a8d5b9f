"""SmolLM2, cut to its first layers and tokens, quantized in every way; and what its products and its text should be.

Two references of each model, in transformers: `bf16`, as it computes, and `exact`, the same weights and the same codes
of inputs in fp32. vLLM rounds to bf16 where transformers does, in another order, so it may be as far from `exact` as
transformers is; FACTOR is the room for the order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from dcp_adapters import export_hf
from examples import smollm2
from layerwise import calibrate
from qtensor import NVFP4BlockScaling, QuantizedTensor, quantize_
from qtensor.spec.recipes import Recipe

LAYERS, TOKENS = 2, 2048
FACTOR = 2.0
PROMPT = torch.randint(TOKENS, (1, 24), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
BATCHES = [torch.randint(TOKENS, (2, 32), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


@dataclass(frozen=True)
class Written:
    """A quantized model, and where it was exported.

    dense: the model before. weights: module -> quantized weight. inputs: module -> static scale of its inputs.
    """

    path: Path
    dense: LlamaForCausalLM
    recipe: Recipe | None
    weights: dict[str, QuantizedTensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def reference(self, *, exact: bool, inputs: bool) -> LlamaForCausalLM:
        """The dense architecture with the decoded weights; `inputs`: with the inputs of these linears quantized."""
        model = copy.deepcopy(self.dense)
        model = model.float() if exact else model
        for module, weight in self.weights.items():
            linear = model.get_submodule(module)
            with torch.no_grad():
                linear.weight.copy_(weight.dequantize(torch.bfloat16))
            if inputs:
                linear.register_forward_pre_hook(self.rounding(module))
        return model

    def rounding(self, module: str) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
        """A hook that gives a linear the values of its input's codes."""
        return lambda _, args: self.rounded(module, args[0])

    def rounded(self, module: str, x: Tensor) -> Tensor:
        """The values of vLLM's codes of x [.., K]: under a scale for each row, or the static one."""
        if isinstance(self.recipe, NVFP4BlockScaling):
            return nvfp4_values(x, self._divisor(module))
        codes, scale = float8_codes(x)
        return (codes.float() * scale).to(x.dtype)

    def products_of_codes(self, modules: Sequence[str], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the Float8 codes of x [n, K] and of weights: bf16 [n, N], exact, and the least and the largest that fp32
        may make of it, which sums in any order and then multiplies by both scales.
        """
        codes, scale = float8_codes(x)
        weights = [self.weights[module].parts() for module in modules]
        payload = torch.cat([parts["payload"] for parts in weights]).double()  # [N, K]
        scales = scale.double() * torch.cat([parts["scale"] for parts in weights]).double().T  # [n, N]
        exact = codes.double() @ payload.T * scales  # sums of multiples of 2^-18 below 2^29: fp64 holds them
        sizes = codes.double().abs() @ payload.abs().T * scales
        # Each of K - 1 sums and 2 scalings is off by 2^-24 of `sizes` at most; one more covers errors of errors.
        room = sizes * (x.shape[1] + 2) * 2**-24
        return exact.bfloat16(), (exact - room).bfloat16(), (exact + room).bfloat16()

    def _divisor(self, module: str) -> Tensor:
        """By what vLLM divides NVFP4 inputs: as the file has it, or the reciprocal of what it has."""
        held = load_file(self.path / "model.safetensors")
        stored = held.get(f"{module}.input_global_scale")
        return torch.reciprocal(held[f"{module}.input_scale"].float()) if stored is None else stored.float()


def float8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's codes of x [.., K] and scales [.., 1]; our quantize divides by amax where this multiplies by 1 / scale.

    Source: QuantFP8.forward_native of vLLM 0.32.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1 / (448 * 512))
    return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def nvfp4_values(x: Tensor, divisor: Tensor) -> Tensor:
    """The values of vLLM's codes of x [.., K], under the static scale 1 / `divisor`.

    Source: ref_nvfp4_quant_dequant of vLLM 0.32. Against ours it rounds a reciprocal more or less in the scale of a
    block, in the quotients and in the values, each of which may lie on a tie.
    """
    blocks = x.unflatten(-1, (-1, 16)).float()
    scale = divisor * (blocks.abs().amax(-1, keepdim=True) * (1 / 6))
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn).float()
    quotient = blocks * (1 / (scale * (1 / divisor))).nan_to_num(posinf=0)  # of a block of zeros
    codes = quotient.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype("float32")
    return (torch.from_numpy(codes) * (scale / divisor)).flatten(-2).to(x.dtype)


def cut_model(layers: int | None = LAYERS, tokens: int | None = TOKENS) -> LlamaForCausalLM:
    """The real weights of the first layers, for the first tokens; None: of all."""
    config = smollm2.config()
    config.num_hidden_layers = layers or config.num_hidden_layers
    config.vocab_size = tokens or config.vocab_size
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in smollm2.iter_weights(params):
            params[name].copy_(weight[: params[name].shape[0]])
    return model


def written(path: Path, model: LlamaForCausalLM, recipe: Recipe | None, layout: str, *, static: bool) -> Written:
    """Quantize a copy of the model, and export it."""
    if recipe is None:
        model.save_pretrained(path)  # export_hf writes quantized weights alone
        return Written(path, model, None)
    if static:
        result = calibrate(copy.deepcopy(model), BATCHES, recipe=recipe, inputs="static", progress=False)
        state = dict(result.state_dict())
        export_hf(result, path, rest=model, config=model.config, layout=layout, progress=False)
    else:
        quantized = copy.deepcopy(model)
        quantize_(quantized, recipe, exclude=("lm_head",))
        state = dict(quantized.state_dict())
        export_hf(quantized, path, layout=layout, fused_scales="requantize", progress=False)
    weights = {n.removesuffix(".weight"): value for n, value in state.items() if isinstance(value, QuantizedTensor)}
    inputs = {n.removesuffix(".input_scale"): value for n, value in state.items() if n.endswith(".input_scale")}
    return Written(path, model, recipe, weights, inputs)


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, tokens: Tensor = PROMPT) -> Tensor:
    """fp32 [positions, vocabulary]."""
    return model(tokens).logits[0].float()


def error(found: Tensor, exact: Tensor) -> float:
    """Root of the mean square of a difference."""
    return float((found - exact).square().mean().sqrt())
