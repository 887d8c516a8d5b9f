"""Inputs of a linear in two models, and what algorithms that compare them decide."""

from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise import Algorithm, Decision, Group, Inputs, Linear
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, shared_amax

K, ROWS, TOKENS = 64, 48, 300


def randn(*shape: int, seed: int = 0) -> Tensor:
    """float64, the same for a seed."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, eq=False)
class Streams:
    """x and y [TOKENS, K], float64: inputs in the quantized and in the unquantized model."""

    x: Tensor
    y: Tensor

    def inputs(self) -> Inputs:
        """Their statistics, in fp32."""
        hessian, cross = 2 * self.x.T @ self.x / len(self.x), 2 * (self.y - self.x).T @ self.x / len(self.x)
        amax = self.x.abs().amax()
        return Inputs(len(self.x), amax.float(), hessian=hessian.float(), cross=cross.float())

    def errors(self, weight: Tensor, stored: Tensor) -> Tensor:
        """Squared errors of each row's output, to that of the unquantized model."""
        return (self.y @ weight.double().T - self.x @ stored.double().T).square().sum(dim=0)


def two_streams(noise: float = 0.2, *, k: int = K, seed: int = 0, tokens: int = TOKENS) -> Streams:
    """Correlated inputs of very different magnitude; y differs by something linear, and by noise."""
    mix = randn(k, k, seed=seed + 1) / k**0.5 + torch.eye(k, dtype=torch.float64)
    y = randn(tokens, k, seed=seed + 2) @ mix * torch.exp2(randn(k, seed=seed + 3))
    off = y @ (randn(k, k, seed=seed + 4) / k**0.5) + y.std(dim=0) * randn(tokens, k, seed=seed + 5)
    return Streams(y + noise * off, y)


def decided(algorithm: Algorithm, weight: Tensor, inputs: Inputs, recipe: Recipe) -> tuple[Decision, Tensor]:
    """A decision, and the values that are stored."""
    linear = Linear("layers.1.w.weight", weight, shared_amax(weight.float(), recipe))
    (decision,) = algorithm.decide(Group((linear,), inputs), recipe)
    return decision, stored_values(recipe, decision, weight)


def stored_values(recipe: Recipe, decision: Decision, weight: Tensor) -> Tensor:
    """The values that are stored under a decision."""
    fmt = format_of(recipe)
    values = weight.float() if decision.weight is None else decision.weight
    return fmt.decode(fmt.encode_with(values, recipe, decision.quantizer), recipe)
