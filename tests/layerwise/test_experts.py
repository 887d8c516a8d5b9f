"""Experts that few tokens reach, or none: on some ranks, or anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from layerwise import GPTQ, Max
from qtensor import QuantizedTensor, quantize
from tests.layerwise.algorithm_table import MAIN
from tests.layerwise.models import (
    ALGORITHMS,
    RECIPES,
    VOCAB,
    Experts,
    assert_model_is_result,
    assert_same,
    expert_lists,
    fingerprints,
    layers_of,
    outcome,
    own,
    qwen3_moe,
    run,
    shard,
)
from tests.ranks import run_ranks_each

FLOAT8, FLOAT8_ROWS, NVFP4, MXFP8 = (RECIPES[n] for n in ("float8_tensor", "float8_row", "nvfp4", "mxfp8"))
EXPERTS = 4
ON_SCALES_OF_MAX = GPTQ(scales=Max())
OTHERS = {"LocalHessian": FLOAT8_ROWS, "SmoothQuant": MXFP8, "AWQ": FLOAT8, "AWQ, then GPTQ": MXFP8}
METHODS = {name: (algorithm, OTHERS.get(name, NVFP4)) for name, algorithm in ALGORITHMS.items()}
Outcome = dict[str, dict[str, str]]


def static(recipe: Any) -> str:
    return "dynamic" if recipe == MXFP8 else "static"


# -- lists of experts --------------------------------------------------------------------------------------------------


def ids_for(expert: int, shape: tuple[int, int], seed: int) -> Tensor:
    """Ids that all go to one expert: its remainder."""
    choices = torch.arange(expert, VOCAB, EXPERTS)
    return choices[torch.randint(0, len(choices), shape, generator=torch.Generator().manual_seed(seed))]


# Expert 0 on even ranks, 1 and 2 on odd ones, 3 on none.
DATA = [ids_for(0, (2, 5), 0), ids_for(1, (1, 7), 1), ids_for(0, (1, 3), 2), ids_for(2, (2, 4), 3)]
STARVED = [f"layers.{layer}.mlp.experts.3.{name}.weight" for layer in (0, 1) for name in ("up_proj", "down_proj")]


def reached(model: nn.Module, data: list[Tensor]) -> set[str]:
    """The linears of experts that some token reaches."""
    found = set()
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".experts." in n]
    handles = [m.register_forward_hook(lambda *_, n=n: found.add(f"{n}.weight")) for n, m in modules]
    with torch.no_grad():
        for ids in data:
            model(ids)
    for handle in handles:
        handle.remove()
    return found


def test_the_data_starve_experts_as_they_should() -> None:
    model = expert_lists()
    everything = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".experts." in n}
    assert everything - reached(model, DATA) == set(STARVED)
    even, odd = reached(model, DATA[0::2]), reached(model, DATA[1::2])
    assert {name.split(".")[4] for name in even} == {"0"}
    assert {name.split(".")[4] for name in odd} == {"1", "2"}


def _lists(case: tuple[str, bool]) -> Outcome:
    method, nested = case
    algorithm, recipe = METHODS[method]
    model: Any = expert_lists()
    if nested:
        for layer in model.layers:
            for expert in layer.mlp.experts:
                fully_shard(expert)
    shard(model)
    before = fingerprints(model.state_dict(), own)
    data = DATA[dist.get_rank() :: 2] if dist.get_rank() < 2 else []
    result = run(model, data, recipe, algorithm, inputs=static(recipe))
    assert_model_is_result(model, result, before)
    return outcome(model, result)


@pytest.mark.full
def test_starved_experts_of_a_list_come_to_what_one_process_comes_to() -> None:
    """Two ranks with tokens for some of them, one with no batch; FSDP modules of their own are gathered on all."""
    methods = [*MAIN, "AWQ, then GPTQ"]
    cases = [(method, index % 2 == 1) for index, method in enumerate(methods)]
    expected = {}
    for method in methods:
        algorithm, recipe = METHODS[method]
        model = expert_lists()
        expected[method] = outcome(model, run(model, DATA, recipe, algorithm, inputs=static(recipe)))
        assert sorted(expected[method]["starved"]) == sorted(STARVED)
    for rank, outcomes in enumerate(run_ranks_each(3, cases, _lists)):
        for (method, nested), found in zip(cases, outcomes, strict=True):
            assert_same(found, expected[method], f"{method} on rank {rank}, experts wrapped by themselves: {nested}")


@pytest.mark.parametrize("algorithm", [Max(), ALGORITHMS["AWQ"], ON_SCALES_OF_MAX], ids=repr)
def test_a_starved_expert_is_quantized_from_its_weights_and_its_input_from_its_siblings(algorithm: Any) -> None:
    model = expert_lists()
    weights = {starved: model.get_parameter(starved).detach().clone() for starved in STARVED}
    result = run(model, DATA, FLOAT8, algorithm, inputs="static")
    entries = result.state_dict()
    assert list(result.starved) == STARVED
    for starved, weight in weights.items():
        assert fingerprints({"w": entries[starved]}) == fingerprints({"w": quantize(weight, FLOAT8)})
        stem = starved.removesuffix(".weight")
        siblings = [float(entries[f"{stem.replace('.3.', f'.{i}.')}.input_scale"]) for i in range(3)]
        assert float(entries[f"{stem}.input_scale"]) == max(siblings)
    records = {record.name: record for record in result.report.records}
    for starved in STARVED:
        assert records[starved].tokens == 0
        assert records[starved].input_amax is None
    assert all(record.tokens for key, record in records.items() if key not in STARVED)
    _assert_usable_scales(entries)


def _assert_usable_scales(entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        if isinstance(value, QuantizedTensor):
            assert torch.isfinite(value.dequantize()).all(), name
            module = name.removesuffix(".weight") if value.ndim == 2 else name
            scale = entries[f"{module}.input_scale"]
            assert scale.dtype is torch.float32
            assert np.isfinite(float(scale)), name
            assert float(scale) > 0, name


class _Silent(Experts):
    """Experts whose inputs are all zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.0)


@pytest.mark.parametrize("recipe", [FLOAT8, NVFP4], ids=["float8", "nvfp4"])
def test_inputs_of_zeros_have_a_scale(recipe: Any) -> None:
    model: Any = expert_lists(layers=1)
    silent = _Silent(EXPERTS)
    silent.load_state_dict(model.layers[0].mlp.state_dict())
    model.layers[0].mlp = silent
    result = run(model, DATA, recipe, ALGORITHMS["Max"], inputs="static")
    _assert_usable_scales(result.state_dict())


# -- experts in one parameter ------------------------------------------------------------------------------------------

IDS = [torch.tensor([[2, 2, 2]]), torch.tensor([[5, 5, 5, 5], [5, 5, 5, 5]])]


def starving(implementation: str) -> nn.Module:
    """Two of four experts are never chosen; the two that are, for all tokens."""
    model = qwen3_moe(implementation)
    with torch.no_grad():
        for layer in layers_of(model):
            gate = layer.mlp.gate.weight  # [experts, K]
            # a shift that all tokens share: the mean direction speaks for experts 0 and 1
            layer.post_attention_layernorm.weight.fill_(1.0)
            gate[:2] = 5.0 * _direction(model)
            gate[2:] = -5.0 * _direction(model)
        model.model.embed_tokens.weight.add_(20.0 * _direction(model))
    return model


def _direction(model: Any) -> Tensor:
    width = model.config.hidden_size
    return torch.ones(width) / width**0.5


STARVED_3D = [
    f"model.layers.{layer}.mlp.experts.{name}[{expert}]"
    for layer in (0, 1)
    for name in ("gate_up_proj", "down_proj")
    for expert in (2, 3)
]
BUILDS: dict[str, Callable[[], Any]] = {
    "eager": lambda: starving("eager"),
    "grouped_mm": lambda: starving("grouped_mm"),
}


@pytest.mark.parametrize("implementation", BUILDS)
def test_experts_in_one_parameter(implementation: str) -> None:
    """A scale for each; one that no token reached is named by its number, and scaled from its weights."""
    pytest.importorskip("transformers")
    model = BUILDS[implementation]()
    weights = {name: param.detach().clone() for name, param in model.named_parameters() if ".mlp.experts." in name}
    before = fingerprints(model.state_dict(), own)
    result = run(model, IDS, FLOAT8_ROWS, ON_SCALES_OF_MAX, inputs="static")
    assert list(result.starved) == STARVED_3D
    assert_model_is_result(model, result, before)
    entries = result.state_dict()
    for name, weight in weights.items():
        expected = quantize(weight, FLOAT8_ROWS)
        for expert in (2, 3):
            assert torch.equal(entries[name].payload[expert].float(), expected.payload[expert].float()), name
        for expert in (0, 1):
            assert not torch.equal(entries[name].payload[expert].float(), expected.payload[expert].float()), name
        assert torch.equal(entries[name].scale, expected.scale), f"{name}: GPTQ keeps the scales of the weights"
    _assert_usable_scales(entries)


def test_experts_that_would_need_several_scales_where_there_is_one_are_refused() -> None:
    pytest.importorskip("transformers")
    model = qwen3_moe()
    before = fingerprints(model.state_dict())
    text = r"layers\.0\.mlp\.experts\.gate_up_proj: its experts came to different values of amax.*granularity=.row."
    with pytest.raises(ValueError, match=text):
        run(model, IDS, FLOAT8, ALGORITHMS["Mse"])
    assert fingerprints(model.state_dict()) == before


def test_both_ways_to_multiply_experts_have_the_same_inputs() -> None:
    pytest.importorskip("transformers")
    found = []
    for implementation in ("eager", "grouped_mm"):
        model = qwen3_moe(implementation)
        entries = run(model, IDS, NVFP4, ALGORITHMS["Max"], inputs="static").state_dict()
        found.append({name: float(value) for name, value in entries.items() if name.endswith("input_scale")})
    eager, grouped = found
    assert eager.keys() == grouped.keys()
    assert {f"model.layers.{i}.mlp.experts.{n}.input_scale" for i in (0, 1) for n in ("gate_up_proj", "down_proj")} <= {
        *eager
    }
    for name, value in eager.items():
        np.testing.assert_allclose(grouped[name], value, rtol=1e-4, err_msg=name)


def _in_one_parameter(case: tuple[str, str]) -> Outcome:
    implementation, method = case
    algorithm, recipe = METHODS[method]
    model = shard(BUILDS[implementation]())
    data = IDS[dist.get_rank() :: 2] if dist.get_rank() < 2 else []
    return outcome(model, run(model, data, recipe, algorithm, inputs=static(recipe)))


@pytest.mark.full
def test_experts_in_one_parameter_on_ranks() -> None:
    """Four experts on three ranks: two, two and none."""
    pytest.importorskip("transformers")
    cases = [("eager", "GPTQ"), ("eager", "SmoothQuant"), ("grouped_mm", "Max"), ("grouped_mm", "LocalHessian")]
    cases += [("grouped_mm", "AWQ, then GPTQ"), ("grouped_mm", "GPTAQ"), ("grouped_mm", "Qronos")]
    expected = []
    for implementation, method in cases:
        algorithm, recipe = METHODS[method]
        model = BUILDS[implementation]()
        expected.append(outcome(model, run(model, IDS, recipe, algorithm, inputs=static(recipe))))
        assert sorted(expected[-1]["starved"]) == sorted(STARVED_3D)
    for rank, outcomes in enumerate(run_ranks_each(3, cases, _in_one_parameter)):
        for case, found, one in zip(cases, outcomes, expected, strict=True):
            assert_same(found, one, f"{case} on rank {rank}")
