"""Statistics and errors from the inputs themselves, in fp64, by their definitions: what algorithms must match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.algorithms.algorithm import Group, Inputs, Linear, Smoothing
from qtensor.spec.registry import encode, format_of, shared_amax

K = 64


def inputs_of(x: Tensor, dtype: torch.dtype = torch.float32) -> Inputs:
    """Everything that can be known of X [tokens, K]."""
    x = x.double()
    padded = F.pad(x, (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))  # [tokens, blocks, 16]
    return Inputs(
        tokens=len(x),
        amax=x.abs().amax().to(dtype),
        column_amax=x.abs().amax(0).to(dtype),
        column_mean=x.abs().mean(0).to(dtype),
        local_hessian=(torch.einsum("tbi,tbj->bij", padded, padded) / len(x)).to(dtype),
        hessian=(2 * x.T @ x / len(x)).to(dtype),
    )


def tokens(seed: int, *, correlated: float = 0.0, count: int = 150) -> Tensor:
    """X [count, K]: columns of very different sizes, as activations have, with something in common."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, K, generator=generator) + correlated * torch.randn(count, 1, generator=generator)
    return x * torch.exp(1.5 * torch.randn(K, generator=generator))


def weights_for(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Two weights that take the same input."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.exp(0.5 * torch.randn(K, generator=generator))
    return [(torch.randn(rows, K, generator=generator) * columns).to(dtype) for rows in (32, 64)]


def group_of(weights: Sequence[Tensor], recipe: Any, inputs: Inputs | None, *, agreed: bool = False) -> Group:
    """A group; `agreed` makes its linears siblings that share what is tensor-wide."""
    amaxes = [shared_amax(w.float(), recipe) for w in weights]
    if agreed:
        amaxes = [torch.stack(amaxes).amax()] * len(amaxes)
    return Group(tuple(Linear(f"w{i}", w, a) for i, (w, a) in enumerate(zip(weights, amaxes, strict=True))), inputs)


def stored(w: Tensor, recipe: Any, quantizer: Mapping[str, Tensor]) -> Tensor:
    """fp64, what the bytes under this quantizer decode to."""
    fmt = format_of(recipe)
    return fmt.decode(fmt.encode_with(w.float(), recipe, quantizer), recipe).double()


def as_max(linear: Linear, recipe: Any) -> Tensor:
    """fp64, what the bytes of a plain quantization decode to."""
    fmt = format_of(recipe)
    return fmt.decode(encode(linear.weight.float(), recipe, linear.amax), recipe).double()


def output_error(x: Tensor, off: Tensor) -> float:
    """|X off^T|^2."""
    return float((x.double() @ off.double().T).square().sum())


def factors_of(smoothing: Smoothing | None) -> Tensor | None:
    """The factors, None for none."""
    return None if smoothing is None else smoothing.factors
