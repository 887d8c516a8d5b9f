"""What layers are calibrated on, what the result holds, what is refused: against forwards and scales made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from layerwise import GPTQ, Max, Mse, SmoothQuant
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantize_,
)
from tests.layerwise.algorithm_table import MAIN, TABLE
from tests.layerwise.models import (
    ALGORITHMS,
    DIM,
    RECIPES,
    Toy,
    assert_model_is_result,
    assert_same,
    batches,
    filled,
    fingerprint,
    fingerprints,
    outcome,
    own,
    run,
    shard,
    toy,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves

FLOAT8, NVFP4, MXFP8 = RECIPES["float8_tensor"], RECIPES["nvfp4"], RECIPES["mxfp8"]
LARGEST = {FLOAT8: 448.0, NVFP4: 448.0 * 6.0}  # what an amax is scaled to
Amaxes = dict[str, np.float32]


def two_layers() -> Toy:
    return toy(layers=2)


# -- by hand -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def amaxes(model: nn.Module, data: Sequence[Tensor], under: str = "") -> Amaxes:
    """Module -> the largest |input| of its linear, in numpy, over plain forwards of the whole model."""
    found: Amaxes = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen = np.abs(args[0].detach().float().numpy()).max()
            found[name] = max(found.get(name, seen), seen)

        return hook

    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(under)]
    handles = [module.register_forward_pre_hook(note(name)) for name, module in linears]
    for ids in data:
        model(ids)
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
def install(model: nn.Module, entries: dict[str, Any], under: str) -> None:
    """The values of a result in one part of a plain model."""
    for name, value in entries.items():
        if name.startswith(under) and not name.endswith("input_scale"):
            dense = value.dequantize() if isinstance(value, QuantizedTensor) else value
            model.get_parameter(name).copy_(dense)


def assert_scales(entries: dict[str, Any], expected: Amaxes, recipe: Any, what: str) -> None:
    scales = {name.removesuffix(".input_scale"): v for name, v in entries.items() if name.endswith(".input_scale")}
    assert scales.keys() == expected.keys(), what
    for name, scale in scales.items():
        assert scale.dtype is torch.float32, name
        assert scale.shape == (), name
        # quotient of quotients: the formula rounds twice
        np.testing.assert_allclose(scale.numpy(), expected[name] / LARGEST[recipe], rtol=2**-22, err_msg=name)


def by_hand(name: str, weights: list[Tensor], recipe: Any) -> list[QuantizedTensor]:
    """Linears that share a scale, quantized as one."""
    stacked = torch.cat(weights)
    if name == "Max":
        q = quantize(stacked, recipe)
    else:
        assert recipe == FLOAT8
        q = _mse_by_hand(stacked)
    rows = [len(weight) for weight in weights]
    pieces = {part: value.split(rows) if value.ndim else [value] * len(rows) for part, value in q.parts().items()}
    return [
        QuantizedTensor.from_parts({part: value[i].contiguous() for part, value in pieces.items()}, recipe, q.dtype)
        for i in range(len(rows))
    ]


def _mse_by_hand(weight: Tensor) -> QuantizedTensor:
    """amax * m for 39 values of m, the one of least error."""
    amax, best, least = weight.abs().max(), None, np.inf
    for multiple in np.linspace(0.25, 4, 39).astype(np.float32):
        enc = torch.tensor(448.0) / (amax * torch.tensor(multiple))
        payload = (weight * enc).clamp(-448, 448).to(torch.float8_e4m3fn)
        error = np.square((payload.float() / enc - weight).double().numpy()).sum()
        if error < least:
            least, best = (
                error,
                QuantizedTensor.from_parts({"payload": payload, "scale": 1 / enc}, FLOAT8, weight.dtype),
            )
    assert best is not None
    return best


FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def expected_weights(model: nn.Module, name: str, recipe: Any) -> dict[str, Any]:
    """Parameter -> its weight, quantized by hand; those that an engine fuses share the global scale of NVFP4."""
    together: dict[str, list[str]] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parent, _, own = module_name.rpartition(".")
            fused = FUSED.get(own, own) if recipe == NVFP4 else own
            together.setdefault(f"{parent}.{fused}", []).append(module_name)
    found = {}
    for names in together.values():
        weights = [model.get_submodule(one).weight.detach() for one in names]
        found |= {f"{n}.weight": q for n, q in zip(names, by_hand(name, weights, recipe), strict=True)}
    return found


# -- layer by layer is the whole model at once -------------------------------------------------------------------------

WHOLE = [("Max", "float8_tensor"), ("Max", "nvfp4"), ("Mse", "float8_tensor")]


@pytest.mark.parametrize(("name", "recipe_name"), WHOLE)
def test_layerwise_is_the_whole_model_at_once_and_what_hooks_say(name: str, recipe_name: str) -> None:
    algorithm, recipe = ALGORITHMS[name], RECIPES[recipe_name]
    whole, layered = two_layers(), two_layers()
    expected = expected_weights(whole, name, recipe)
    inputs = amaxes(whole, batches())
    at_once = run(whole, batches(), recipe, algorithm, inputs="static", layers=())
    result = run(layered, batches(), recipe, algorithm, inputs="static")
    assert_same(outcome(layered, result), outcome(whole, at_once), name)
    entries = result.state_dict()
    assert_scales(entries, inputs, recipe, name)
    weights = {key: value for key, value in entries.items() if not key.endswith("input_scale")}
    assert fingerprints(weights) == fingerprints(expected)


SHARES: dict[str, Callable[[list[Tensor], int, int], list[Tensor]]] = {
    "interleaved": lambda data, rank, ranks: data[rank::ranks],
    "uneven": lambda data, rank, ranks: data[:4] if rank == 0 else data[4:],
    "one has none": lambda data, rank, ranks: data if rank == ranks - 1 else [],
}


def _on_ranks(case: tuple[str, str, str, bool]) -> Any:
    name, recipe_name, how, at_once = case
    data = SHARES[how](batches(), dist.get_rank(), dist.get_world_size())
    model = shard(two_layers())
    options = {"layers": ()} if at_once else {}
    result = run(model, iter(data), RECIPES[recipe_name], ALGORITHMS[name], inputs="static", **options)
    return outcome(model, result)


# Two of the shares for each, and two for each of the shares; with the first the model is taken at once. In `make test`
# one for each of either.
UNEVEN = [
    (*one, how, index == 0)
    for number, one in enumerate(WHOLE)
    for index, how in enumerate(SHARES)
    if (index + number) % 3
]


@halves("cases", UNEVEN, [UNEVEN[0], UNEVEN[2], UNEVEN[5]])
def test_layerwise_is_the_whole_model_on_ranks_with_uneven_data(cases: tuple[tuple[str, str, str, bool], ...]) -> None:
    expected = {}
    for name, recipe_name in WHOLE:
        model = two_layers()
        result = run(model, batches(), RECIPES[recipe_name], ALGORITHMS[name], inputs="static")
        expected[name, recipe_name] = outcome(model, result)
    for outcomes in run_ranks_each(2, cases, _on_ranks):
        for case, found in zip(cases, outcomes, strict=True):
            assert_same(found, expected[case[:2]], str(case))


# -- what layers are calibrated on -------------------------------------------------------------------------------------


def _inputs_by_hand(before: nn.Module, entries: dict[str, Any], *, quantized: bool) -> Amaxes:
    """The amaxes that every layer saw: those before it quantized or not, its own weights not."""
    found: Amaxes = {}
    stages = [f"layers.{index}." for index in range(len(before.layers))] + ["head"]
    for stage in stages:
        found |= amaxes(before, batches(), stage)
        if quantized:
            install(before, entries, stage)
    return found


MODES = [
    *((name, None, TABLE[name].onward) for name, algorithm in MAIN.items() if not algorithm.smooths),
    ("Max", "quantized", True),
    ("GPTQ", "unquantized", False),
]


@pytest.mark.parametrize(("name", "layer_inputs", "quantized"), MODES)
def test_a_layer_is_calibrated_on_outputs_of_the_unquantized_or_of_the_quantized_layer(
    name: str, layer_inputs: str | None, quantized: bool
) -> None:
    model = toy(bias=False)
    result = run(model, batches(), FLOAT8, ALGORITHMS[name], inputs="static", layer_inputs=layer_inputs)
    entries = result.state_dict()
    expected = _inputs_by_hand(toy(bias=False), entries, quantized=quantized)
    assert_scales(entries, expected, FLOAT8, name)
    other = _inputs_by_hand(toy(bias=False), entries, quantized=not quantized)
    assert any(expected[key] != other[key] for key in expected), "nothing shows in which mode it ran"


def test_gptq_of_the_second_layer_rests_on_the_quantized_first() -> None:
    """The second layer's bytes alone, calibrated behind a first one that holds the quantized values already."""
    model, staged = two_layers(), two_layers()
    first = run(model, batches(), MXFP8, GPTQ())
    run(staged, batches(), MXFP8, GPTQ(), include=["layers.0.*"])
    second = run(staged, batches(), MXFP8, GPTQ(), include=["layers.1.*"], exclude=[], layers="layers.1")
    found, expected = fingerprints(second.state_dict()), fingerprints(first.state_dict())
    assert found == {name: expected[name] for name in found}
    on_plain = run(two_layers(), batches(), MXFP8, GPTQ(), layer_inputs="unquantized")
    assert fingerprints(on_plain.state_dict()) != expected


@pytest.mark.parametrize("layer_inputs", ["unquantized", "quantized"])
def test_scales_of_inputs_are_those_of_the_folded_model(layer_inputs: str) -> None:
    """What a factor was divided out of is smaller, or larger, and an engine gets it as it is then."""
    model, before = two_layers(), two_layers()
    result = run(model, batches(), FLOAT8, SmoothQuant(), inputs="static", layer_inputs=layer_inputs)
    entries = result.state_dict()
    folded = {name for name, value in entries.items() if name.endswith("norm.weight")}
    assert {"layers.0.attn_norm.weight", "layers.1.mlp_norm.weight", "norm.weight"} <= folded
    scales = {name: value for name, value in entries.items() if name.endswith("input_scale")}
    unfolded = amaxes(before, batches())
    final = amaxes(model, batches())
    # Rounding of the weights moves later inputs a little, a factor left out moves them a lot: the first is exact.
    first = "layers.0.attn.q_proj"
    np.testing.assert_allclose(scales[f"{first}.input_scale"].numpy(), final[first] / 448.0, rtol=1e-5)
    assert abs(unfolded[first] / final[first] - 1) > 0.1, "folding does not show"
    for name, value in scales.items():
        expected = final[name.removesuffix(".input_scale")] / 448.0
        np.testing.assert_allclose(value.numpy(), expected, rtol=0.1, err_msg=name)


# -- what there is afterwards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_model_is_the_result_dequantized_and_nothing_else_changed(name: str) -> None:
    model = toy(layers=2, dtype=torch.bfloat16)
    before, params = fingerprints(model.state_dict()), dict(model.named_parameters())
    result = run(model, batches(2), MXFP8, ALGORITHMS[name], exclude=["layers.0.mlp.*"])
    assert_model_is_result(model, result, before)
    assert all(param is params[key] for key, param in model.named_parameters())
    entries = result.state_dict()
    quantized = {key for key, value in entries.items() if isinstance(value, QuantizedTensor)}
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers.0.mlp" not in n}
    assert quantized == linears
    if not ALGORITHMS[name].writes_weights:
        assert entries.keys() == linears, "an algorithm that writes no weights changes nothing else"
    for key in linears:
        assert fingerprint(entries[key].dequantize()) == fingerprint(model.get_parameter(key)), key
    assert {record.name for record in result.report.records} == linears


def test_linears_that_engines_fuse_share_a_global_scale() -> None:
    entries = run(two_layers(), batches(1), NVFP4, Mse()).state_dict()
    for layer in ("layers.0", "layers.1"):
        for module, names in (("attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            scales = {float(entries[f"{layer}.{module}.{name}.weight"].global_scale) for name in names}
            assert len(scales) == 1, (layer, names, scales)
    assert len({float(value.global_scale) for value in entries.values()}) > 4
    alone = two_layers()
    weight = alone.layers[0].attn.k_proj.weight.detach().clone()
    only = run(alone, batches(1), NVFP4, Max(), include=["*.k_proj"]).state_dict()
    assert fingerprints({"w": only["layers.0.attn.k_proj.weight"]}) == fingerprints({"w": quantize(weight, NVFP4)})


# -- include and exclude -----------------------------------------------------------------------------------------------

CHOICES: list[tuple[list[str], list[str], set[str]]] = [
    (["head"], [], {"head"}),
    (["layers.1.attn.*"], ["*.q_proj", "*.k_proj"], {"layers.1.attn.v_proj", "layers.1.attn.o_proj"}),
    (["*.down_proj", "head"], ["layers.0.*"], {"layers.1.mlp.down_proj", "head"}),
]


@pytest.mark.parametrize(("include", "exclude", "expected"), CHOICES)
def test_include_and_exclude_choose_modules(include: list[str], exclude: list[str], expected: set[str]) -> None:
    model = two_layers()
    before = fingerprints(model.state_dict(), own)
    result = run(model, batches(1), MXFP8, Max(), include=include, exclude=exclude)
    assert result.state_dict().keys() == {f"{name}.weight" for name in expected}
    assert_model_is_result(model, result, before)


def test_patterns_that_match_nothing() -> None:
    with pytest.raises(ValueError, match=r"include pattern 'lm_head' matches no module with a weight to quantize"):
        run(two_layers(), batches(1), MXFP8, Max(), include=["*", "lm_head"])
    with pytest.warns(UserWarning, match=r"exclude pattern 'lm_head' matches no module with a weight to quantize"):
        result = run(two_layers(), batches(1), MXFP8, Max(), exclude=["lm_head"])
    assert "head.weight" in result.state_dict()
    with pytest.raises(TypeError, match=r"include is a list of patterns, got 'head'; write \['head'\]"):
        run(two_layers(), batches(1), MXFP8, Max(), include="head")


def _tied() -> nn.Module:
    model = two_layers()
    model.head.weight = model.embed.weight
    return model


def test_tied_weights_are_left_out_and_refused_where_they_are_asked_for() -> None:
    model = _tied()
    before = fingerprint(model.embed.weight)
    result = run(model, batches(1), MXFP8, ALGORITHMS["SmoothQuant"])
    assert "head.weight" not in result.state_dict()
    assert model.head.weight is model.embed.weight
    assert fingerprint(model.embed.weight) == before
    with pytest.raises(ValueError, match=r"include pattern 'head' matches only weights that are tied.*untie them"):
        run(_tied(), batches(1), MXFP8, Max(), include=["head"])


# -- what is refused ---------------------------------------------------------------------------------------------------


def _odd() -> nn.Module:
    model = two_layers()
    model.layers[1].mlp.down_proj = nn.Linear(90, DIM)
    return model


def _stored(recipe: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = two_layers()
        quantize_(model, recipe)
        return model

    return build


REFUSALS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], type[Exception], str]] = {
    "K": (_odd, MXFP8, {}, ValueError, r"layers\.1\.mlp\.down_proj\.weight.*90.*32"),
    "delayed": (
        two_layers,
        Float8DelayedScaling(),
        {},
        TypeError,
        r"Float8DelayedScaling.*calibrate with Float8CurrentScaling",
    ),
    "static blocks": (two_layers, MXFP8, {"inputs": "static"}, ValueError, r"static.*MXFP8.*inputs=\"dynamic\""),
    "other storage": (
        _stored(MXFP8),
        NVFP4,
        {},
        ValueError,
        r"layers\.0\.attn\.q_proj\.weight is stored quantized under MXFP8.*expected NVFP4.*calibrate with that recipe",
    ),
    "float64": (lambda: two_layers().double(), MXFP8, {}, TypeError, r"q_proj\.weight is torch\.float64; expected"),
    "no recipe": (two_layers, "mxfp8", {}, TypeError, r"expected a recipe, such as .*, got 'mxfp8'"),
    "a class": (two_layers, MXFP8, {"algorithm": Max}, TypeError, r"expected an instance, such as Max\(\)"),
    "inputs": (two_layers, MXFP8, {"inputs": "fixed"}, ValueError, r"inputs='fixed' is not one of 'dynamic', 'static'"),
    "layer inputs": (
        two_layers,
        MXFP8,
        {"layer_inputs": "both"},
        ValueError,
        r"layer_inputs='both' is not one of None, 'unquantized', 'quantized'",
    ),
    "on meta": (
        lambda: two_layers().to("meta"),
        MXFP8,
        {},
        ValueError,
        r"embed\.weight is on the meta.*weights=",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_name_with_nothing_changed(case: str) -> None:
    build, recipe, options, kind, text = REFUSALS[case]
    model = build()
    before = {name: param._version for name, param in model.named_parameters()}
    seen: list[Any] = []
    options = {"algorithm": Max(), **options}
    with pytest.raises(kind, match=f"(?s){text}"):
        run(model, batches(1), recipe, on_event=seen.append, **options)
    assert not seen
    assert {name: param._version for name, param in model.named_parameters()} == before


def _alike_on_meshes() -> str:
    model = fully_shard(filled(nn.Sequential(nn.Linear(DIM, 90), nn.Linear(90, DIM)), torch.float32))
    with pytest.raises(ValueError, match=r"1\.weight.*90") as caught:
        run(model, [torch.ones(2, DIM)], MXFP8, Max())
    return str(caught.value)


def test_a_sharded_model_is_refused_alike_on_all_ranks() -> None:
    assert len(set(run_ranks(3, _alike_on_meshes))) == 1


def test_recipes_of_the_same_bytes_fit_quantized_storage() -> None:
    model = _stored(Float8CurrentScaling(activations="dynamic"))()
    result = run(model, batches(1), Float8CurrentScaling(), Max())
    assert len(result.state_dict()) == 2 * 8 + 1
    assert isinstance(model.head.weight, QuantizedTensor)
    with pytest.raises(ValueError, match="stored quantized"):
        run(_stored(MXFP8BlockScaling(blocks="row"))(), batches(1), MXFP8BlockScaling(element="e5m2"), Max())
    with pytest.raises(ValueError, match="stored quantized"):
        run(_stored(NVFP4BlockScaling())(), batches(1), MXFP8, Max())
