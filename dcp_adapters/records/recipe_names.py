"""Recipes and dtypes by the names that people type: `mxfp8`, `nvfp4-square`, `Float8CurrentScaling`, `bfloat16`.

Every recipe has the name of its type, whoever registered its format; common ones also have a short name, registered
with the format. Any field that describes bytes can be set by its name and a value as text (`blocks=square`,
`power_of_two=true`); the recipe itself checks the values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from qtensor.spec.recipes import Recipe, stored_names
from qtensor.spec.registry import APPEARANCE_DTYPES, block_multiple, registrations


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES: Mapping[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in APPEARANCE_DTYPES}


def short_names() -> dict[str, Recipe]:
    """Return the recipes that have a short name, formats of blocks first."""
    names = {name: recipe for known in registrations().values() for name, recipe in known.names.items()}
    return dict(sorted(names.items(), key=lambda named: block_multiple(named[1]) == 1))


def find_target(name: str, options: Mapping[str, str] | None = None) -> Recipe | torch.dtype:
    """Find the recipe or the dtype of a name.

    Args:
        name: a short name, the name of a recipe's type, or bfloat16, float16, float32.
        options: fields of the recipe to set, values as text.

    Raises:
        ValueError: an unknown name, field or value; options for a dtype.
    """
    options = options or {}
    if name in DTYPES:
        if options:
            raise ValueError(f"{name} is a dtype and has no options, found {', '.join(options)}")
        return DTYPES[name]
    short = short_names()
    recipe = short.get(name)
    if recipe is None:
        types = {kind.__name__: kind for kind in (*map(type, short.values()), *registrations())}
        if name not in types:
            known = ", ".join((*short, *types, *DTYPES))
            raise ValueError(f"unknown recipe {name!r}; this version knows {known}")
        recipe = types[name]()
    return dataclasses.replace(recipe, **_fields(recipe, options))


def recipe_label(recipe: Recipe) -> str:
    """Return the short name of a recipe if it has one, else the recipe in full."""
    stored = recipe.stored
    return next((name for name, known in short_names().items() if known == stored), repr(stored))


def _fields(recipe: Recipe, options: Mapping[str, str]) -> dict[str, Any]:
    """Parse the options' texts as values of the types that the recipe's fields have."""
    present = {name: getattr(recipe, name) for name in stored_names(type(recipe))}
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in present:
            raise ValueError(f"{type(recipe).__name__} has no option {name!r}; it has {', '.join(present)}")
        # Other texts stay texts: the recipe checks them, and says what it expects.
        kind = type(present[name])
        values[name] = text
        if kind is bool and text.lower() in ("true", "false"):
            values[name] = text.lower() == "true"
        elif kind is int:
            try:
                values[name] = int(text)
            except ValueError:
                raise ValueError(f"{type(recipe).__name__}: {name}={text!r} is not an integer") from None
    return values
