"""Counts and denials on the pages that code can answer: what is there is not denied, and numbers are those of today."""

from __future__ import annotations

import re

import layerwise
import qtensor
from layerwise.__main__ import ALGORITHMS
from qtensor.spec.recipes import Recipe
from tests.docs.pages import REPO, page

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
RECIPES = {name: kind for name, kind in vars(qtensor).items() if name.endswith("Scaling") and issubclass(kind, Recipe)}


def words(text: str) -> str:
    return " ".join(text.split())


def backward_formats() -> set[str]:
    """The recipes that take `gradients`."""
    return {name for name, kind in RECIPES.items() if kind.gradient_elements}


def test_the_number_of_recipes() -> None:
    assert f"There are [{NUMBERS[len(RECIPES)]}](guide.md#recipes)" in page("quickstart.md").text
    table = page("guide.md").text.partition("### Recipes")[2].partition("K is the number")[0]
    assert set(re.findall(r"^\| `(\w+)\(", table, re.M)) == set(RECIPES)


def test_the_number_of_algorithms() -> None:
    assert f"{NUMBERS[len(ALGORITHMS)]} algorithms, sharded" in page("coming_from/README.md").text
    (listed,) = re.findall(r"no token reaches: ([\w, ]+?), one layer gathered", words(page("guarantees.md").text))
    assert set(re.split(r", | and ", listed)) == set(ALGORITHMS)


def test_which_formats_have_low_precision_backwards() -> None:
    assert backward_formats() == {
        *("Float8CurrentScaling", "Float8DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
    }
    text = words(page("coming_from/README.md").text)
    assert "forward in all formats, backward in Float8 (not in blocks), MXFP8 and NVFP4" in text
    for recipe in RECIPES.values():
        recipe(activations="dynamic")


def test_what_is_there_is_not_denied() -> None:
    """Each list of what is not here, and each row of a table that says so, next to what a user would look for."""
    names = ("transformer_engine", "torchao", "modelopt")
    text = " ".join(words(page(f"coming_from/{name}.md").text) for name in names)
    denied = re.findall(r"\* Not here: (.*?)\.(?= |$)", text) + re.findall(r"\| ([^|]*) \| not there \|", text)
    assert len(denied) == 4
    there = {
        "search for the format": layerwise.search_formats,
        "auto_quantize": layerwise.search_formats,
        "FP8 in backward": backward_formats(),
        "distillation": REPO / "examples" / "trainers" / "qad.py",
    }
    assert not [name for name in there if name in " ".join(denied)]
    assert not hasattr(layerwise, "SVDQuant")


def test_readme_has_the_ratios_of_the_page_on_speed() -> None:
    def ratios(name: str, row: str) -> list[str]:
        (line,) = re.findall(rf"^\| {row}(?:[^|]*)\|(.*)$", page(name).text, re.M)
        return [cell.strip() for cell in line.split("|")[:3]]

    for there, here in {
        "time of a training step, gathers over 100 Mbit/s": r"FSDP2 step, .*100 Mbit/s",
        "time of a training step, a link without a limit": "the same, a link without a limit",
        "time of a linear layer, forward and backward": r"linear layer, forward \+ backward",
        "time of an optimizer step, large weights": r"`MasterWeightOptimizer\(AdamW\)` step, large weights",
    }.items():
        assert ratios("README.md", there) == ratios("speed.md", here)


def test_the_modules_of_the_glossary_are_there() -> None:
    named = re.findall(r"`((?:qtensor|fsdp_hooks|dcp_adapters|layerwise)/[\w/]+\.py)`", page("glossary.md").text)
    assert len(named) > 30
    assert not [name for name in named if not (REPO / name).is_file()]
