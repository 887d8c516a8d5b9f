"""A small decoder of Llama's kind, in any dtype, and what rotations should come to in it, from dense matrices."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, WIDE, VOCAB = 48, 80, 19
HEADS, KEY_HEADS, HEAD = 4, 2, 32
BLOCK = 16


class Offset(nn.Module):
    """Gemma's norm: the gain is 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,)) * (1 + self.weight)


class Attention(nn.Module):
    """Grouped queries: two heads of keys and values for four of queries."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.head_dim = HEAD
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KEY_HEADS * HEAD, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KEY_HEADS * HEAD, bias=bias)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (k, v))
        return self.o_proj((torch.softmax(q @ k.mT / HEAD**0.5, dim=-1) @ v).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, WIDE, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, WIDE, bias=bias)
        self.down_proj = nn.Linear(WIDE, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, norm: Any, *, bias: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = Attention(bias=bias), Mlp(bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Ids [n, tokens] -> logits [n, tokens, VOCAB]."""

    def __init__(self, *, norm: Any, bias: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(norm, bias=bias) for _ in range(2))
        self.norm = norm()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def rms_norm() -> nn.Module:
    return nn.RMSNorm(HIDDEN, eps=1e-6)


@torch.no_grad()
def filled(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """Every parameter random, norms too: a gain of ones would hide what is done to it."""
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.copy_(1 + 0.3 * values if param.ndim == 1 else values / param.shape[-1] ** 0.5)
    return model.to(dtype)


def decoder(dtype: torch.dtype = torch.float64, *, norm: Any = rms_norm, bias: bool = False) -> Any:
    return filled(Decoder(norm=norm, bias=bias), dtype)


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))


def digest(model: nn.Module) -> dict[str, str]:
    """Of the bytes of everything in a model."""
    return {
        name: hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in model.state_dict().items()
    }


def matrix(period: int, width: int, block: int, seed: int | None) -> Tensor:
    """R [width, width] in float64, from scipy's Hadamard matrix; the signs are those of torch's CPU generator."""
    hadamard = scipy.linalg.hadamard(block) / np.sqrt(block)
    signs = torch.ones(period, dtype=torch.float64)
    if seed is not None:
        drawn = torch.randint(0, 2, (period,), generator=torch.Generator().manual_seed(seed))
        signs = torch.where(drawn == 1, 1.0, -1.0).double()
    turned = torch.from_numpy(np.kron(np.eye(width // block), hadamard))
    return torch.diag(signs.repeat(width // period)) @ turned


@torch.no_grad()
def expected(model: Any, block: int, seed: int | None, *, offset: bool = False) -> dict[str, Tensor]:
    """All parameters after a rotation of the stream and the values, float64."""
    given = {name: value.detach().double() for name, value in model.state_dict().items()}
    new = dict(given)
    stream = matrix(HIDDEN, HIDDEN, block, seed)
    made, taken = (matrix(HEAD, heads * HEAD, block, seed) for heads in (KEY_HEADS, HEADS))

    def gain(norm: str) -> Tensor:
        weight = given[f"{norm}.weight"]
        new[f"{norm}.weight"] = torch.zeros_like(weight) if offset else torch.ones_like(weight)
        return torch.diag(1 + weight if offset else weight)

    def change(linear: str, right: Tensor, left: Tensor | None = None) -> None:
        value = given[f"{linear}.weight"] @ right
        new[f"{linear}.weight"] = value if left is None else left @ value
        if left is not None and f"{linear}.bias" in given:
            new[f"{linear}.bias"] = left @ given[f"{linear}.bias"]

    new["embed_tokens.weight"] = given["embed_tokens.weight"] @ stream
    for index in range(len(model.layers)):
        layer = f"layers.{index}"
        first, second = gain(f"{layer}.input_layernorm"), gain(f"{layer}.post_attention_layernorm")
        for name in ("q_proj", "k_proj"):
            change(f"{layer}.self_attn.{name}", first @ stream)
        change(f"{layer}.self_attn.v_proj", first @ stream, made.T)
        change(f"{layer}.self_attn.o_proj", taken, stream.T)
        for name in ("gate_proj", "up_proj"):
            change(f"{layer}.mlp.{name}", second @ stream)
        change(f"{layer}.mlp.down_proj", torch.eye(WIDE).double(), stream.T)
    change("lm_head", gain("norm") @ stream)
    return new
