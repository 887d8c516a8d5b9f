"""peft on a quantized base: what prepares a model for it, and adapters on the stacked weights of experts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.qtensor.recipes_under_test import every_main_recipe, main_recipes, same_parts, weight

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks

MXFP8 = MXFP8BlockScaling()
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
IDS = torch.tensor([[1, 5, 9, 2, 7, 3, 8]])


# -- prepare_model_for_kbit_training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_a_model_is_prepared_whole_and_its_quantized_bytes_stay(storage: str) -> None:
    torch.manual_seed(0)
    with quantized_model_init(MXFP8, storage=storage):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    held = model.model.layers[0].mlp.up_proj.weight
    before = held.detach().clone()
    prepared = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    param = prepared.model.layers[0].mlp.up_proj.weight
    assert param is held
    assert all(each.dtype == torch.float32 and not each.requires_grad for each in prepared.parameters())
    if isinstance(before, QuantizedTensor):
        assert same_parts(param.detach(), before)
        assert torch.equal(param.dequantize(), before.dequantize(torch.float32))
    else:
        assert isinstance(param, HighPrecisionWeight)
        assert torch.equal(param.detach().dense, before.dense.float())
    adapted = get_peft_model(prepared, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name for name, each in adapted.named_parameters() if each.grad is not None}
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)


# -- .data -------------------------------------------------------------------------------------------------------------


@every_main_recipe
def test_data_takes_a_weight_of_the_same_recipe_and_shape(recipe: Any) -> None:
    param, other = (nn.Parameter(quantize(weight(64, 64, seed=seed), recipe)) for seed in (0, 1))
    param.data = other.data.to(torch.float32)
    assert isinstance(param, nn.Parameter)
    assert param.dtype == torch.float32
    assert param.requires_grad
    assert same_parts(param.detach(), other.detach())
    assert param.data_ptr() == 0
    assert torch.equal(nn.functional.linear(torch.eye(64), param), other.dequantize(torch.float32).t())
    alias = other.detach()
    param.data = other.data
    alias.zero_()  # aliased, as a plain tensor's
    assert not param.dequantize().any()


def test_data_of_a_weight_updated_in_place_is_written_once() -> None:
    param = nn.Parameter(quantize(weight(64, 64, torch.float32), MXFP8))
    expected = param.detach().clone().add_(torch.ones(64, 64))
    param.data += torch.ones(64, 64)
    assert same_parts(param.detach(), expected)


@pytest.mark.parametrize("dense", [False, True], ids=["quantized", "high_precision"])
def test_data_of_anything_else_is_refused_and_nothing_is_written(dense: bool) -> None:
    def make(rows: int = 64, recipe: Any = MXFP8) -> Any:
        q = quantize(weight(rows, 64), recipe)
        return HighPrecisionWeight(q.dequantize(), recipe) if dense else q

    param = nn.Parameter(make())
    before = copy.deepcopy(param)
    for value in (make(32), make(recipe=NVFP4BlockScaling()), weight(64, 64), make()[:64].view(-1)):
        with pytest.raises(NotImplementedError, match=r"assigning \.data of a quantized weight.*copy_\(value\)"):
            param.data = value
    values = [each.detach().dense if dense else each.detach().dequantize() for each in (param, before)]
    assert torch.equal(*values)


# -- target_parameters -------------------------------------------------------------------------------------------------


@functools.cache
def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)).to(torch.bfloat16)


def experts(model: nn.Module, recipe: Any, *, quantized: bool, trained: bool = False) -> nn.Module:
    """The model with the stacks of its experts [E, N, K] quantized, or dense of the same values."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.ndim == 3:
                q = quantize(param.detach(), recipe)
                setattr(module, name, nn.Parameter(q if quantized else q.dequantize(), requires_grad=trained))
    return model


def adapted(recipe: Any, *, quantized: bool, implementation: str) -> Any:
    model = experts(copy.deepcopy(mixtral()), recipe, quantized=quantized)
    model.set_experts_implementation(implementation)
    torch.manual_seed(1)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    return get_peft_model(model, config)


def run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out.logits, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def compared(recipe: Any, implementation: str) -> None:
    models = [adapted(recipe, quantized=quantized, implementation=implementation) for quantized in (True, False)]
    stacks = {name: param.detach().clone() for name, param in models[0].named_parameters() if param.ndim == 3}
    assert len(stacks) == 2
    assert all(isinstance(stack, QuantizedTensor) for stack in stacks.values())
    (logits, grads), (expected, others) = map(run, models)
    assert torch.equal(logits, expected)
    assert grads.keys() == others.keys()
    assert len(grads) == 6
    assert all("lora_" in name for name in grads)
    assert all(torch.equal(grad, others[name]) for name, grad in grads.items())
    after = dict(models[0].named_parameters())
    assert all(same_parts(after[name].detach(), stack) and after[name].grad is None for name, stack in stacks.items())


@main_recipes
def test_adapters_of_quantized_experts_compute_what_those_of_dense_ones_do(recipe: Any) -> None:
    compared(recipe, "eager")


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_so_they_do_in_every_implementation_of_experts(implementation: str) -> None:
    compared(MXFP8, implementation)


def test_the_gradient_of_a_sum_passes_straight_through_to_a_stack() -> None:
    stack = torch.stack([weight(32, 64, seed=seed) for seed in range(3)])
    q = nn.Parameter(quantize(stack, MXFP8))
    plain = nn.Parameter(q.detach().dequantize())
    upstream = torch.stack([weight(32, 64, seed=9 + seed) for seed in range(3)])
    found = []
    for w in (q, plain):
        a, b = (nn.Parameter(torch.stack([weight(*shape, seed=4)] * 3)) for shape in ((32, 4), (4, 64)))
        y = torch.baddbmm(w, a, b, beta=0.5, alpha=0.25)
        y.backward(upstream)
        found.append((y.detach(), w.grad, a.grad, b.grad))
    assert type(found[0][1]) is Tensor
    assert all(map(torch.equal, *found))


def test_a_sum_is_refused_where_products_take_quantized_inputs() -> None:
    q = quantize(weight(32, 64)[None], MXFP8BlockScaling(activations="dynamic"))
    with pytest.raises(NotImplementedError, match=r'baddbmm.*activations="dynamic" is defined for linear'):
        torch.baddbmm(q, weight(32, 4)[None], weight(4, 64)[None])
