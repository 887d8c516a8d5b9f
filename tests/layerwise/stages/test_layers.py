"""Which modules are the layers: found by their parameters, or named by the user."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.stages.layers import find_layers


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(experts))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Layer() for _ in range(3))
        self.text = nn.Module()
        self.text.layers = nn.ModuleList(Layer(experts=4) for _ in range(2))
        self.head = nn.Linear(4, 4)


NET = Net()
TEXT = ["text.layers.0", "text.layers.1"]
VISION = ["vision.0", "vision.1", "vision.2"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, TEXT),
        ("text.layers", TEXT),
        ("text.layers.*", TEXT),
        ("text.layers*", TEXT),
        ("vision.[01]", VISION[:2]),
        (NET.vision, VISION),
        (NET.vision[1], ["vision.1"]),
        ([NET.vision, "text.layers.1"], [*VISION, "text.layers.1"]),
        (["vision.1", "vision.0", NET.vision[1]], ["vision.1", "vision.0"]),
        (["vision.*", "text.layers"], VISION + TEXT),
        ("head", ["head"]),
    ],
)
def test_layers_are_found(layers: Any, expected: list[str]) -> None:
    found = find_layers(NET, layers)
    assert [fqn for fqn, _ in found] == expected
    assert all(NET.get_submodule(fqn) is module for fqn, module in found)


def test_the_model_may_be_the_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [fqn for fqn, _ in find_layers(model)] == ["0", "1", "2"]


def test_no_list_is_no_layers() -> None:
    assert find_layers(nn.Linear(2, 2)) == []
    empty = nn.Module()
    empty.none, empty.free = nn.ModuleList(), nn.Sequential(nn.ReLU())
    assert find_layers(empty) == []


def test_layers_on_no_device_are_found() -> None:
    with torch.device("meta"):
        assert [fqn for fqn, _ in find_layers(Net())] == TEXT


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        (
            "decoder.*",
            ValueError,
            "'decoder.*' matches no module of the model; its module lists are 'vision' (3 modules), 'text.layers' (2",
        ),
        (nn.Linear(1, 1), ValueError, "layers: a Linear was given that is not in the model"),
        (["vision", "vision.0.mlp"], ValueError, "layers: 'vision.0.mlp.0' is inside 'vision.0'; a layer is"),
        ([3], TypeError, "layers must be names, patterns or modules of the model, got a int: 3"),
        ([], ValueError, "layers=[] selects no module; its module lists are"),
    ],
)
def test_what_cannot_be_layers_is_named(layers: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        find_layers(NET, layers)


def test_a_model_without_a_list_says_so() -> None:
    with pytest.raises(ValueError, match="'x' matches no module of the model; it has no module list"):
        find_layers(nn.Linear(1, 1), "x")
