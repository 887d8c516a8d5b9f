"""The config described: a commented example of every key, and a table for the documentation."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerwise.algorithms.algorithm import Algorithm
from layerwise.command.config import SearchKeys
from layerwise.command.keys import keys_of
from layerwise.command.parsing import NAME, SEARCH, SECTIONS, Algorithms, recipe_keys, recipes

WIDTH = 110
HEAD = """\
# A calibration: python -m layerwise CONFIG.yaml, or torchrun --nproc-per-node N -m layerwise CONFIG.yaml.
# Lines that begin with "#:" are keys that may be left out; they show the default, or an example where that is null.
"""
RECIPE = "the format: a name alone, or a mapping with its name and options; or a search among several, see below"
SEARCHED = "what to choose from, for each weight by measured errors; null: it stays as it is"
ALGORITHM = "how scales and values are found: a name alone, or a mapping with its name and options"


def example(algorithms: Algorithms) -> str:
    """Return a config with every key, which is valid as it stands."""
    sections = {name: list(_section(kind)) for name, kind in SECTIONS.items()}
    recipe = [*_comment(RECIPE), "recipe:", "  name: nvfp4", *_recipes(), *_search()]
    algorithm = [*_comment(ALGORITHM), "algorithm:", "  name: Mse", *_algorithms(algorithms)]
    parts = [
        *(["model:", *sections["model"]], recipe, algorithm),
        *([f"{name}:", *sections[name]] for name in ("data", "calibration", "output")),
    ]
    return "\n".join([HEAD, *("\n".join(part) + "\n" for part in parts)])


def table() -> str:
    """Return a table in Markdown, with a row for each key of the sections."""
    rows = ["| key | what it takes | default | what it is for |", "|---|---|---|---|"]
    for section, kind in {"recipe": SearchKeys, **SECTIONS}.items():
        if kind is SearchKeys:
            rows.append(f"| `recipe.{SEARCH}` | a list of recipes | none: one recipe for all | {SEARCHED} |")
        for key in keys_of(kind).values():
            default = "required" if key.required else f"`{_yaml(key.default)}`"
            rows.append(f"| `{section}.{key.name}` | {key.words} | {default} | {key.rule.text} |")
    return "\n".join(rows) + "\n"


def _section(kind: type) -> Iterator[str]:
    for key in keys_of(kind).values():
        yield from _comment(f"{key.rule.text} ({key.words})", "  ")
        shown = key.rule.example and (key.required or key.default is None)
        value = key.rule.example if shown else _yaml(key.default)
        # A config without an output is refused, so the example names one to be valid as it stands.
        needed = key.required or (key.name == "path" and shown)
        yield f"  {key.name}: {value}" if needed else f"  #: {key.name}: {value}"


def _recipes() -> Iterator[str]:
    known = recipes()
    short = [name for name, recipe in known.items() if name != type(recipe).__name__]
    yield from _comment(f"names: {', '.join(short)}, or a type with its options:", "  ")
    for name, recipe in known.items():
        if name == type(recipe).__name__:
            yield from _comment(f"  {name}: {_options(recipe_keys(type(recipe)).values())}", "  ")


def _search() -> Iterator[str]:
    yield from _comment("or, in the place of a name, recipes of which each weight gets one:", "  ")
    yield from _comment(f"  {SEARCH}: [nvfp4, mxfp8, null]  # {SEARCHED}", "  ")
    for key in keys_of(SearchKeys).values():
        value = key.rule.example or _yaml(key.default)
        yield from _comment(f"  {key.name}: {value}  # {key.rule.text} ({key.words})", "  ")


def _algorithms(algorithms: Algorithms) -> Iterator[str]:
    yield from _comment("names and their options:", "  ")
    for name, kind in algorithms.items():
        yield from _comment(f"  {name}: {_options(keys_of(kind).values())}", "  ")


def _options(keys: Any) -> str:
    return ", ".join(f"{key.name}: {'(required)' if key.required else _yaml(key.default)}" for key in keys) or "none"


def _comment(text: str, indent: str = "") -> list[str]:
    margin = " " * (len(text) - len(text.lstrip()))
    lines = textwrap.wrap(text.strip(), WIDTH, initial_indent=margin, subsequent_indent=f"{margin}  " if margin else "")
    return [f"{indent}# {line}" for line in lines]


def _yaml(value: Any) -> str:
    """Return a default as YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Algorithm):
        name = type(value).__name__
        options = [f"{option}: {_yaml(getattr(value, option))}" for option in keys_of(type(value))]
        return f"{{{', '.join([f'{NAME}: {name}', *options])}}}" if options else name
    if isinstance(value, tuple):
        return f"[{', '.join(_yaml(each) for each in value)}]"
    text = str(value)
    return f'"{text}"' if isinstance(value, str | Path) and not text[:1].isalnum() else text
