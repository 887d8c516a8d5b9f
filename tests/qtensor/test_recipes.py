"""Recipes as values, and `activations`: a way to compute that leaves no trace in what is stored."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dcp_adapters import read_manifest
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.recipes import Recipe
from tests.dcp_adapters.cases import load, save
from tests.qtensor.recipes_under_test import all_recipes, same_bytes, same_parts, weight
from tests.recipes import HANDS, MAIN, facts


def dynamic(recipe: Any) -> Any:
    return dataclasses.replace(recipe, activations="dynamic")


def unlikely(recipe: Any) -> QuantizedTensor:
    """A weight whose bytes no quantization gives: the largest elements are gone, the scales are theirs still."""
    q = quantize(weight(), recipe)
    small = 0x33 if facts(recipe).element.bits == 4 else 0x3F  # leaves the elements below 2 in magnitude
    payload = (q.payload.view(torch.uint8) & small).view(q.payload.dtype)
    parts = {**q.parts(), "payload": payload}
    made = QuantizedTensor.from_parts(parts, recipe, q.dtype)
    again = quantize(made.dequantize(), recipe)
    assert not all(same_bytes(part, made.parts()[name]) for name, part in again.parts().items())
    return made


def test_each_hand_of_recipes_has_what_the_code_distinguishes() -> None:
    assert sorted(name for hand in HANDS for name in hand) == sorted(MAIN)
    for hand in HANDS:
        known = [facts(recipe) for recipe in hand.values()]
        assert any(each.tensor_wide for each in known)
        assert any(each.square for each in known)
        assert {each.element.bits for each in known} == {4, 8}


def bytes_agree(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    theirs = b.parts()
    return all(same_bytes(part, theirs[name]) for name, part in a.parts().items())


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling])
@pytest.mark.parametrize("value", ["static", "", True, 0])
def test_activations_are_none_or_dynamic(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="activations") as caught:
        kind(activations=value)
    assert str(caught.value) == f"{kind.__name__}: activations={value!r} is not one of None, 'dynamic'"


@all_recipes
def test_activations_are_part_of_the_value(recipe: Any) -> None:
    """Compiled graphs are cached by recipe, so two ways to compute must be two values."""
    other = dynamic(recipe)
    assert other != recipe
    assert hash(other) != hash(recipe)
    assert repr(other) != repr(recipe)
    assert pickle.loads(pickle.dumps(other)) == other
    assert copy.deepcopy(other) is other
    assert other.stored == recipe
    assert recipe.stored is recipe


def test_a_recipe_is_written_as_it_is_built() -> None:
    assert repr(NVFP4BlockScaling()) == "NVFP4BlockScaling(blocks='row')"
    assert repr(NVFP4BlockScaling(activations="dynamic")) == "NVFP4BlockScaling(blocks='row', activations='dynamic')"
    assert all(kind.__repr__ is Recipe.__repr__ for kind in Recipe.registry.values())  # dataclass(repr=False)


@all_recipes
def test_json_tells_what_the_bytes_are_and_nothing_else(recipe: Any) -> None:
    assert dynamic(recipe).to_json() == recipe.to_json()
    assert "activations" not in recipe.to_json()
    assert Recipe.from_json(dynamic(recipe).to_json()) == recipe
    assert Recipe.from_json({**recipe.to_json(), "activations": "from elsewhere"}) == recipe


@all_recipes
def test_a_recipe_pickled_before_the_field_existed_is_weight_only(recipe: Any) -> None:
    old = object.__new__(type(recipe))
    old.__dict__.update({name: value for name, value in vars(recipe).items() if name != "activations"})
    again = pickle.loads(pickle.dumps(old))
    assert again == recipe
    assert again.activations is None


# -- the same bytes ----------------------------------------------------------------------------------------------------


@all_recipes
def test_quantization_does_not_depend_on_activations(recipe: Any) -> None:
    assert bytes_agree(quantize(weight(), dynamic(recipe)), quantize(weight(), recipe))


@all_recipes
@pytest.mark.parametrize("into_dynamic", [True, False])
def test_copy_moves_bytes_between_recipes_that_differ_in_activations(recipe: Any, into_dynamic: bool) -> None:
    source, target = (recipe, dynamic(recipe)) if into_dynamic else (dynamic(recipe), recipe)
    src, dst = unlikely(source), quantize(weight(seed=1), target)
    dst.copy_(src)
    assert dst.recipe == target
    assert bytes_agree(dst, src)


@all_recipes
@pytest.mark.parametrize("into_dynamic", [True, False])
def test_a_checkpoint_loads_whatever_the_activations(recipe: Any, into_dynamic: bool, tmp_path: Path) -> None:
    source, target = (recipe, dynamic(recipe)) if into_dynamic else (dynamic(recipe), recipe)
    src = unlikely(source)
    save({"w": nn.Parameter(src)}, tmp_path)
    assert read_manifest(tmp_path).tensors["w"].recipe == recipe
    dst = nn.Parameter(quantize(weight(seed=1), target))
    load({"w": dst}, tmp_path)
    assert dst.recipe == target
    assert bytes_agree(dst, src)


def test_other_fields_still_have_to_agree(tmp_path: Path) -> None:
    save({"w": quantize(weight(), MXFP8BlockScaling(activations="dynamic"))}, tmp_path)
    target = quantize(weight(seed=1), MXFP8BlockScaling(element="e5m2", activations="dynamic"))
    before = target.clone()
    with pytest.raises(CheckpointException, match="w: the checkpoint holds MXFP8BlockScaling"):
        load({"w": target}, tmp_path)
    assert same_parts(target, before)


def test_a_checkpoint_lists_recipes_of_the_same_bytes_once(tmp_path: Path) -> None:
    recipe = MXFP8BlockScaling()
    save({"a": quantize(weight(), recipe), "b": quantize(weight(), dynamic(recipe))}, tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.to_json()["recipes"] == [recipe.to_json()]
    assert {entry.recipe for entry in manifest.tensors.values()} == {recipe}
