"""accelerate builds parameters anew by their class, and takes their address for who they are; its own functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_in_model
from accelerate.big_modeling import init_on_device
from accelerate.utils import set_module_tensor_to_device
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_hooks import sync_scales
from qtensor import (
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
    share_scales,
)
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.qtensor.recipes_under_test import main_recipes, same_parts, weight

MXFP8 = MXFP8BlockScaling()
CPU, META = torch.device("cpu"), torch.device("meta")
STORAGES = {"quantized": QuantizedTensor, "high_precision": HighPrecisionWeight}
storages = pytest.mark.parametrize("storage", STORAGES)


def net(linears: int = 2) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(linears)])


def built(storage: str, recipe: Any = MXFP8, linears: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage=storage):
        return net(linears)


def values(param: Tensor) -> Tensor:
    return param.detach().dequantize() if isinstance(param, QuantizedTensor) else param.detach().dense


@storages
@pytest.mark.parametrize("outside", [True, False], ids=["around", "inside"])
@pytest.mark.parametrize("buffers", [False, True])
def test_an_empty_model_is_that_of_the_meta_device(storage: str, outside: bool, buffers: bool) -> None:
    empty, quantized = init_empty_weights(include_buffers=buffers), quantized_model_init(MXFP8, storage=storage)
    first, second = (empty, quantized) if outside else (quantized, empty)
    with first, second:
        model = net()
    weights = [linear.weight for linear in model]
    assert all(isinstance(w, nn.Parameter) and w.is_meta and w.requires_grad for w in weights)
    assert all(type(w) is type(linear.weight) for w, linear in zip(weights, built(storage), strict=True))
    model.to_empty(device="cpu")
    other = built(storage)
    model.load_state_dict(other.state_dict())
    x = weight(4, 64)
    assert torch.equal(model(x), other(x))
    model(x).sum().backward()
    assert model[0].weight.grad is not None


@storages
def test_weights_are_built_on_a_device_with_the_values_they_had(storage: str) -> None:
    torch.manual_seed(0)
    with init_on_device(CPU), quantized_model_init(MXFP8, storage=storage):
        model = net()
    for one, other in zip(model, built(storage), strict=True):
        assert isinstance(one.weight, STORAGES[storage])
        assert torch.equal(values(one.weight), values(other.weight))


@storages
def test_an_empty_tied_head_stays_dense(storage: str) -> None:
    options = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64, **options)
    with init_empty_weights(), quantized_model_init(MXFP8, storage=storage):
        model = LlamaForCausalLM(config)
    model.tie_weights()
    with META, quantized_model_init(MXFP8, storage=storage):
        expected = LlamaForCausalLM(config)
    kinds, others = ({name: type(param) for name, param in one.named_parameters()} for one in (model, expected))
    assert kinds == others
    assert model.lm_head.weight is model.model.embed_tokens.weight


@storages
def test_a_tensor_of_a_module_is_moved_and_exchanged(storage: str) -> None:
    model = built(storage)
    model[0].weight.mark = "kept"
    before = values(model[1].weight)
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.is_meta
    assert isinstance(model[0].weight, nn.Parameter)
    set_module_tensor_to_device(model, "0.weight", "meta", dtype=torch.float32)
    assert model[0].weight.dtype == torch.float32
    model[1].weight.requires_grad_(False)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=model[1].weight.detach())
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.equal(values(model[0].weight), before)


@main_recipes
@storages
def test_an_offloaded_model_computes_what_it_computed(storage: str, recipe: Any) -> None:
    model, x = built(storage, recipe), weight(4, 64)
    expected = model(x)
    cpu_offload(model, execution_device=CPU)
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(model(x), expected)
    assert all(param.is_meta for param in model.parameters())


@storages
def test_tied_weights_do_not_take_the_place_of_all_others(storage: str) -> None:
    model, x = built(storage, linears=4), weight(4, 64)
    model[2].weight = model[0].weight
    expected = model(x)
    dispatch_model(model, dict.fromkeys("0123", "cpu"), main_device="cpu", force_hooks=True)
    assert model[2].weight is model[0].weight
    assert model[1].weight is not model[0].weight
    assert torch.equal(model(x), expected)


@storages
def test_the_address_is_0_to_everybody_else(storage: str) -> None:
    param = built(storage)[0].weight
    assert param.data_ptr() == 0
    assert param.detach().data_ptr() == 0


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(TypeError) as raised:
        make()
    return str(raised.value)


@storages
def test_dense_values_without_a_recipe_are_refused_with_what_to_do(storage: str, tmp_path: Path) -> None:
    model = built(storage)
    before = values(model[0].weight)
    text = (
        f"{STORAGES[storage].__name__} of a dense tensor (64, 64): nothing says by which recipe. accelerate's "
        "set_module_tensor_to_device does this with dense values, as do disk_offload and load_checkpoint_in_model "
        'with a device_map; build the model inside torch.device("meta") and quantized_model_init, call '
        "model.to_empty(device=...), and load by model.load_state_dict, or by dcp.load; or give the quantized "
        "value, quantize(value, recipe)"
    )
    assert refusal(lambda: set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(64, 64))) == text
    ones = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    save_file(ones, tmp_path / "model.safetensors")
    assert refusal(lambda: load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})) == text
    assert torch.equal(values(model[0].weight), before)
    load_checkpoint_in_model(model, tmp_path)  # by load_state_dict, which quantizes
    assert isinstance(model[0].weight, STORAGES[storage])
    assert torch.equal(values(model[0].weight), torch.ones(64, 64, dtype=torch.bfloat16))


@storages
def test_a_dense_value_with_the_attributes_of_a_parameter_is_quantized_as_that_was(storage: str) -> None:
    param = built(storage, MXFP4BlockScaling(scale_rounding="floor"))[0].weight
    param.mark = "kept"
    made = type(param)(weight(64, 64), **vars(param), requires_grad=False)
    assert isinstance(made, nn.Parameter)
    assert (made.recipe, made.mark, made.requires_grad) == (param.recipe, "kept", False)
    found = made.detach() if storage == "quantized" else made.detach().quantize()
    assert same_parts(found, quantize(weight(64, 64), param.recipe))


@storages
def test_nothing_but_a_value_is_enough_where_it_has_a_recipe(storage: str) -> None:
    param = built(storage, MXFP4BlockScaling())[0].weight
    made = type(param)(param.detach())
    assert isinstance(made, nn.Parameter)
    assert isinstance(made, STORAGES[storage])
    assert made.recipe == param.recipe
    assert torch.equal(values(made), values(param))
    assert "nothing says by which recipe" in refusal(lambda: type(param)(torch.ones(64, 64)))


@storages
def test_a_dense_value_shares_the_scale_that_the_parameter_shares(storage: str) -> None:
    model = built(storage, NVFP4BlockScaling())
    share_scales(model, [["0", "1"]])
    param = model[0].weight
    model[0].weight = type(param)(weight(64, 64) * 8, **vars(param))
    sync_scales(model)
    weights = [linear.weight.detach() for linear in model]
    q, other = weights if storage == "quantized" else [each.quantize() for each in weights]
    assert torch.equal(q.global_scale, other.global_scale)


def test_weights_of_the_other_storage_are_refused() -> None:
    quantized, dense = (built(storage)[0].weight for storage in STORAGES)
    for kind, value in ((quantized, dense), (dense, quantized)):
        text = refusal(lambda kind=kind, value=value: type(kind)(value.detach(), requires_grad=True))
        assert re.search(r"can not take the place of a parameter of this class.*assign nn.Parameter\(value\)", text)


def test_offload_to_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"aten\.view\.dtype is not defined for quantized"):
        disk_offload(built("quantized"), str(tmp_path), execution_device=CPU)
    model = built("high_precision")
    disk_offload(model, str(tmp_path), execution_device=CPU)
    assert "nothing says by which recipe" in refusal(lambda: model(weight(4, 64)))
