"""An assignment: the recipe of each weight. `search_formats` returns one, and `calibrate` takes it as its recipe."""

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from dcp_adapters.plain.tables import table
from dcp_adapters.plain.words import short
from layerwise.formats.candidates import Candidate, LinearGroup, Menu
from layerwise.formats.solver import choose
from qtensor.spec.recipes import Recipe

VERSION = 1


@dataclass(frozen=True)
class Assignment:
    """Which weight is quantized how.

    One that was written by hand has `recipes` alone.

    Attributes:
        recipes: fqn of a weight, such as "layers.0.mlp.up_proj.weight" -> its recipe; None: it stays as it is, and so
            does a weight that is not named.
        groups: what it was chosen from.
        bits: of all weights in `recipes`, with their scales.
        error: the sum of the errors of all groups.
        bound: no assignment of the same budget has a smaller error.

    Raises:
        TypeError: a recipe is none.

    Example:
        ```python
        >>> by_hand = Assignment({"0.weight": MXFP8BlockScaling(), "1.weight": None})
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> list(calibrate(model, None, recipe=by_hand, layers=["0", "1"]).state_dict())
        ['0.weight']
        ```
    """

    recipes: Mapping[str, Recipe | None]
    groups: tuple[LinearGroup, ...] = ()
    bits: int | None = None
    error: float | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        given: Mapping[Any, Any] = self.recipes
        for name, recipe in given.items():
            if not isinstance(name, str) or not isinstance(recipe, Recipe | None):
                raise TypeError(
                    f"Assignment: expected names of weights, each with a recipe or None, got {name!r}: {recipe!r}"
                )

    def __str__(self) -> str:
        counts = Counter("dense" if recipe is None else str(recipe) for recipe in self.recipes.values())
        return ", ".join(f"{count} weights {kind}" for kind, count in counts.items()) or "no weights"

    @property
    def bits_per_weight(self) -> float | None:
        """Return the mean over all elements of the weights in `recipes`; None if it was written by hand."""
        return None if self.bits is None else self.bits / sum(group.weights for group in self.groups)

    def at(self, bits_per_weight: float) -> "Assignment":
        """Return the assignment for another budget, from the same measurements.

        Raises:
            ValueError: the budget is no positive number that a float can hold, or below what the cheapest candidates
                take; or this was written by hand.
            TypeError: it is no number.
        """
        if not self.groups:
            raise ValueError(
                "Assignment.at chooses among what search_formats has measured; this assignment has no measurements"
            )
        return assign(self.groups, bits_per_weight, "Assignment.at")

    def modules(self) -> dict[Recipe, list[str]]:
        """Map each recipe to the fqns of its weights' modules, as `quantize_(model, recipe, include=...)` takes them.

        Experts in one parameter [E, N, K] are left out, which quantize_ does not know.
        """
        found: dict[Recipe, list[str]] = {}
        for name, recipe in self.recipes.items():
            if recipe is not None and name.endswith(".weight"):
                found.setdefault(recipe, []).append(name.removesuffix(".weight"))
        return found

    def table(self) -> str:
        """Return a line for each group, as text: its format, its bits, and its error in dB."""
        rows = []
        for group in self.groups:
            taken = next(one for one in group.candidates if one.recipe == self.recipes[group.names[0]])
            more = f" and {len(group.names) - 1} more" if len(group.names) > 1 else ""
            error = f"{10 * math.log10(taken.error):.1f}" if taken.error > 0 else "-"
            kind = "dense" if taken.recipe is None else str(taken.recipe)
            rows.append([group.names[0] + more, kind, f"{taken.bits / group.weights:.3f}", error])
        return table(["weights", "format", "bits", "error dB"], rows, right=["bits", "error dB"])

    def to_json(self) -> dict[str, Any]:
        """Return what decides bytes, as the fingerprint of a calibration compares it."""
        named = {name: recipe and recipe.to_json() for name, recipe in self.recipes.items()}
        return {**named, "type": type(self).__name__}

    def save(self, path: str | Path) -> Path:
        """Write everything to a JSON file; returns its path."""
        # Each recipe stands in the file once; weights and candidates have its number.
        recipes = list(dict.fromkeys([*self.recipes.values(), *(c.recipe for g in self.groups for c in g.candidates)]))
        record = {
            "version": VERSION,
            "recipes": [recipe and _record(recipe) for recipe in recipes],
            "weights": {name: recipes.index(recipe) for name, recipe in self.recipes.items()},
            "groups": [
                {
                    "names": group.names,
                    "weights": group.weights,
                    "candidates": [[recipes.index(one.recipe), one.bits, one.error] for one in group.candidates],
                }
                for group in self.groups
            ],
            **{key: getattr(self, key) for key in ("bits", "error", "bound")},
        }
        path = Path(path)
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the assignment that `save` wrote. Raises ValueError, with the path, for anything else."""
        try:
            record = json.loads(Path(path).read_bytes())
            if record["version"] != VERSION:
                raise ValueError(f"version {short(record['version'])}; this library reads {VERSION}")
            recipes = [one and _recipe(one) for one in record["recipes"]]
            groups = tuple(
                LinearGroup(
                    tuple(map(str, one["names"])),
                    int(one["weights"]),
                    tuple(Candidate(recipes[at], int(bits), float(error)) for at, bits, error in one["candidates"]),
                )
                for one in record["groups"]
            )
            named = {str(name): recipes[at] for name, at in record["weights"].items()}
            return cls(named, groups, record["bits"], record["error"], record["bound"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(
                f"{path} can not be read ({type(error).__name__}: {error}); give a file that Assignment.save wrote"
            ) from error


# How weights are quantized: all by one recipe, each by its own, or not yet decided.
Formats = Recipe | Assignment | Menu


def recipe_of(formats: Formats, name: str) -> Recipe:
    """Return the recipe of a weight, or of one of its linears, that is quantized."""
    if isinstance(formats, Recipe):
        return formats
    assert isinstance(formats, Assignment), "a menu has no recipe for a weight yet"
    # Linears of experts have their number behind the name of their weight, and share its recipe.
    recipe = formats.recipes[re.sub(r"\[\d+\]$", "", name)]
    assert recipe is not None, f"{name} is not quantized"
    return recipe


def all_recipes(formats: Formats) -> list[Recipe]:
    """Return all recipes, each once."""
    if isinstance(formats, Recipe):
        return [formats]
    found: Sequence[Recipe | None] = [*formats.recipes.values()] if isinstance(formats, Assignment) else formats.recipes
    return list(dict.fromkeys(recipe for recipe in found if recipe is not None))


def budget_of(bits_per_weight: float, weights: int, least: int, asked: str = "search_formats") -> int:
    """Return the bits that so many elements may take.

    Args:
        bits_per_weight: of each element, on average.
        weights: the number of elements.
        least: the bits of the cheapest candidates.
        asked: the function that was called, for messages.

    Raises:
        TypeError, ValueError: it is no positive number that a float can hold, or below `least`.
    """
    given = f"{asked}: bits_per_weight={short(bits_per_weight)}"
    if isinstance(bits_per_weight, bool) or not isinstance(bits_per_weight, int | float):
        raise TypeError(f"{given}; expected a number, such as 5.0")
    if not 0 < bits_per_weight <= sys.float_info.max:  # an int may be larger
        raise ValueError(f"{given}; expected a positive number, such as 5.0")
    # A float product may fall a bit short, and then the budget of the cheapest formats would refuse just these.
    budget = math.floor(Fraction(bits_per_weight) * weights)
    if budget < least:
        needed = math.ceil(Fraction(least, max(weights, 1)) * 10**4) / 10**4
        raise ValueError(
            f"{given} is less than the cheapest recipes take, scales "
            f"included; give {needed} or more, or add a smaller format to recipes"
        )
    return budget


def assign(groups: Sequence[LinearGroup], bits_per_weight: float, asked: str = "search_formats") -> Assignment:
    """Return the assignment of least error within a budget. Raises as `budget_of` does, in the name `asked`."""
    weights = sum(group.weights for group in groups)
    least = sum(min(one.bits for one in group.candidates) for group in groups)
    choice = choose([group.candidates for group in groups], budget_of(bits_per_weight, weights, least, asked))
    recipes = {
        name: group.candidates[one].recipe
        for group, one in zip(groups, choice.picked, strict=True)
        for name in group.names
    }
    return Assignment(recipes, tuple(groups), choice.bits, choice.error, choice.bound)


def _record(recipe: Recipe) -> dict[str, Any]:
    computed = {"activations": recipe.activations, "gradients": recipe.gradients, "accumulation": recipe.accumulation}
    return {**recipe.to_json(), **{name: value for name, value in computed.items() if value or name == "activations"}}


def _recipe(record: dict[str, Any]) -> Recipe:
    return dataclasses.replace(
        Recipe.from_json(record),
        activations=record["activations"],
        gradients=record.get("gradients"),
        accumulation=record.get("accumulation"),
    )
