"""Calls of torch that multiply grouped tokens by a stack of experts, if a recipe quantizes their inputs.

    F.grouped_mm(x, w.transpose(-2, -1), offs=ends)      x [T, K], w [E, N, K], ends [E] int32 -> [T, N]
    torch.bmm(x, w.transpose(-2, -1)), x @ w.mT          x [E, T, K] -> [E, T, N]: groups of T tokens each

They are taken before autograd, as F.linear is. Below autograd, where a subclass around the stack has hidden it, the
forward product alone is defined: torch would follow it with dense gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks import torch_private
from fsdp_hooks.torch_private import without_torch_function
from qtensor.ops.table import implements
from qtensor.products.matmul import multiply
from qtensor.spec.registry import describe
from qtensor.tensor.quantized_tensor import TORCH_FUNCTIONS, QuantizedTensor

__all__: list[str] = []

aten = torch.ops.aten
USES = (
    "F.grouped_mm(x, w.transpose(-2, -1), offs=ends) with x [T, K], and torch.bmm(x, w.transpose(-2, -1)) with x "
    "[E, T, K], w a stack [E, N, K]"
)


def grouped(x: Tensor, turned: QuantizedTensor, ends: Tensor | None, name: str) -> Tensor:
    """Compute torch's function of this name for a quantized stack.

    Raises:
        NotImplementedError: the stack is not seen transposed, or x or it has other dims.
        TypeError: x is quantized.
        ValueError: shapes or ends that do not fit.
    """
    # programs without such stacks load none of it
    from qtensor.products.grouped.layout import check_ends
    from qtensor.products.grouped.linear import GroupedLinear, grouped_product

    if isinstance(x, QuantizedTensor):
        raise TypeError(f"{name}: the input is {describe(x.shape, x.recipe)}; call .dequantize() on it")
    with without_torch_function():
        shape, lens = turned.shape, turned._lens
        described = describe(shape, turned.recipe)
        if len(shape) != 3 or not lens.transposed or x.ndim not in (2, 3):
            raise NotImplementedError(
                f'{name} of an input of shape {tuple(x.shape)} with {described}: activations="dynamic" is defined for '
                f"{USES}; loop over the experts with F.linear, or call .dequantize()"
            )
        if (turned.recipe.rotates_tokens or turned.recipe.draws_gradients) and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} with {described}: gradients={turned.recipe.gradients!r} is defined for F.linear alone; "
                "loop over the experts with it, or leave gradients out of the recipe"
            )
        experts, inner, width = shape
        if x.shape[-1] != inner or (x.ndim == 3 and x.shape[0] != experts):
            raise ValueError(f"{name}: an input of shape {tuple(x.shape)} does not fit {described}, seen transposed")
        if (ends is None) is not (x.ndim == 3):
            raise ValueError(f"{name}: offs are given for an input [T, K], and for no other; got one of {x.ndim} dims")
        flat, tokens = x, x.shape[-2]
        if ends is None:
            flat = x.flatten(0, 1)
            ends = torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * tokens
        check_ends(ends, experts, flat.shape[0], flat.device)
        ends = ends.contiguous()
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            f"torch.export of {name} with {described}: an exported program must run without qtensor, and torch has no "
            'such product for it; loop over the experts with F.linear, or leave activations="dynamic" out'
        )
    if not experts:
        return x.new_zeros((*x.shape[:-1], width))
    # nothing is kept without gradients, see QuantizedLinear
    run: Any = GroupedLinear.apply if torch.is_grad_enabled() else grouped_product
    y: Tensor = run(flat, turned, ends)
    return y if x.ndim == 2 else y.view(experts, tokens, width)


def is_stack(value: Any) -> bool:
    """Return whether it is a quantized weight whose inputs are to be quantized, too."""
    return isinstance(value, QuantizedTensor) and value.recipe.activations is not None and value.payload.ndim > 1


def grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm`."""
    if not is_stack(mat2):
        with without_torch_function():
            return F.grouped_mm(self, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
    if bias is not None or out_dtype not in (None, self.dtype):
        raise NotImplementedError("grouped_mm with a bias or another out_dtype; add the bias, or cast, behind it")
    return grouped(self, mat2, offs, "grouped_mm")  # type: ignore[arg-type]


def bmm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - torch's own argument name
    """Compute `torch.bmm`."""
    if not is_stack(mat2) or args or kwargs:
        with without_torch_function():
            return torch.bmm(input, mat2, *args, **kwargs)
    return grouped(input, mat2, None, "bmm")  # type: ignore[arg-type]


def matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Tensor:  # noqa: A002 - likewise
    """Compute `torch.matmul`, which is bmm for two stacks."""
    if not kwargs and is_stack(other) and isinstance(input, Tensor):
        with without_torch_function():
            stacks = other.ndim == input.ndim == 3
        if stacks:
            return grouped(input, other, None, "matmul")  # type: ignore[arg-type]
    with without_torch_function():
        return torch.matmul(input, other, **kwargs)


TORCH_FUNCTIONS[torch_private.grouped_mm] = grouped_mm
TORCH_FUNCTIONS[torch.bmm] = TORCH_FUNCTIONS[torch.Tensor.bmm] = bmm
TORCH_FUNCTIONS[torch.matmul] = TORCH_FUNCTIONS[torch.Tensor.matmul] = matmul
TORCH_FUNCTIONS[torch.Tensor.__matmul__] = matmul


# grouped_mm: what torch.nn.functional.grouped_mm calls
_BELOW: dict[Any, Any] = {aten.bmm.default: bmm, aten._grouped_mm.default: grouped_mm}  # noqa: SLF001 - the op's name


@implements(*_BELOW)
def below_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute the forward product of quantized inputs, or what `multiply` does."""
    stack = args[1]
    if is_stack(stack) and stack._lens.transposed and not torch.is_grad_enabled():
        return _BELOW[func](*args, **kwargs)  # type: ignore[no-any-return]
    return multiply(func, args, kwargs)  # type: ignore[no-any-return]
