"""Products of bf16 matrices in fp32: the values, in forward and backward, and no multiplication that is left out."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from examples import cpu_products
from examples.cpu_products import BF16, Fp32, Products
from qtensor import MXFP8BlockScaling, QuantizedTensor, quantize, quantized_model_init


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def gradients(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of a linear layer."""
    x, leaf = drawn(8, 64).requires_grad_(), weight.detach().clone().requires_grad_()
    y = F.linear(x, leaf)
    y.backward(drawn(8, 96))
    assert x.grad is not None
    assert leaf.grad is not None
    return y.detach(), x.grad, leaf.grad


@pytest.mark.parametrize("quantized", [False, True])
def test_a_product_is_the_rounded_one_of_fp32(quantized: bool) -> None:
    weight = quantize(drawn(96, 64), MXFP8BlockScaling()) if quantized else drawn(96, 64)
    values = weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight.float()
    x, dy = drawn(8, 64).float(), drawn(8, 96).float()
    with Fp32():
        found = gradients(weight)
    for mine, wanted in zip(found, (x @ values.T, dy @ values, dy.T @ x), strict=True):
        assert torch.equal(mine, wanted.bfloat16())


def test_products_of_fp32_stay_what_they_are() -> None:
    x, w = drawn(8, 64).float(), drawn(96, 64).float()
    with Fp32():
        assert torch.equal(F.linear(x, w), x @ w.T)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_multiplication_of_a_model_is_known(attention: str) -> None:
    """torch counts the operations that multiply; and the loss is that of ordinary bf16, but for its roundings."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    with quantized_model_init(MXFP8BlockScaling()):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation=attention, **sizes)).bfloat16()
    tokens, losses = torch.arange(32)[None] % 64, []
    for products in (BF16, Products(kind="fp32")):
        with FlopCounterMode(display=False) if products is BF16 else nullcontext() as counter, products.computed():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        losses.append(loss.item())
        if counter is not None:
            multiplied = set(counter.get_flop_counts()["Global"])
            assert multiplied <= {known.overloadpacket for known in cpu_products.MULTIPLICATIONS}
    assert losses[1] == pytest.approx(losses[0], rel=2**-6)  # bf16 has 8 bits, and a handful of roundings add up


def test_the_probe_takes_what_is_faster() -> None:
    assert cpu_products.chosen(0.6, 40.0) == "fp32"
    assert cpu_products.chosen(180.0, 77.0) == "bf16"
    assert cpu_products.chosen(30.0, 40.0) == "bf16"  # casting costs, too
    found = cpu_products.probe()
    assert "GFLOP/s" in str(found)
    assert type(found.computed()) is (Fp32 if found.kind == "fp32" else nullcontext)
