"""The ops whose dispatch the question `overhead` looks at, and what they are applied to."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize

SIZE = 64
X = torch.ones(16, SIZE, dtype=torch.bfloat16)
OPS: dict[str, Callable[[Tensor], object]] = {
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(SIZE, SIZE),
    "view(-1)": lambda t: t.view(-1),
    "t": lambda t: t.t(),
    "slice": lambda t: t[: SIZE // 2],
    "split": lambda t: t.split(SIZE // 2),
    "as_strided": lambda t: t.as_strided((SIZE, SIZE), (SIZE, 1), 0),
    "clone": lambda t: t.clone(),
    "F.linear": lambda t: F.linear(X, t),
}
RECIPES = {"float8": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}


def operands() -> dict[str, Tensor]:
    """A weight: plain, and in every format."""
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return {"plain": weight, **{name: quantize(weight, recipe) for name, recipe in RECIPES.items()}}


def peers() -> dict[str, Tensor]:
    """The same weight in torchao's tensor subclasses."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import Float8Tensor

    weight = operands()["plain"]
    return {
        "float8": Float8Tensor.from_hp(weight),
        "mxfp8": MXTensor.to_mx(weight, torch.float8_e4m3fn, 32),
        "nvfp4": NVFP4Tensor.to_nvfp4(weight),
    }


def defined(call: Callable[[Tensor], object], value: Tensor) -> bool:
    """Whether an op is defined for a tensor: torchao leaves some out."""
    try:
        call(value)
    except Exception:  # noqa: BLE001 - an unknown op raises whatever it likes
        return False
    return True
