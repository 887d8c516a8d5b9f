"""What a directory records of its quantized weights beside their tensors: recipes, and the dtype they appear in."""

import json

import torch

from dcp_adapters.hf.files.config_sections import said_of_dtype
from dcp_adapters.hf.files.directory import Directory
from dcp_adapters.hf.layouts.layout import RECIPES
from dcp_adapters.plain.words import short
from dcp_adapters.records.recipe_names import DTYPES as APPEARANCES
from qtensor.spec.recipes import Recipe


def recorded_recipes(directory: Directory) -> dict[str, Recipe]:
    """Return the recipes in the metadata of the files."""
    recipes: dict[str, Recipe] = {}
    for text in directory.notes.get(RECIPES, {}).values():
        try:
            record = json.loads(text)
            found = {name: Recipe.from_json(value) for name, value in record.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{directory.path}: {RECIPES} in the metadata of its files is not JSON with a recipe for each weight: "
                f"{error}; export it again"
            ) from error
        for name, recipe in found.items():
            if recipes.setdefault(name, recipe) != recipe:
                raise ValueError(
                    f"{directory.path}: {name} has two recipes: {recipes[name]} and {recipe}; export it again"
                )
    return recipes


def appearance(directory: Directory) -> torch.dtype:
    """Return the dtype that quantized weights appear in if no target says it: config.json's, or bf16."""
    said = said_of_dtype(directory.config) or "bfloat16"
    if not isinstance(said, str) or said not in APPEARANCES:
        raise ValueError(
            f"{directory.path}: config.json says dtype {short(said)}, expected one of {', '.join(APPEARANCES)}"
        )
    return APPEARANCES[said]
