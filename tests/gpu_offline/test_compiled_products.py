"""What torch.compile makes, for a GPU that is not there, of a block whose products have quantized inputs.

Quantization is plain operations to it: it is in the kernel of the norm or of the activation function in front of a
linear, and of the gradient in backward. What is made of the weight is hidden, and so never kept from forward.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import qtensor as qt

TOKENS, WIDTH, HIDDEN = 2048, 512, 1024
RECIPES = {
    "row": qt.Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "tensor": qt.Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "mxfp8": qt.MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
    "nvfp4": qt.NVFP4BlockScaling(activations="dynamic"),
    "fast": qt.Float8CurrentScaling(activations="dynamic", gradients="e5m2", accumulation="fast"),
}
float8 = pytest.mark.parametrize("name", ["row", "tensor"])


class Block(nn.Module):
    """A residual MLP behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


@functools.cache
def code(name: str) -> tuple[str, str]:
    """Of forward and of backward."""
    from tests.gpu_offline.emitted import code_of

    with FakeTensorMode():
        with torch.device("cuda"), qt.quantized_model_init(RECIPES[name]):
            block = Block()
        forward, backward = code_of(
            block, torch.empty(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
        )
    return forward, backward


def body(text: str) -> str:
    """The part that allocates and launches."""
    return text[text.index("def call(") :]


def kernel_with(text: str, *operations: str) -> bool:
    """Whether one Triton kernel is made of all of these operations."""
    names = re.findall(r"(triton_\w+)\.run\(", body(text))
    return any(all(operation in name for operation in operations) for name in names)


def calls(text: str, what: str) -> int:
    return body(text).count(what)


@float8
def test_quantization_is_in_the_kernel_of_what_stands_in_front(name: str) -> None:
    """The norm, the amax of each row and the codes are one kernel; so are the activation function and those."""
    forward, _ = code(name)
    kernels = re.findall(r"(triton_\w+)\.run\((.*), stream", body(forward))
    writes_codes = re.findall(r"buf\d+ = empty_strided_cuda\(\(\d+, \d+\), \(\d+, 1\), torch.float8_e4m3fn\)", forward)
    assert len(writes_codes) == 2
    assert [kernel.startswith("triton_per") for kernel, _ in kernels if "amax" in kernel] == [True, True]
    assert kernel_with(forward, "amax", "rsqrt", "clamp") or kernel_with(forward, "amax", "rms_norm", "clamp")
    assert kernel_with(forward, "amax", "silu", "clamp")


@float8
def test_only_the_products_and_what_hides_the_weight_are_no_triton(name: str) -> None:
    forward, backward = code(name)
    assert (calls(forward, "extern_kernels."), calls(backward, "extern_kernels.")) == (2, 4)
    assert (calls(forward, "extern_kernels._scaled_mm("), calls(backward, "extern_kernels._scaled_mm(")) == (2, 4)
    hidden = [set(re.findall(r"= torch\.ops\.(qtensor\.\w+)\.default\(", body(text))) for text in (forward, backward)]
    assert hidden == [set(), {"qtensor.turned_weight"}]
    assert calls(backward, "= torch.ops.qtensor.turned_weight") == 2


@float8
def test_backward_gets_no_dense_weight_and_no_codes(name: str) -> None:
    """What forward hands on: its inputs (parts of weights among them), and outputs of products and of reductions."""
    forward, _ = code(name)
    (returned,) = re.findall(r"return \((.*)\)\n", body(forward)[-2000:])
    buffers = re.findall(r"buf\d+", returned)[1:]  # the first is the output
    shapes = {
        buffer: re.search(rf"{buffer} = (?:empty_strided_cuda|reinterpret_tensor)\(.*?\)", forward)
        for buffer in buffers
    }
    for shape in (found[0] for found in shapes.values() if found is not None):
        assert "float8" not in shape
        assert f"({WIDTH}, {HIDDEN})" not in shape
        assert f"({HIDDEN}, {WIDTH})" not in shape


@float8
def test_a_gradient_is_never_stored_in_fp32(name: str) -> None:
    _, backward = code(name)
    for shape in ((TOKENS, WIDTH), (TOKENS, HIDDEN), (HIDDEN, TOKENS), (WIDTH, TOKENS)):
        assert not re.search(
            rf"empty_strided_cuda\(\({shape[0]}, {shape[1]}\), \(\d+, \d+\), torch.float32\)", backward
        )


def test_fast_accumulation_is_that_of_forward_alone() -> None:
    forward, backward = code("fast")
    assert (calls(forward, "use_fast_accum=True"), calls(forward, "use_fast_accum=False")) == (2, 0)
    assert (calls(backward, "use_fast_accum=True"), calls(backward, "use_fast_accum=False")) == (0, 4)
    forward, backward = code("row")
    assert (calls(forward, "use_fast_accum=False"), calls(backward, "use_fast_accum=False")) == (2, 4)


def test_mxfp8_is_multiplied_in_bf16_where_the_card_has_no_product_for_it() -> None:
    """No fp32 operand, and no fp32 product: the decoded values are exact in bf16."""
    forward, backward = code("mxfp8")
    assert calls(forward, "extern_kernels.mm(") + calls(forward, "extern_kernels.addmm(") == 2  # with the residual
    assert calls(backward, "extern_kernels.mm(") == calls(backward, "= torch.ops.qtensor.multiply_turned") == 2
    assert "_scaled_mm(" not in body(forward) + body(backward)
    assert not re.search(r"empty_strided_cuda\(\(\d{3,}, \d{3,}\), \(\d+, \d+\), torch.float32\)", forward)


def test_global_scales_of_nvfp4_are_factors_of_fp32_sums_of_bf16_products() -> None:
    forward, _ = code("nvfp4")
    products = re.findall(r"extern_kernels\.(\w+)\((buf\d+), ", body(forward))
    assert [name for name, _ in products] == ["mm_dtype", "mm_dtype"]
    for _, operand in products:
        assert re.search(rf"{operand} = empty_strided_cuda\(.*, torch.bfloat16\)", forward)
    assert calls(forward, "out_dtype=torch.float32") == 2
