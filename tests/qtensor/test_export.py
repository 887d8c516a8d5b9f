"""torch.export of models with quantized weights: the program gives the eager output, and is saved and loaded."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from qtensor import Float8DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantized_model_init
from tests.qtensor.recipes_under_test import RECIPES, all_recipes, same_parts
from tests.recipes import MAIN
from tests.sampling import sampled


def model_of(recipe: Any, storage: Any = "quantized", *, trained: bool = False) -> nn.Module:
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage=storage):
        model = nn.Sequential(
            nn.Linear(64, 96, dtype=torch.bfloat16), nn.GELU(), nn.Linear(96, 32, bias=False, dtype=torch.bfloat16)
        )
    return model.requires_grad_(trained)


X = torch.linspace(-2, 2, 4 * 64).view(4, 64).to(torch.bfloat16)


def through_a_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    with warnings.catch_warnings():
        # torch before 2.13 says so of the file that it has read itself
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.export.load(buffer)


def assert_exports(model: nn.Module, *, strict: bool) -> None:
    expected = model(X)
    program = torch.export.export(model, (X,), strict=strict)
    assert torch.equal(program.module()(X), expected)
    assert torch.equal(through_a_file(program).module()(X), expected)
    assert torch.equal(model(X), expected)  # the model itself is as before


# What is exported differs by the parts of a format, not by its element or rounding.
@sampled("recipe", RECIPES.values(), MAIN.values(), ids=RECIPES)
def test_an_exported_program_gives_the_eager_output(recipe: Any) -> None:
    assert_exports(model_of(recipe), strict=False)


@pytest.mark.parametrize(
    ("storage", "trained", "strict"),
    [
        ("quantized", False, True),
        ("quantized", True, False),
        ("quantized", True, True),
        ("high_precision", False, False),
        ("high_precision", True, True),
    ],
)
def test_either_way_of_tracing_exports_either_storage(storage: str, trained: bool, strict: bool) -> None:
    assert_exports(model_of(NVFP4BlockScaling(), storage, trained=trained), strict=strict)


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_a_recipe_with_a_history_is_exported_too(strict: bool) -> None:
    assert_exports(model_of(Float8DelayedScaling()), strict=strict)


@all_recipes
def test_copies_and_files_keep_a_model_that_is_exported(recipe: Any) -> None:
    """What lets a tracer describe a weight is for it alone."""
    model = model_of(recipe)
    with pytest.raises(RuntimeError, match="has no single storage to write, share or compare"):
        model[0].weight.untyped_storage()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals(QuantizedTensor.safe_globals()):
        state = torch.load(buffer, weights_only=True)
    twin = copy.deepcopy(model)
    assert same_parts(twin[0].weight, model[0].weight)
    assert same_parts(state["0.weight"], model[0].weight)
    assert torch.equal(twin(X), model(X))


def test_an_exported_program_holds_the_quantized_bytes() -> None:
    """Not a dense copy of the weights, in memory or in its file."""
    torch.manual_seed(0)
    with quantized_model_init(MXFP8BlockScaling()):
        model = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    program = torch.export.export(model, (torch.ones(1, 1024, dtype=torch.bfloat16),))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    assert len(buffer.getvalue()) < 1.25 * 2**20
