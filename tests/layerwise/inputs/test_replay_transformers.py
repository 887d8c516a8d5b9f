"""Layers of transformers models, replayed, give bit for bit what they give inside; caches make no difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

from layerwise.inputs.recording.recorder import Recorder
from layerwise.inputs.values.caches import CacheState
from layerwise.stages.layers import find_layers
from tests.layerwise.inputs.replaying import assert_same, plain, replay

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
PER_LAYER = {"vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **WINDOWS)),
    "gemma3n": lambda: Gemma3nForCausalLM(
        Gemma3nTextConfig(
            **{**SMALL, "intermediate_size": [48] * 4}, **WINDOWS, **PER_LAYER, activation_sparsity_pattern=[0.0] * 4
        )
    ),
    "gemma4": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**SMALL, **WINDOWS, **PER_LAYER)),
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def _batches(**more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 40, (2, length), generator=generator) for length in (9, 6)]
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0  # on the left
    return [{"input_ids": ids[0], "attention_mask": padded, **more}, {"input_ids": ids[1], **more}]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_replayed_layers_give_what_they_give_inside_the_model(name: str, use_cache: bool) -> None:
    model = _model(name)
    modules = dict(model.named_modules())
    results, outs = plain(model, _batches(use_cache=False))
    with Recorder(model, find_layers(model), _batches(use_cache=use_cache), inputs_on="cpu") as recorder:
        again, layer_outs, prepared = replay(recorder)
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same([out.logits for out in again], [out.logits for out in results], "logits")
    # The parent of gemma4 cuts hidden states before the layers that share keys and values.
    assert prepared == ([0, 1, 2] if name == "gemma4" else [0, 1])
    assert dict(model.named_modules()) == modules


@torch.no_grad()
def _with_past(model: nn.Module, make: Callable[[nn.Module], Any]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for length in (3, 5):
        cache = make(model)
        model(torch.randint(1, 40, (2, length), generator=generator), past_key_values=cache)
        ids = torch.randint(1, 40, (2, 4), generator=generator)
        batches.append({"input_ids": ids, "past_key_values": cache})
    return batches


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
def test_a_cache_with_a_past_is_set_back_before_every_call(name: str) -> None:
    model = _model(name)

    def make(model: nn.Module) -> DynamicCache:
        return DynamicCache(config=model.config)

    results, outs = plain(model, _with_past(model, make))
    batches = _with_past(model, make)
    with Recorder(model, find_layers(model), batches) as recorder:
        again, layer_outs, _ = replay(recorder)
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same([out.logits for out in again], [out.logits for out in results], "logits")
    assert [batch["past_key_values"].get_seq_length() for batch in batches] == [3, 5]
    assert_same(plain(model, batches)[1], outs, "the model, on the same caches, afterwards")


def test_an_empty_cache_stays_empty() -> None:
    model = _model("llama")
    batches = [{"past_key_values": DynamicCache(config=model.config), **batch} for batch in _batches()]
    results, _ = plain(model, _batches())
    with Recorder(model, find_layers(model), batches) as recorder:
        again, _, _ = replay(recorder)
    assert_same([out.logits for out in again], [out.logits for out in results], "logits")
    assert [batch["past_key_values"].get_seq_length() for batch in batches] == [0, 0]


def test_what_a_model_sets_up_in_its_first_forward_does_not_miss_the_layers() -> None:
    config = Qwen3MoeConfig(**SMALL, **EXPERTS, output_router_logits=True)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    with (
        pytest.raises(IndexError) as caught,
        Recorder(model, find_layers(model), _batches()) as recorder,
    ):
        replay(recorder)
    assert "do not ask it for router logits" in caught.value.__notes__[0]
    with torch.no_grad():
        assert len(model(**_batches()[1]).router_logits) == SMALL["num_hidden_layers"]


def test_a_cache_of_fixed_size_with_a_past_is_refused_by_name() -> None:
    model = _model("llama")
    batches = _with_past(model, lambda model: StaticCache(config=model.config, max_cache_len=16))
    message = (
        "a StaticCache with a past is written in place by the layers, so the same batch cannot be run twice on it; pass"
    )
    with pytest.raises(NotImplementedError, match=message), Recorder(model, find_layers(model), batches) as recorder:
        replay(recorder)


def test_layers_that_a_cache_got_since_are_gone() -> None:
    past, cache = torch.ones(1, 1, 3, 2), DynamicCache()
    cache.update(past, past, 0)
    state = CacheState(cache)
    for layer in range(2):
        cache.update(past, past, layer)
    state.restore()
    assert len(cache.layers) == 1
    assert cache.get_seq_length() == 3


class Crops:
    """The least that is a cache."""

    def __init__(self) -> None:
        self.held = torch.ones(2, 3)

    def update(self, more: torch.Tensor) -> torch.Tensor:
        self.held = torch.cat([self.held, more], 1)
        return self.held

    def get_seq_length(self) -> int:
        return self.held.shape[1]

    def crop(self, length: int) -> None:
        self.held = self.held[:, :length]


def test_a_cache_that_shows_no_layers_is_cropped() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor, cache: Crops) -> torch.Tensor:
            return x * cache.update(x).sum()

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer()])

        def forward(self, x: torch.Tensor, cache: Crops) -> torch.Tensor:
            return self.layers[0](x, cache=cache)

    model, x, cache = Parent(), torch.ones(2, 1), Crops()
    expected = model(x, Crops())
    with Recorder(model, [("layers.0", model.layers[0])], [(x, cache)]) as recorder:
        results, _, _ = replay(recorder, times=3)
    assert_same(results, [expected], "the model")
    assert cache.get_seq_length() == 3
