"""Tiny models that are calibrated in the tests of the contract, and what those tests compare.

Whatever one process comes to, any number of ranks must come to, byte for byte: results and models are compared by
digests of their full tensors, which are small enough to travel between processes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from layerwise import AWQ, GPTQ, CalibrationResult, LocalHessian, calibrate
from qtensor import QuantizedTensor
from tests.layerwise import algorithm_table
from tests.recipes import ROW

DIM, VOCAB = 64, 33

ALGORITHMS: dict[str, Any] = {
    **algorithm_table.ALGORITHMS,
    "AWQ, then GPTQ": GPTQ(smoothing=AWQ(alpha_step=0.25), scales=LocalHessian(), descent=2),
}
RECIPES = ROW

# -- models ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Not quite attention: every token gets a mean of the values before it, gated."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(DIM, 32, bias=bias)
        self.k_proj = nn.Linear(DIM, 32, bias=bias)
        self.v_proj = nn.Linear(DIM, DIM, bias=bias)
        self.o_proj = nn.Linear(DIM, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q_proj(x) @ self.k_proj(x).mT / 32**0.5, dim=-1)
        return self.o_proj(weights @ self.v_proj(x))


class Mlp(nn.Module):
    """Gated, with a gate of one row for all: a weight that leaves most shards empty."""

    def __init__(self, wide: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(DIM, wide, bias=bias)
        self.up_proj = nn.Linear(DIM, wide, bias=bias)
        self.down_proj = nn.Linear(wide, DIM, bias=bias)
        self.shared_gate = nn.Linear(DIM, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner) * torch.sigmoid(self.shared_gate(x))


class Layer(nn.Module):
    """A decoder layer around any mlp."""

    def __init__(self, mlp: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(DIM, eps=1e-6), Attention(bias=bias)
        self.mlp_norm, self.mlp = nn.RMSNorm(DIM, eps=1e-6), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Toy(nn.Module):
    """A parent whose own parameters are an embedding, a norm and a head with an odd number of rows."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """A list of experts with weights [N, K]; a token goes to one, by its nearest direction."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(count))
        self.register_buffer("directions", torch.eye(DIM)[:count])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        chosen = (flat @ self.directions.to(flat).T).argmax(dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if bool(mine.any()):  # a module that no token reaches is not even called
                out[mine] = expert(flat[mine])
        return out.reshape(x.shape)


class Expert(nn.Module):
    """A small mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, 32, bias=False), nn.Linear(32, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


def toy(*, layers: int = 3, bias: bool = True, dtype: torch.dtype = torch.float32) -> Toy:
    """Three layers of uneven widths."""
    return filled(Toy([Layer(Mlp(96 + 64 * (i % 2), bias=bias), bias=bias) for i in range(layers)]), dtype)


def expert_lists(*, layers: int = 2, experts: int = 4) -> Toy:
    """Layers with lists of experts; `ids_for` says which ids reach which."""
    model = filled(Toy([Layer(Experts(experts)) for _ in range(layers)]), torch.float32)
    with torch.no_grad():  # an id's expert is its remainder: the embedding shouts, the layers whisper
        model.embed.weight.mul_(0.1)
        for token in range(VOCAB):
            model.embed.weight[token, token % experts] = 5.0
        for layer in model.layers:
            for norm in (layer.attn_norm, layer.mlp_norm):
                norm.weight.fill_(1.0)
            for linear in (layer.attn.o_proj, *(expert.down_proj for expert in layer.mlp.experts)):
                linear.weight.mul_(0.02)
    return model


def llama() -> nn.Module:
    """transformers' Llama, its head a weight of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return filled(LlamaForCausalLM(config), torch.float32)


def qwen3_moe(experts_implementation: str = "eager", *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' Qwen3-MoE: experts [E, N, K] in one parameter, two of four for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    model.config._experts_implementation = experts_implementation
    return filled(model, dtype)


def filled(model: nn.Module, dtype: torch.dtype) -> Any:
    """The same values on every rank and in every process; gains, biases and outlier columns that matter."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            values = torch.randn(param.shape, generator=generator)
            if param.ndim == 1:
                gain = not name.endswith("bias")
                param.copy_(1 + 0.3 * values if gain else 0.1 * values)
                if gain:
                    param[::17] *= 6.0
            else:
                param.copy_(values / (1.0 if "embed" in name else param.shape[-1] ** 0.5))
    return model.to(dtype).eval()


def batches(count: int = 5) -> list[Tensor]:
    """Ids [b, s] of different shapes."""
    generator = torch.Generator().manual_seed(11)
    shapes = [(2, 6), (1, 9), (3, 4), (2, 6), (1, 2)]
    return [torch.randint(0, VOCAB, shapes[i % len(shapes)], generator=generator) for i in range(count)]


# -- sharding ----------------------------------------------------------------------------------------------------------


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers of any of the models."""
    found = getattr(model, "layers", None)
    return model.model.layers if found is None else found


def shard(model: Any, **options: Any) -> Any:
    """Every layer and the root, which owns the embedding."""
    for layer in layers_of(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# -- what is compared --------------------------------------------------------------------------------------------------


def run(model: Any, data: Any, recipe: Any, algorithm: Any, **options: Any) -> CalibrationResult:
    """`calibrate`, without a bar."""
    return calibrate(model, data, recipe=recipe, algorithm=algorithm, progress=False, **options)


@torch.no_grad()
def whole(tensor: Tensor) -> Any:
    """A tensor with all its rows; collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def own(tensor: Tensor) -> Any:
    """The rows of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def parts(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """Plain tensors by name: the parts of a quantized one."""
    if isinstance(tensor, QuantizedTensor):
        yield from ((f"{name}:{part}", value) for part, value in tensor.parts().items())
    else:
        yield name, tensor


def fingerprint(tensor: Tensor) -> str:
    """Shape, dtype and every byte."""
    held = tensor.detach().cpu().contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(held.shape)} {held.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


def fingerprints(tensors: Mapping[str, Any], take: Callable[[Tensor], Any] = whole) -> dict[str, str]:
    """Of every tensor, part by part: with all its rows, which is collective for DTensors, or this rank's `own`."""
    return {part: fingerprint(value) for name, tensor in tensors.items() for part, value in parts(name, take(tensor))}


def outcome(model: nn.Module, result: CalibrationResult) -> dict[str, dict[str, str]]:
    """Everything that a calibration leaves behind, to be compared with that of another."""
    return {
        "result": fingerprints(result.state_dict()),
        "model": fingerprints(model.state_dict()),
        "starved": dict.fromkeys(result.starved, "starved"),
    }


def assert_same(found: Mapping[str, Mapping[str, str]], expected: Mapping[str, Mapping[str, str]], what: str) -> None:
    """Of two outcomes, byte for byte; names what differs."""
    for kind, values in expected.items():
        assert found[kind].keys() == values.keys(), f"{what}: {kind} has {found[kind].keys() ^ values.keys()}"
        other = [f"{name}: {found[kind][name]}, not {one}" for name, one in values.items() if found[kind][name] != one]
        assert not other, f"{what}: {len(other)} of {len(values)} in {kind} differ: {other[:6]}"


@cache
def _reference(
    build: Callable[[], nn.Module], recipe: Any, algorithm: Any, count: int, options: tuple[tuple[str, Any], ...]
) -> dict[str, dict[str, str]]:
    model = build()
    return outcome(model, run(model, batches(count), recipe, algorithm, **dict(options)))


def reference(
    build: Callable[[], nn.Module], recipe: Any, algorithm: Any, count: int = 5, **options: Any
) -> dict[str, dict[str, str]]:
    """What a single process comes to, with all batches; call it where there is no process group."""
    assert not torch.distributed.is_initialized()
    return copy.deepcopy(_reference(build, recipe, algorithm, count, tuple(sorted(options.items()))))


def assert_model_is_result(model: nn.Module, result: CalibrationResult, before: Mapping[str, str]) -> None:
    """The model's parameters are the result's, dequantized or byte for byte, and all others are as they were.

    Args:
        model: after the calibration.
        result: of it.
        before: `fingerprints(model.state_dict(), own)` from before.
    """
    entries = result.state_dict()
    for name, param in model.state_dict().items():
        stored, entry = own(param), entries.get(name)
        if entry is None:
            for part, value in parts(name, stored):
                assert fingerprint(value) == before[part], f"{name} was changed and is no part of the result"
            continue
        if isinstance(param, DTensor):
            assert isinstance(entry, DTensor), f"{name}: the model's is a DTensor, the result's is not"
            assert entry.placements == param.placements, name
            assert entry.device_mesh == param.device_mesh, name
        assert entry.shape == param.shape, name
        kept = own(entry)
        if isinstance(kept, QuantizedTensor) and not isinstance(stored, QuantizedTensor):
            assert kept.dtype == stored.dtype, name
            kept = kept.dequantize(stored.dtype)
        assert fingerprints({name: stored}) == fingerprints({name: kept}), f"{name}: the model's is not the result's"


@torch.no_grad()
def forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits."""
    out = model(ids)
    return (out if isinstance(out, Tensor) else out.logits).clone()
