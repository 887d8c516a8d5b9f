"""Products of quantized operands in bf16, where nothing is rounded that would not be rounded otherwise.

Where the hardware has no product for a format, its operands are decoded. Elements have few significant bits, and so
have most of them under the scale of their block:

    MXFP8, MXFP4   q * 2^s                   at most 4 bits
    NVFP4          q * s, s in E4M3          2 bits * 4 bits: at most 6
    Float8         q                         at most 4
    INT8           q                         at most 7

bf16 holds 8. So a bf16 product at full speed multiplies the very numbers that an fp32 one would, and adds them as
torch's bf16 products do: in fp32, but for the parts of a long sum that is split, if torch's switch
`allow_bf16_reduced_precision_reduction` is on, as it is by default.
Scales that are no powers of two (of rows, or of the tensor) are factors of the sums, in fp32, as the hardware has them.

The range of bf16 is that of fp32, down to 2^-126; below, its steps are 2^-133 and those of fp32 2^-149. Only MXFP8
comes there. Values that were quantized from bf16 or fp16 are exact all the same: they were multiples of 2^-133, and an
element finer than that is the value itself. A weight quantized from fp32 may have others, in blocks whose scale is
below 2^-124 (E5M2: 2^-117). They enter as `dequantize(torch.bfloat16)` gives them: changed by at most 2^-134. Above,
bf16 and fp32 overflow at the same power of two.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import kernels
from qtensor.products.emulation import without_autocast
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of

Parts = Mapping[str, Tensor]
KINDS = ("cuda",)  # of devices: a CPU multiplies bf16 no faster than fp32
DTYPES = (torch.bfloat16, torch.float16)  # of inputs whose quantized values bf16 holds


def holds(device: torch.device, recipe: Recipe, dtype: torch.dtype) -> bool:
    """Return whether products of operands of a recipe, quantized from `dtype`, are taken in bf16 on a device."""
    return device.type in KINDS and torch.version.hip is None and dtype in DTYPES and format_of(recipe).exact_in_bf16


def multiply(a: Parts, of_a: Recipe, b: Parts, of_b: Recipe, dtype: torch.dtype) -> Tensor:
    """Return the product of operands [M, C] and [L, C] in `dtype`, [M, L], rounded once."""
    (x, x_factors), (w, w_factors) = (_values(parts, recipe) for parts, recipe in ((a, of_a), (b, of_b)))
    with without_autocast(x.device):
        if x_factors is w_factors is None and dtype == torch.bfloat16:
            return x @ w.t()
        sums = _sums(x, w)
    for factors in (x_factors, None if w_factors is None else w_factors.reshape(1, -1)):
        sums = sums if factors is None else sums * factors
    return sums.to(dtype)


def _values(parts: Parts, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Return (values in bf16, exact; fp32 factors of their rows, [rows, 1] or [], or None)."""
    rest, factors = format_of(recipe).without_factors(parts, recipe)
    return kernels.decode(rest, recipe, torch.bfloat16), factors


def _sums(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w.T of bf16 operands in fp32."""
    if not is_tracing() and 0 in (*x.shape, w.shape[0]):
        return x.new_zeros((x.shape[0], w.shape[0]), dtype=torch.float32)
    if x.device.type == "cuda":
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return x.float() @ w.float().t()
