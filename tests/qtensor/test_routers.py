"""Routers stay as they are where everything is quantized: of models of transformers, and by names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerwise.stages.targets import find_targets
from qtensor import Float8CurrentScaling, QuantizedTensor, quantize_, quantized_model_init
from qtensor.model.routers import routers_among

ROWS = Float8CurrentScaling()


class Block(nn.Module):
    """A router beside experts, and a gate that is none."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        if first:
            self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        if not first:
            self.gate = nn.Linear(32, 4)
        self.shared_expert_gate = nn.Linear(32, 1)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(32, 32)})
        self.router = nn.ModuleDict({"classifier": nn.Linear(32, 4)})


LEFT = {"gate", "shared_expert_gate", "router.classifier"}


def quantized(model: nn.Module) -> set[str]:
    return {
        name.removesuffix(".weight") for name, value in model.named_parameters() if isinstance(value, QuantizedTensor)
    }


@pytest.mark.parametrize("first", [True, False])
def test_by_their_names(*, first: bool) -> None:
    others = {"mlp.gate", *(f"experts.{number}" for number in range(4))}
    with quantized_model_init(ROWS):
        assert quantized(Block(first=first)) == others
    assert {name.removesuffix(".weight") for name in quantize_(Block(first=first), ROWS)} == others
    assert {target.module_name for target in find_targets(Block(first=first), ROWS)} == others


def test_they_are_taken_where_they_are_asked_for() -> None:
    assert quantize_(Block(first=True), ROWS, include=["gate", "experts.0"]) == ["gate.weight", "experts.0.weight"]
    assert [each.name for each in find_targets(Block(first=True), ROWS, ["*classifier"])] == [
        "router.classifier.weight"
    ]
    assert quantize_(Block(first=True), ROWS, include=["*gate"]) == ["mlp.gate.weight"]  # which is no router


def test_names_of_what_is_beside_them() -> None:
    names = ["a.experts.0.w1", "a.gate", "b.gate", "c.experts", "c.wg", "d.mlp.router", "d.mlp.router.proj"]
    assert routers_among(names, names) == {"a.gate", "c.wg", "d.mlp.router", "d.mlp.router.proj"}


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_of_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    import transformers

    from tests.dcp_adapters.hf.renamed_models import CONFIGS

    def build() -> nn.Module:
        model: nn.Module = getattr(transformers, name)(CONFIGS[name]())
        return model

    with torch.device("meta"):
        model = build()
        with quantized_model_init(ROWS):
            born = build()
    routers = {fqn for fqn, _ in model.named_modules() if fqn.endswith((".router", ".gate"))}
    assert routers
    named = {name.removesuffix(".weight") for name in quantize_(model, ROWS)}
    assert named == quantized(born)
    assert not named & routers
