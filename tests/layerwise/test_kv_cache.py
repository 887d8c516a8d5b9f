"""Scales of key/value caches: those of what attentions hand to their caches, on any ranks, and refusals by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.layerwise.algorithm_table import MAIN
from tests.sampling import sampled

pytest.importorskip("transformers")

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from layerwise import GPTQ, Event, KVCache, SmoothQuant, calibrate
from layerwise.resume.progress import BACKUP, PROGRESS, _record_digest
from qtensor import Float8CurrentScaling, MXFP8BlockScaling
from tests.layerwise.families import FAMILIES, SMALL, batches_for, family
from tests.layerwise.models import batches, filled, layers_of, llama, shard
from tests.ranks import run_ranks

TENSOR, HEAD = KVCache(), KVCache(granularity="head")
Scales = dict[str, Tensor]


def scales_of(model: nn.Module, data: Any, kv_cache: KVCache | None = TENSOR, **options: Any) -> Scales:
    """Names and scales that a calibration gives for caches."""
    given = {"recipe": MXFP8BlockScaling(), "progress": False, "kv_cache": kv_cache, **options}
    state = calibrate(model, data, **given).state_dict()
    return {name: value for name, value in state.items() if name.endswith((".k_scale", ".v_scale"))}


def scale(amax: Tensor) -> Tensor:
    """amax / 448 by Float8's formula: 1 / (448 / amax), where `1 / x` of torch is no division but a reciprocal."""
    one, most = torch.tensor([1.0, 448.0])
    return torch.div(one, torch.div(most, amax.float()))


def largest(amaxes: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(amaxes)).amax(dim=0)


def assert_equal(found: Scales, expected: Scales) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32, name
        assert torch.equal(value, expected[name]), (name, value, expected[name])


# -- values ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def cached(model: Any, data: Sequence[Tensor], *, heads: bool, prefix: str = "model") -> Scales:
    """The scales of what transformers' own cache holds after each batch."""
    caches = [model(ids, use_cache=True).past_key_values for ids in data]
    found: Scales = {}
    for index in range(len(caches[0].layers)):
        for own in ("keys", "values"):
            amax = largest([getattr(cache.layers[index], own).abs().amax(dim=(0, 2, 3)) for cache in caches])
            name = f"{prefix}.layers.{index}.self_attn.{own[0]}_scale"
            found[name] = scale(amax if heads else amax.amax())
    return found


# Who calibrates the weights does not ask what caches are: each algorithm with one kind of scale, in turn.
CACHED = [*itertools.product(MAIN, ["tensor", "head"])]


@sampled(("name", "scales"), CACHED, [case for number, case in enumerate(CACHED) if number % 4 in (0, 3)])
def test_scales_are_those_of_what_the_quantized_model_caches(name: str, scales: str) -> None:
    algorithm, kv_cache, model = MAIN[name], {"tensor": TENSOR, "head": HEAD}[scales], llama()
    found = scales_of(model, batches(), kv_cache, algorithm=algorithm, layer_inputs="quantized")
    expected = cached(model, batches(), heads=kv_cache is HEAD)
    assert_equal(found, expected)
    shape = {(2,)} if kv_cache is HEAD else {()}
    assert {tuple(value.shape) for value in found.values()} == shape
    assert found.keys() == {f"model.layers.{layer}.self_attn.{own}_scale" for layer in (0, 1) for own in "kv"}
    dense = cached(llama(), batches(), heads=kv_cache is HEAD)
    assert all(not torch.equal(value, dense[name]) for name, value in found.items())


def test_scales_are_those_of_what_the_dense_model_caches() -> None:
    for kv_cache in (TENSOR, HEAD):
        expected = cached(llama(), batches(), heads=kv_cache is HEAD)
        assert_equal(scales_of(llama(), batches(), kv_cache), expected)
        assert_equal(scales_of(llama(), batches(), kv_cache, algorithm=GPTQ(), layer_inputs="unquantized"), expected)


@torch.no_grad()
def test_keys_are_rotated() -> None:
    """The same by hand, for the first layer: k_proj and v_proj of the normed embeddings."""
    model = llama()
    layer = layers_of(model)[0]
    amaxes: dict[str, list[Tensor]] = {"k": [], "v": [], "not rotated": []}
    for ids in batches():
        hidden = model.model.embed_tokens(ids)
        positions = model.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
        x = layer.input_layernorm(hidden)
        k, v = (
            linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        rotated = apply_rotary_pos_emb(k, k, *positions)[1]
        for own, one in (("k", rotated), ("v", v), ("not rotated", k)):
            amaxes[own].append(one.abs().amax(dim=(0, 2, 3)))
    found = scales_of(llama(), batches(), HEAD)
    for own in "kv":
        assert torch.equal(found[f"model.layers.0.self_attn.{own}_scale"], scale(largest(amaxes[own])))
    assert not torch.equal(largest(amaxes["not rotated"]), largest(amaxes["k"]))


class Folded(SmoothQuant):
    """SmoothQuant that remembers the weights as they are rounded."""

    folded: ClassVar[dict[str, Tensor]] = {}

    def decide(self, group: Any, recipe: Any) -> Any:
        self.folded.update({linear.name: linear.weight.detach().clone() for linear in group.linears})
        return super().decide(group, recipe)


@torch.no_grad()
def test_values_have_the_factors_that_are_folded_into_them() -> None:
    """With as many heads of keys as of queries, factors of o_proj are folded into v_proj."""
    model = family("opt")
    before = {name: param.clone() for name, param in model.named_parameters()}
    found = scales_of(model, [batch["input_ids"] for batch in batches_for("opt")], algorithm=Folded())
    params = dict(model.named_parameters())
    for name, value in Folded.folded.items():  # before they were rounded
        params[name].copy_(value)
    folded = cached(model, [batch["input_ids"] for batch in batches_for("opt")], heads=False, prefix="model.decoder")
    names = [f"model.decoder.layers.0.self_attn.{own}_scale" for own in "kv"]  # what is before it is as it was
    assert_equal({name: found[name] for name in names}, {name: folded[name] for name in names})
    v_proj = "model.decoder.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(params[v_proj], before[v_proj])
    model.load_state_dict(before)
    dense = cached(model, [batch["input_ids"] for batch in batches_for("opt")], heads=False, prefix="model.decoder")
    assert dense[names[1]] != found[names[1]]


@sampled(
    "name",
    [name for name in FAMILIES if name not in {"gemma3n", "t5"}],
    ["qwen2", "qwen3-moe", "gemma2", "gpt2", "gpt-oss", "gpt-neox", "qwen3-vl"],
)
def test_families_layer_by_layer_as_all_at_once(name: str) -> None:
    one_by_one, at_once = (scales_of(family(name), batches_for(name), HEAD, layers=layers) for layers in (None, ()))
    assert one_by_one
    assert_equal(one_by_one, at_once)


def test_a_past_counts() -> None:
    def data(large: float) -> list[dict[str, Any]]:
        past = DynamicCache(config=model.config)
        for layer in range(2):
            held = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(layer))
            past.update(held * large, held, layer)
        return [{"input_ids": batches()[1], "past_key_values": past, "use_cache": True}]

    model = llama()
    found = scales_of(model, data(1000.0))
    held = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found["model.layers.1.self_attn.k_scale"], scale((held * 1000.0).abs().amax()))
    small = scales_of(llama(), data(0.0))
    assert small["model.layers.1.self_attn.k_scale"] < found["model.layers.1.self_attn.k_scale"] / 100


@torch.no_grad()
def test_values_of_zero_have_the_scale_one() -> None:
    def zeroed() -> nn.Module:
        model = llama()
        layers_of(model)[1].self_attn.v_proj.weight[:16] = 0  # of the first of two heads
        return model

    whole, of_heads = (scales_of(zeroed(), batches(), kv_cache) for kv_cache in (TENSOR, HEAD))
    name = "model.layers.1.self_attn.v_scale"
    assert of_heads[name][0] == 1
    assert whole[name] == of_heads[name][1] < 0.1  # the larger amax, and not the larger scale


class Attention(nn.Module):
    """One that is not of transformers; its cache comes by position, and gets what `caches` says."""

    def __init__(self, caches: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 64)
        self.caches = caches

    def forward(self, hidden: Tensor, past_key_values: Any = None) -> Tensor:
        k = self.proj(hidden).unflatten(-1, (2, 2, 16)).transpose(1, 2)  # [B, 2, T, 2, 16]
        if past_key_values is not None:
            self.caches(past_key_values, k)
        return hidden + k.transpose(1, 2).flatten(2)[..., :32]


class Layer(nn.Module):
    """An attention in a layer."""

    def __init__(self, caches: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.attn = Attention(caches)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attn(hidden, None)


def own_model(caches: Callable[[Any, Tensor], object]) -> Any:
    return filled(nn.Sequential(Layer(caches), Layer(caches)), torch.float32)


HIDDEN = [torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))]


def test_an_attention_of_ones_own() -> None:
    model = own_model(lambda past, k: past.update(k[..., 0, :], 2 * k[..., 0, :]))
    found = scales_of(model, HIDDEN, layers=["0", "1"])
    assert found.keys() == {f"{layer}.attn.{own}_scale" for layer in (0, 1) for own in "kv"}
    assert all(found[f"{layer}.attn.v_scale"] == 2 * found[f"{layer}.attn.k_scale"] for layer in (0, 1))
    inner = scales_of(own_model(model[0].attn.caches), HIDDEN, layers=["*.attn"])  # each attention is a layer
    assert_equal(inner, found)
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- ranks, and resuming -----------------------------------------------------------------------------------------------


def sharded_scales(kv_cache: KVCache, path: Path | None = None) -> Scales:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return scales_of(shard(llama()), batches()[rank::ranks], kv_cache, algorithm=GPTQ(), checkpoint_dir=path)


def test_two_ranks_find_what_one_finds_and_go_on_where_one_stopped(tmp_path: Path) -> None:
    expected = scales_of(llama(), batches(), HEAD, algorithm=GPTQ())
    with pytest.raises(KeyboardInterrupt):
        scales_of(
            llama(), batches(), HEAD, algorithm=GPTQ(), checkpoint_dir=tmp_path, on_event=stopping("checkpoint", 0)
        )
    for found in (*run_ranks(2, sharded_scales, HEAD), *run_ranks(2, sharded_scales, HEAD, tmp_path)):
        assert_equal(found, expected)


def stopping(kind: str, index: int) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if (event.kind, event.index) == (kind, index):
            raise KeyboardInterrupt

    return on_event


def test_a_rank_without_batches() -> None:
    for found in run_ranks(2, _on_the_first_rank):
        assert_equal(found, scales_of(llama(), batches(2)))


def _on_the_first_rank() -> Scales:
    return scales_of(shard(llama()), batches(2) if torch.distributed.get_rank() == 0 else [])


def test_a_run_goes_on_to_the_same_scales(tmp_path: Path) -> None:
    expected = scales_of(llama(), batches())
    with pytest.raises(KeyboardInterrupt):
        scales_of(llama(), batches(), checkpoint_dir=tmp_path, on_event=stopping("checkpoint", 0))
    kinds: list[str] = []
    found = scales_of(
        llama(), batches(), checkpoint_dir=tmp_path, on_event=lambda event: kinds.append(f"{event.kind} {event.index}")
    )
    assert {"resumed 0", "calibrate 1"} <= {*kinds}
    assert "calibrate 0" not in kinds
    assert_equal(found, expected)
    model = llama()
    assert_equal(scales_of(model, batches(), checkpoint_dir=tmp_path), expected)  # all of it was there
    for other in (HEAD, None):
        with pytest.raises(ValueError, match="other options: kv_cache"):
            scales_of(llama(), batches(), other, checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    "held",
    [
        {},
        {"model.layers.1.self_attn": {"k": [1.0], "v": [1.0]}},
        {"model.layers.0.self_attn": {"k": [1.0]}},
        {"model.layers.0.self_attn": {"k": [1.0], "v": [1.0, 2.0]}},
        {"model.layers.0.self_attn": {"k": ["1"], "v": [1.0]}},
        {"model.layers.0.self_attn": [1.0, 2.0]},
    ],
)
def test_notes_of_another_kind_are_refused(tmp_path: Path, held: Any) -> None:
    scales_of(llama(), batches(1), checkpoint_dir=tmp_path)

    record = json.loads((tmp_path / PROGRESS).read_bytes())["progress"]
    record["windows"][0]["extra"][0]["kv_amax"] = held
    text = json.dumps({"version": 1, "digest": _record_digest(1, record), "progress": record})
    for name in (PROGRESS, BACKUP):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"kv_amax is .*, expected those of model\.layers\.0\.self_attn"):
        scales_of(llama(), batches(1), checkpoint_dir=tmp_path)


# -- refusals ----------------------------------------------------------------------------------------------------------


def latent() -> nn.Module:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SMALL, "head_dim": 8, "num_key_value_heads": 4},
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        )
    )


def shared() -> nn.Module:
    model = nn.Sequential(nn.Module(), nn.Module())
    model[0].attn = model[1].attn = Attention(lambda past, k: past.update(k[..., 0, :], k[..., 1, :]))
    model[0].linear, model[1].linear = nn.Linear(32, 32), nn.Linear(32, 32)
    return model


BEFORE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no attention": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
        "kv_cache: the model has no attention that takes past_key_values, so nothing shows what its cache would hold",
    ),
    "latent attention": (latent, "kv_cache: model.layers.0.self_attn is latent attention, for which engines cache"),
    "shared keys and values": (
        lambda: family("gemma3n"),
        "kv_cache: model.layers.2.self_attn takes the keys and values of another layer and has none of its own",
    ),
    "a shared attention": (shared, "kv_cache: 0.attn belongs to 2 layers at once; it can have one set of scales only"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_models_that_are_refused_before_anything_runs(case: str) -> None:
    build, words = BEFORE[case]
    model = build()
    events: list[Event] = []
    options: dict[str, Any] = {"layers": ["0", "1"]} if isinstance(model, nn.Sequential) else {}
    options |= (
        {"exclude": ["*.altup.*"]} if "keys" in case else {"exclude": ["*.attn.proj"]} if "shared" in case else {}
    )
    options |= {"recipe": Float8CurrentScaling()}  # which takes any K
    with pytest.raises(ValueError, match=words):
        scales_of(model, HIDDEN, on_event=events.append, **options)
    assert not events


RUNNING: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "silent": (lambda past, k: None, "0.attn: no keys and values came to a cache in any batch of any rank"),
    "asks for more": (lambda past, k: past.conv_states, "0.attn asks its cache for 'conv_states'; expected that it"),
    "two layers": (
        lambda past, k: [past.update(k[..., 0, :], k[..., 0, :], slot) for slot in (3, 4)],
        "0.attn caches its keys and values as layer 3 and as layer 4",
    ),
    "of three dims": (
        lambda past, k: past.update(k[:, 0, :, 0], k[:, 0, :, 0]),
        r"0.attn caches keys \[2, 5, 16\] and values \[2, 5, 16\], expected \[batch, heads, tokens, dim\]",
    ),
    "of other heads": (
        lambda past, k: past.update(k[..., 0, :], k[:, :1, :, 0]),
        r"0.attn caches keys \[2, 2, 5, 16\] and values \[2, 1, 5, 16\]",
    ),
}


@pytest.mark.parametrize("case", RUNNING)
def test_attentions_that_are_refused_when_it_shows(case: str) -> None:
    caches, words = RUNNING[case]
    model = own_model(caches)
    with pytest.raises(NotImplementedError, match=f"calibrate: kv_cache: {words}"):
        scales_of(model, HIDDEN, layers=["0", "1"])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_caches_of_encoders_and_decoders_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"kv_cache: decoder\.block\.0\..* gets a EncoderDecoderCache, one"):
        scales_of(family("t5"), batches_for("t5"), layers=())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float) -> None:
    model = own_model(lambda past, k: past.update(k[..., 0, :], k[..., 1, :] * value))
    with pytest.raises(RuntimeError, match=r"0\.attn: its values hold values that are not finite"):
        scales_of(model, HIDDEN, layers=["0", "1"])


def test_options() -> None:
    with pytest.raises(ValueError, match=r"KVCache: dtype=torch.float8_e5m2 is not torch.float8_e4m3fn"):
        KVCache(dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"KVCache: granularity='token' is not one of 'tensor', 'head'"):
        KVCache(granularity="token")
    with pytest.raises(TypeError, match=r"calibrate: kv_cache is 'fp8'; expected KVCache\(\), or None"):
        scales_of(llama(), batches(), "fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="calibrate: kv_cache takes scales from keys and values, and no rank has a"):
        scales_of(llama(), None)


def test_scales_are_additional() -> None:
    """The weights are what they are without them."""
    recipe = Float8CurrentScaling()
    without = calibrate(llama(), batches(), recipe=recipe, progress=False).state_dict()
    beside = calibrate(llama(), batches(), recipe=recipe, progress=False, kv_cache=TENSOR).state_dict()
    assert {name for name in beside if name not in without} == {
        f"model.layers.{layer}.self_attn.{own}_scale" for layer in (0, 1) for own in "kv"
    }
    for name, value in without.items():
        assert all(torch.equal(part, beside[name].parts()[key]) for key, part in value.parts().items())
