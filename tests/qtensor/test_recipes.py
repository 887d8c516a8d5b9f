"""Recipes as values; `activations` and `gradients`: ways to compute that leave no trace in what is stored."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import qtensor
from dcp_adapters import read_manifest
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from qtensor.spec.recipes import Recipe
from tests.dcp_adapters.cases import load, save
from tests.qtensor.recipes_under_test import RECIPES, all_recipes, same_bytes, same_parts, weight
from tests.recipes import HANDS, MAIN, facts

LOW_PRECISION = {name: recipe for name, recipe in RECIPES.items() if recipe.gradient_elements}
low_precision_recipes = pytest.mark.parametrize("recipe", LOW_PRECISION.values(), ids=LOW_PRECISION.keys())


def dynamic(recipe: Any) -> Any:
    return dataclasses.replace(recipe, activations="dynamic")


def low_precision(recipe: Any) -> Any:
    name = "e4m3" if "e4m3" in recipe.gradient_elements else "nvfp4"
    return dataclasses.replace(recipe, activations="dynamic", gradients=name)


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


@pytest.mark.parametrize(
    ("kind", "elements"),
    [
        (Float8CurrentScaling, "'e4m3', 'e5m2'"),
        (Float8DelayedScaling, "'e4m3', 'e5m2'"),
        (MXFP8BlockScaling, "'e4m3'"),
        (NVFP4BlockScaling, "'nvfp4', 'nvfp4-nearest', 'nvfp4-unrotated'"),
    ],
)
def test_gradients_are_none_or_an_element(kind: Any, elements: str) -> None:
    for value in ("dynamic", "", True, "e2m1", *(["e5m2"] if kind in (MXFP8BlockScaling, NVFP4BlockScaling) else [])):
        with pytest.raises(ValueError, match="gradients") as caught:
            kind(activations="dynamic", gradients=value)
        assert str(caught.value) == f"{kind.__name__}: gradients={value!r} is not one of None, {elements}"


def test_gradients_need_quantized_inputs() -> None:
    with pytest.raises(ValueError, match="needs activations") as caught:
        MXFP8BlockScaling(gradients="e4m3")
    assert str(caught.value) == (
        "MXFP8BlockScaling: gradients='e4m3' needs activations=\"dynamic\", since a product whose input stays dense in "
        "forward has no quantized input for backward"
    )
    with pytest.raises(ValueError, match="needs activations"):
        dataclasses.replace(low_precision(MXFP8BlockScaling()), activations=None)


@pytest.mark.parametrize("kind", [MXFP4BlockScaling, Int4GroupScaling, Float8BlockScaling])
def test_formats_without_a_quantized_backward_refuse_it(kind: Any) -> None:
    with pytest.raises(ValueError, match="not offered") as caught:
        kind(activations="dynamic", gradients="e4m3")
    said, known = str(caught.value).split("or choose one of ")
    assert said == (
        f"{kind.__name__}: gradients='e4m3' is not offered for this format, whose backward products are dense; leave "
        "it None, "
    )
    assert {"Float8CurrentScaling", "Float8DelayedScaling", "MXFP8BlockScaling"} <= set(known.split(", "))
    assert kind.__name__ not in known.split(", ")


@low_precision_recipes
def test_gradients_are_part_of_the_value(recipe: Any) -> None:
    other = low_precision(recipe)
    assert len({other, dynamic(recipe), recipe}) == 3
    assert len({repr(each) for each in (other, dynamic(recipe), recipe)}) == 3
    assert repr(other).endswith(f"activations='dynamic', gradients={other.gradients!r})")
    assert pickle.loads(pickle.dumps(other)) == other
    assert copy.deepcopy(other) is other
    assert other.stored == recipe
    assert eval(repr(other), vars(qtensor)) == other


def test_a_choice_of_scales_is_recorded_only_where_there_is_one() -> None:
    """Recipes without one are told, and stored, as they were before there was a choice."""
    plain, chosen = NVFP4BlockScaling(), NVFP4BlockScaling(scale_choice="4over6")
    assert plain.to_json() == {"type": "NVFP4BlockScaling", "blocks": "row"}
    assert chosen.to_json() == {"type": "NVFP4BlockScaling", "blocks": "row", "scale_choice": "4over6"}
    assert repr(chosen) == "NVFP4BlockScaling(blocks='row', scale_choice='4over6')"
    for recipe in (plain, chosen):
        assert Recipe.from_json(recipe.to_json()) == recipe
        assert eval(repr(recipe), vars(qtensor)) == recipe
    assert len({plain, chosen, plain.stored, chosen.stored}) == 2


def test_a_choice_of_scales_is_one_of_rows() -> None:
    with pytest.raises(ValueError, match="scale_choice=True is not one of None, '4over6'"):
        NVFP4BlockScaling(scale_choice=True)
    with pytest.raises(ValueError, match="scale_choice") as caught:
        NVFP4BlockScaling(blocks="square", scale_choice="4over6")
    assert str(caught.value) == (
        "NVFP4BlockScaling: scale_choice='4over6' is not offered for blocks='square', where shards that hold pieces of "
        'a block would have to agree on its errors, too; take blocks="row", or leave scale_choice None'
    )


FAST = [
    Float8CurrentScaling(activations="dynamic", accumulation="fast"),
    Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2", accumulation="fast"),
    Float8DelayedScaling(activations="dynamic", accumulation="fast"),
]


@pytest.mark.parametrize("recipe", FAST, ids=repr)
def test_accumulation_is_part_of_the_value_and_of_no_bytes(recipe: Any, tmp_path: Path) -> None:
    plain = dataclasses.replace(recipe, accumulation=None)
    assert len({recipe, plain}) == len({repr(recipe), repr(plain)}) == 2
    assert repr(recipe) == repr(plain)[:-1] + ", accumulation='fast')"
    assert pickle.loads(pickle.dumps(recipe)) == eval(repr(recipe), vars(qtensor)) == recipe
    assert recipe.to_json() == plain.to_json()
    assert "accumulation" not in recipe.to_json()
    assert recipe.stored == plain.stored
    assert recipe.of_backward.accumulation is None
    save({"w": nn.Parameter(quantize(weight(), recipe))}, tmp_path)
    assert "accumulation" not in str(read_manifest(tmp_path).to_json())
    loaded = nn.Parameter(quantize(weight(seed=1), plain))
    load({"w": loaded}, tmp_path)
    assert loaded.recipe == plain


def test_accumulation_is_none_or_fast_and_needs_quantized_inputs() -> None:
    for kind, known in (
        (Float8CurrentScaling, "None, 'fast'"),
        (MXFP8BlockScaling, "None"),
        (NVFP4BlockScaling, "None"),
    ):
        with pytest.raises(ValueError, match="accumulation") as caught:
            kind(activations="dynamic", accumulation="slow")
        assert str(caught.value) == f"{kind.__name__}: accumulation='slow' is not one of {known}"
    with pytest.raises(ValueError, match="needs activations") as caught:
        Float8CurrentScaling(accumulation="fast")
    assert str(caught.value) == (
        "Float8CurrentScaling: accumulation='fast' needs activations=\"dynamic\", since a dense product is torch's own"
    )


def test_a_recipe_pickled_before_accumulation_existed_adds_up_in_fp32() -> None:
    old = object.__new__(Float8CurrentScaling)
    values = {name: value for name, value in vars(FAST[0]).items() if name != "accumulation"}
    old.__dict__.update(values)
    again = pickle.loads(pickle.dumps(old))
    assert again == dataclasses.replace(FAST[0], accumulation=None)
    assert again.accumulation is None


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


@low_precision_recipes
def test_json_does_not_tell_of_gradients(recipe: Any) -> None:
    assert low_precision(recipe).to_json() == recipe.to_json()
    assert Recipe.from_json({**recipe.to_json(), "gradients": "from elsewhere"}) == recipe


@low_precision_recipes
def test_a_recipe_pickled_before_gradients_existed_has_a_dense_backward(recipe: Any) -> None:
    old = object.__new__(type(recipe))
    old.__dict__.update({name: value for name, value in vars(dynamic(recipe)).items() if name != "gradients"})
    again = pickle.loads(pickle.dumps(old))
    assert again == dynamic(recipe)
    assert again.gradients is None


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


@low_precision_recipes
@pytest.mark.parametrize("into_gradients", [True, False])
def test_bytes_move_between_recipes_that_differ_in_gradients(recipe: Any, into_gradients: bool, tmp_path: Path) -> None:
    """By copy_ and through a checkpoint, which holds what it held before there were gradients: no conversion."""
    source, target = recipe, low_precision(recipe)
    if not into_gradients:
        source, target = target, source
    src, dst = unlikely(source), quantize(weight(seed=1), target)
    dst.copy_(src)
    assert bytes_agree(dst, src)
    save({"w": nn.Parameter(src)}, tmp_path)
    assert read_manifest(tmp_path).tensors["w"].recipe == recipe
    assert "gradients" not in str(read_manifest(tmp_path).to_json())
    loaded = nn.Parameter(quantize(weight(seed=1), target))
    load({"w": loaded}, tmp_path)
    assert loaded.recipe == target
    assert bytes_agree(loaded, src)


@low_precision_recipes
def test_a_model_keeps_its_gradients_when_it_is_copied_or_pickled(recipe: Any) -> None:
    module = nn.Linear(96, 64, bias=False)
    module.weight = nn.Parameter(quantize(weight(), low_precision(recipe)))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert copied.weight.recipe == low_precision(recipe)
    assert bytes_agree(copied.weight, module.weight)
    module.load_state_dict({"weight": quantize(weight(seed=1), recipe)})
    assert module.weight.recipe == low_precision(recipe)
    assert bytes_agree(module.weight, quantize(weight(seed=1), recipe))


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
