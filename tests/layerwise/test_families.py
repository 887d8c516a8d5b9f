"""Families of models: the same bytes layer by layer as all at once, outputs that stay close, caches without effect."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from layerwise import AWQ, GPTAQ, GPTQ, Max, SmoothQuant, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.layerwise.algorithm_table import PAIRED, main_algorithms
from tests.layerwise.families import FAMILIES, VOCABULARY, assert_same, batches_for, family, off, output
from tests.layerwise.inputs.parents import PARENTS
from tests.layerwise.inputs.replaying import id_batches
from tests.sampling import sampled

# Its 4 x 4 products between streams have no block to scale.
OPTIONS: dict[str, dict[str, Any]] = {"gemma3n": {"exclude": ["*.altup.*"]}}
LISTS = {"t5": ["encoder.block", "decoder.block"]}


def _calibrated(name: str, **options: Any) -> tuple[nn.Module, Any]:
    model = family(name)
    options = {**OPTIONS.get(name, {}), "layers": LISTS.get(name), "progress": False, **options}
    return model, calibrate(model, batches_for(name), **options)


# What differs most between families: experts, caches that layers share, windows, transposed weights, two lists of
# layers, no causal mask, values beside the hidden states. The others are made like one of these.
FIRST = ["qwen3-moe", "gemma3n", "gemma2", "gpt2", "gpt-oss", "t5", "bert", "qwen3-vl"]


@sampled("name", FAMILIES, FIRST)
def test_max_and_gptq(name: str) -> None:
    batch = batches_for(name)[0]
    expected = output(family(name), batch)
    model, result = _calibrated(name, recipe=NVFP4BlockScaling(), inputs="static")
    _, whole = _calibrated(name, recipe=NVFP4BlockScaling(), inputs="static", layers=())
    assert_same(result.state_dict(), whole.state_dict(), "all layers at once")
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "altup" not in name and id(module.weight) not in looked_up
    }
    assert {f"{linear}.input_scale" for linear in linears} <= result.state_dict().keys()
    coarse = off(output(model, batch), expected)
    fine = off(output(_calibrated(name, recipe=MXFP8BlockScaling())[0], batch), expected)
    assert 0 < fine < 0.7 * coarse < 0.35
    fitted = off(output(_calibrated(name, recipe=NVFP4BlockScaling(), algorithm=GPTQ())[0], batch), expected)
    assert 0 < fitted < coarse


class _Folded:
    """Remembers the weights of every linear as they are decided about: folded, and not yet rounded."""

    folded: ClassVar[dict[str, Tensor]] = {}

    def decide(self, group: Any, recipe: Any) -> Sequence[Any]:
        self.folded.update({linear.name: linear.weight.detach().clone() for linear in group.linears})
        return super().decide(group, recipe)  # type: ignore[misc]


class FoldedAWQ(_Folded, AWQ):
    """AWQ, watched."""


class FoldedSmoothQuant(_Folded, SmoothQuant):
    """SmoothQuant, watched."""


def _transposed(model: nn.Module, fqn: str) -> bool:
    owner = model.get_submodule(fqn.rpartition(".")[0])
    return type(owner).__name__ in ("Conv1D", "GptOssExperts")


@torch.no_grad()
def _unrounded(model: nn.Module, folded: dict[str, Tensor]) -> nn.Module:
    """The model with the values that its weights had before they were rounded."""
    params = dict(model.named_parameters())
    for name, value in folded.items():
        fqn, _, expert = name.rstrip("]").partition("[")
        held = params[fqn][int(expert)] if expert else params[fqn]
        (held.mT if _transposed(model, fqn) else held).copy_(value)
    return model


# Few of their linears, where there are many that a fold would have to be proven for.
INCLUDE = {"gemma3n": ["*.mlp.*", "*.self_attn.*"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [(name, FoldedAWQ) for name in FAMILIES] + [(name, FoldedSmoothQuant) for name in ("llama", "gemma2", "opt")],
)
def test_smoothing_leaves_the_function_as_it_is(name: str, algorithm: type[_Folded]) -> None:
    batch = batches_for(name)[0]
    original = family(name)
    expected = output(original, batch)
    algorithm.folded.clear()
    options: dict[str, Any] = {"include": INCLUDE[name], "exclude": ()} if name in INCLUDE else {}
    model, result = _calibrated(name, recipe=MXFP8BlockScaling(), algorithm=algorithm(), **options)
    assert 0 < off(output(model, batch), expected) < 0.2
    smoothed = [record.name for record in result.report.records if record.alpha is not None]
    assert smoothed
    before = dict(original.named_parameters())
    unrounded = _unrounded(model, algorithm.folded)
    moved = [name for name in smoothed if not torch.equal(unrounded.get_parameter(name), before[name])]
    assert moved
    assert off(output(unrounded, batch), expected) < 1e-4


class Unsaid(nn.Module):
    """Experts of I = 32 in H columns, as Llama 4 stores them, or upright; fused, or gate and up apart."""

    def __init__(self, *, turned: bool, fused: bool, hidden: int = 64) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (64, hidden)} if fused else {"gate_proj": (32, hidden), "up_proj": (32, hidden)}
        for name, (rows, columns) in {**shapes, "down_proj": (hidden, 32)}.items():
            shape = (columns, rows) if turned else (rows, columns)
            self.register_parameter(name, nn.Parameter(torch.randn(2, *shape)))


@pytest.mark.parametrize("hidden", [32, 64, 96])
def test_experts_stored_the_other_way_round_are_known_by_their_shapes(hidden: int) -> None:
    """Also where H is I, or 2 I. Gate and up apart do not show it: their shapes are those of a down the other way."""
    for turned, fused in ((True, True), (False, True), (False, False)):
        model = nn.ModuleDict({"experts": Unsaid(turned=turned, fused=fused, hidden=hidden)})
        weights = {f"experts.{name}": param.detach().clone() for name, param in model["experts"].named_parameters()}
        result = calibrate(model, None, recipe=MXFP8BlockScaling(), layers=(), progress=False)
        upright = {name: weight.mT.contiguous() if turned else weight for name, weight in weights.items()}
        assert_same(result.state_dict(), {name: quantize(one, MXFP8BlockScaling()) for name, one in upright.items()})


def test_a_linear_too_small_for_a_block_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.altup\.correction_coefs\.weight: shape .* has K=4"):
        _calibrated("gemma3n", recipe=MXFP8BlockScaling(), exclude=())


# -- caches, and what travels between layers ---------------------------------------------------------------------------


def _results(name: str, algorithm: Any, prepare: Any) -> Any:
    model = family(name)
    batches = prepare(model, batches_for(name))
    return calibrate(
        model, batches, recipe=NVFP4BlockScaling(), algorithm=algorithm, inputs="static", progress=False
    ).state_dict()


def _with_config(use_cache: bool) -> Any:
    def prepare(model: nn.Module, batches: Any) -> Any:
        model.config.use_cache = use_cache
        return batches

    return prepare


def _with_kwargs(model: nn.Module, batches: Any) -> Any:
    model.config.use_cache = False
    return [{**batch, "use_cache": True, "logits_to_keep": 0, "return_dict": True} for batch in batches]


def _with_empty_cache(model: nn.Module, batches: Any) -> Any:
    return [{**batch, "use_cache": True, "past_key_values": DynamicCache(config=model.config)} for batch in batches]


# With every attention alike and with windows; each algorithm with one of them.
CACHES = [*itertools.product(["llama", "gemma3"], [Max(), GPTQ(), GPTAQ()])]


@sampled(("name", "algorithm"), CACHES, [CACHES[0], CACHES[2], CACHES[4]])
def test_caches_make_no_difference(name: str, algorithm: Any) -> None:
    expected = _results(name, algorithm, _with_config(use_cache=False))
    for prepare in (_with_config(use_cache=True), _with_kwargs, _with_empty_cache):
        assert_same(_results(name, algorithm, prepare), expected, "with a cache")


@torch.no_grad()
def _prefilled(model: nn.Module) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    batches = []
    for length in (5, 3):
        cache = DynamicCache(config=model.config)
        model(torch.randint(3, VOCABULARY, (2, length), generator=generator), past_key_values=cache, use_cache=True)
        batches.append(
            {
                "input_ids": torch.randint(3, VOCABULARY, (2, 4), generator=generator),
                "past_key_values": cache,
                "use_cache": True,
            }
        )
    return batches


@main_algorithms
def test_a_prefilled_cache_is_what_it_was_in_every_run(algorithm: Any) -> None:
    results = []
    at_once = {"layers": ()} if algorithm in PAIRED.values() else {"layers": (), "layer_inputs": "unquantized"}
    for options in ({}, {"inputs_on": "disk"}, at_once):
        model = family("llama")
        batches = _prefilled(model)
        results.append(
            calibrate(
                model,
                batches,
                recipe=NVFP4BlockScaling(),
                algorithm=algorithm,
                inputs="static",
                progress=False,
                **options,  # type: ignore[arg-type]
            ).state_dict()
        )
        assert [batch["past_key_values"].get_seq_length() for batch in batches] == [5, 3]
    assert_same(results[1], results[0], "inputs on disk")
    if isinstance(algorithm, Max):
        assert_same(results[2], results[0], "all layers at once")


@pytest.mark.parametrize("name", PARENTS)
def test_whatever_travels_between_layers(name: str) -> None:
    results = [
        calibrate(
            PARENTS[name](), id_batches(), recipe=Float8CurrentScaling(), inputs="static", layers=layers, progress=False
        ).state_dict()
        for layers in (None, ())
    ]
    assert_same(results[0], results[1], "all layers at once")


# -- layers that share keys and values -------------------------------------------------------------------------------


class Shares(nn.Module):
    """A layer that takes the values of the first one from a dict."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(32), first
        if first:
            self.v_proj = nn.Linear(32, 32)
        self.o_proj = nn.Linear(32, 32)

    def forward(self, hidden: Tensor, shared: dict[str, Tensor]) -> Tensor:
        if self.first:
            shared["values"] = self.v_proj(self.norm(hidden))
        return hidden + self.o_proj(shared["values"])


class Sharing(nn.Module):
    """Three layers, one set of values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList(Shares(first=index == 0) for index in range(3))
        with torch.no_grad():
            self.layers[0].v_proj.weight.mul_(torch.exp(1.5 * torch.randn(32, 1)))

    def forward(self, ids: Tensor) -> Tensor:
        hidden, shared = self.embed(ids), {}
        for layer in self.layers:
            hidden = layer(hidden, shared)
        return hidden


IDS = [torch.arange(3 + length).reshape(1, -1) * 5 % 48 for length in (4, 7, 2)]


@pytest.mark.parametrize("algorithm", [FoldedAWQ, FoldedSmoothQuant])
def test_no_factor_is_folded_that_a_later_layer_would_see(algorithm: type[_Folded]) -> None:
    model = Sharing()
    expected = model(IDS[0])
    algorithm.folded.clear()
    result = calibrate(model, IDS, recipe=MXFP8BlockScaling(), algorithm=algorithm(), progress=False)  # type: ignore[arg-type]
    alphas = {record.name: record.alpha for record in result.report.records}
    assert alphas["layers.0.v_proj.weight"] is not None, "behind the norm nobody sees it"
    assert alphas["layers.0.o_proj.weight"] is None
    assert off(_unrounded(model, algorithm.folded)(IDS[0]), expected) < 1e-5


def test_what_layers_share_comes_from_the_unquantized_layer_for_every_batch() -> None:
    ids = IDS[:1]  # the batch that a layer's error is measured on
    results = [
        calibrate(
            Sharing(), ids, recipe=NVFP4BlockScaling(), inputs="static", layers=layers, progress=False
        ).state_dict()
        for layers in (None, ())
    ]
    assert_same(results[0], results[1], "all layers at once")
