"""Train what is deployed: after quantization-aware training the exported model has the very loss of the training.

    weights alone       Q(w) decodes to bf16 numbers; both sides then run torch's own products of equal operands
    weights and inputs  in fp32 both sides multiply the decoded operands, which are equal where the client's rule for
                        scales of inputs is ours

Dense weights are trained by a few steps, and the bytes that their forwards used are exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sampling import sampled

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dcp_adapters import export_hf, fused_linears
from fsdp_hooks import sync_scales
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MasterWeightOptimizer,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
    share_scales,
)
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.dcp_adapters.hf.exports import assert_equal, linears, llama, loaded, raw
from tests.qtensor.test_products import accumulation_bound

TOKENS = (torch.arange(16) * torch.arange(1, 5)[:, None]) % 128
NVFP4 = NVFP4BlockScaling()
WEIGHTS = {
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "float8_row": Float8CurrentScaling(),
    "float8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "int4": Int4GroupScaling(),
    "int4_64": Int4GroupScaling(group=64),
    "nvfp4": NVFP4,
}


def built(recipe: Any, storage: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """The tied tiny model of these tests; its linears in this storage, the head dense as its embedding is."""
    config: LlamaConfig = llama(tied=True).config
    config.dtype = dtype
    with quantized_model_init(recipe, storage=storage):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    share_scales(model, fused_linears(model))
    return model


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights to begin with: those of k and up are smaller than those of what engines fuse them with."""
    return {
        name: value.to(dtype) * (0.75 if name.endswith(("k_proj.weight", "up_proj.weight")) else 1)
        for name, value in llama(tied=True).state_dict().items()
    }


def loss_of(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss  # type: ignore[no-any-return]


def trained(recipe: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[LlamaForCausalLM, list[float]]:
    """A model after three steps of its linear weights, through their quantization, and the losses."""
    model = built(recipe, "high_precision", dtype)
    model.load_state_dict(start(dtype))
    assert sync_scales(model) == 0  # in one process, only fused linears have something to agree on
    weights = [param for param in model.parameters() if isinstance(param, HighPrecisionWeight)]
    assert len(weights) == 2 * 7
    optimizer = torch.optim.SGD(weights, lr=0.02)
    losses = []
    for _ in range(3):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync_scales(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model, losses


def exported(model: LlamaForCausalLM, recipe: Any, path: Path, **options: Any) -> LlamaForCausalLM:
    """Writes the bytes that the model's forwards use; returns the model with quantized storage that holds them."""
    quantized = built(recipe, "quantized", model.dtype)
    quantized.load_state_dict(model.state_dict())
    for module in linears(model):
        if module != "lm_head":
            weight, used = quantized.get_submodule(module).weight, model.get_submodule(module).weight.quantize()
            for name, part in used.parts().items():
                assert torch.equal(raw(weight.parts()[name]), raw(part)), (module, name)
    export_hf(model, path, progress=False, **options)
    return quantized


@sampled("name", WEIGHTS, ["float8_row", "mxfp8", "nvfp4"])
def test_the_loss_of_trained_weights_is_that_of_the_exported_ones(name: str, tmp_path: Path) -> None:
    """Bit for bit: transformers dequantizes to the bf16 numbers that training multiplied by."""
    recipe = WEIGHTS[name]
    model, losses = trained(recipe)
    quantized = exported(model, recipe, tmp_path / "out")
    client = loaded(tmp_path / "out", dequantize=True)
    for module in linears(model):
        if module != "lm_head":
            weight = quantized.get_submodule(module).weight
            assert isinstance(weight, QuantizedTensor)
            assert_equal(module, client.get_submodule(module).weight, weight.dequantize())
    with torch.no_grad():
        found, expected = loss_of(client), loss_of(model)
    assert torch.equal(found, expected)
    assert found != losses[0], "the model of before the training"
    dense = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.equal(found, loss_of(dense)), "the loss of the dense weights would be as good"


def trained_with_masters(recipe: Any) -> tuple[LlamaForCausalLM, list[float]]:
    """A model with quantized storage after three steps of its linear weights' masters, and the losses."""
    model = built(recipe, "quantized", torch.bfloat16)
    model.load_state_dict(start(torch.bfloat16))
    weights = [(name, param) for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)]
    optimizer, losses = MasterWeightOptimizer(torch.optim.SGD, weights, lr=0.02), []
    for _ in range(3):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return model, losses


@pytest.mark.parametrize("name", ["nvfp4", "float8_tensor"])
def test_the_loss_of_quantized_storage_is_that_of_its_export(name: str, tmp_path: Path) -> None:
    """Fused linears have one scale behind every step, and are exported as they are."""
    model, losses = trained_with_masters(WEIGHTS[name])
    export_hf(model, tmp_path / "out", progress=False)
    with torch.no_grad():
        found, expected = loss_of(loaded(tmp_path / "out", dequantize=True)), loss_of(model)
    assert torch.equal(found, expected)
    assert found < losses[-1]


def test_nvfp4_of_fused_linears_that_share_no_scale_is_refused_or_rounded_again(tmp_path: Path) -> None:
    """The one case in which the loss is another one: global scales that training gave to q, k and v one by one."""
    model, _ = trained(NVFP4)
    assert share_scales(model, []) == []
    with pytest.raises(ValueError, match="global scale"):
        export_hf(model, tmp_path / "refused", progress=False)
    export_hf(model, tmp_path / "out", progress=False, fused_scales="requantize")
    with torch.no_grad():
        found, expected = loss_of(loaded(tmp_path / "out", dequantize=True)), loss_of(model)
    assert not torch.equal(found, expected)


def test_the_loss_of_trained_inputs_is_that_of_the_exported_ones(tmp_path: Path) -> None:
    """W8A8 in MXFP8, fp32 around it: the client's scales of inputs are ours (but for an amax of exactly 1.75 * 2^n)."""
    recipe = MXFP8BlockScaling(activations="dynamic")
    model, _ = trained(recipe, torch.float32)
    exported(model, recipe, tmp_path / "out")
    client = torch.nn.Module.float(loaded(tmp_path / "out", dequantize=False))  # from bf16, which is exact for MXFP8
    with torch.no_grad():
        assert torch.equal(loss_of(client), loss_of(model))
        weights_alone = built(MXFP8BlockScaling(), "high_precision", torch.float32)
        weights_alone.load_state_dict(model.state_dict())
        assert not torch.equal(loss_of(client), loss_of(weights_alone)), "the client does not quantize inputs"


def test_in_bf16_each_linear_with_trained_inputs_differs_by_the_order_of_its_sums(tmp_path: Path) -> None:
    """Of equal operands, so that two fp32 sums in any order, rounded to bf16, bound the difference."""
    recipe = MXFP8BlockScaling(activations="dynamic")
    model, _ = trained(recipe)
    exported(model, recipe, tmp_path / "out")
    client, seen = loaded(tmp_path / "out", dequantize=False), {}

    def note(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        seen[module] = inputs[0].flatten(0, -2), output.flatten(0, -2)  # [tokens, K], [tokens, N]

    names = [name for name in linears(model) if name != "lm_head"]
    for name in names:
        client.get_submodule(name).register_forward_hook(note)
    with torch.no_grad():
        loss_of(client)
        for name in names:
            x, y = seen[client.get_submodule(name)]
            layer = model.get_submodule(name)
            operands = quantize(x, MXFP8BlockScaling()), layer.weight.quantize()
            bound = accumulation_bound(*(operand.dequantize(torch.float32) for operand in operands), torch.bfloat16)
            assert bool(((layer(x).double() - y.double()).abs() <= bound).all()), name
            unrounded = x @ layer.weight.quantize().dequantize().T
            assert not bool(((unrounded.double() - y.double()).abs() <= bound).all()), name
