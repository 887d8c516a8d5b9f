"""Counts and denials on the pages that code can answer: what is there is not denied, and numbers are those of today."""

from __future__ import annotations

import re

import layerwise
import qtensor
from layerwise.__main__ import ALGORITHMS
from qtensor.spec.recipes import Recipe
from tests.docs.pages import REPO, Page, page

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
RECIPES = {name: kind for name, kind in vars(qtensor).items() if name.endswith("Scaling") and issubclass(kind, Recipe)}


def words(text: str) -> str:
    return " ".join(text.split())


def backward_formats() -> set[str]:
    """The recipes that take `gradients`."""
    found = set()
    for name, kind in RECIPES.items():
        try:
            kind(activations="dynamic", gradients="e4m3")
        except ValueError:
            continue
        found.add(name)
    return found


def test_the_number_of_recipes() -> None:
    assert f"There are [{NUMBERS[len(RECIPES)]}](guide.md#recipes)" in page("quickstart.md").text
    table = page("guide.md").text.partition("### Recipes")[2].partition("K is the number")[0]
    assert set(re.findall(r"^\| `(\w+)\(", table, re.M)) == set(RECIPES)


def test_the_number_of_algorithms() -> None:
    assert f"{NUMBERS[len(ALGORITHMS)]} algorithms, sharded" in page("coming_from.md").text
    readme = words(Page(REPO / "README.md").text)
    (listed,) = re.findall(r"no token reaches: ([\w, ]+?), one layer gathered", readme)
    assert set(re.split(r", | and ", listed)) == set(ALGORITHMS)


def test_which_formats_have_low_precision_backwards() -> None:
    assert backward_formats() == {"Float8CurrentScaling", "Float8DelayedScaling", "MXFP8BlockScaling"}
    text = words(page("coming_from.md").text)
    assert "forward in all formats, backward in Float8 (not in blocks) and MXFP8" in text
    for recipe in RECIPES.values():
        recipe(activations="dynamic")


def test_what_is_there_is_not_denied() -> None:
    """Each list of what is not here, and each row of a table that says so, next to what a user would look for."""
    text = words(page("coming_from.md").text)
    denied = re.findall(r"\* Not here: (.*?)\.(?= |$)", text) + re.findall(r"\| ([^|]*) \| not there \|", text)
    assert len(denied) == 4
    there = {
        "search for the format": layerwise.search_formats,
        "auto_quantize": layerwise.search_formats,
        "FP8 in backward": backward_formats(),
        "distillation": REPO / "examples" / "trainers" / "qad.py",
    }
    assert not [name for name in there if name in " ".join(denied)]
    assert "int8" not in " ".join(RECIPES).lower()
    assert not hasattr(layerwise, "SVDQuant")
