"""From the text of a config to the config, or to one error that names everything that is wrong with it."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dcp_adapters.records.recipe_names import short_names
from layerwise.algorithms.algorithm import Algorithm
from layerwise.command.config import CalibrationKeys, Config, DataKeys, ModelKeys, OutputKeys, SearchKeys, problems_of
from layerwise.command.keys import Key, WrongValueError, convert, found_words, keys_of, unknown_words
from layerwise.command.yaml_text import ConfigError, plain_values
from layerwise.formats.candidates import Menu
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import registrations

SECTIONS: Mapping[str, type] = {
    "model": ModelKeys,
    "data": DataKeys,
    "calibration": CalibrationKeys,
    "output": OutputKeys,
}
TOP = ("model", "recipe", "algorithm", "data", "calibration", "output")
OPTIONAL = ("data", "calibration")
SEARCH = "search"  # the key of a recipe that is a list to choose from
NAME = "name"  # the key beside the options of a recipe or an algorithm
Algorithms = Mapping[str, type[Algorithm]]


def parse(text: str, algorithms: Algorithms) -> Config:
    """Return the config of a YAML text.

    Args:
        text: one YAML document.
        algorithms: those that a config may name.

    Raises:
        ConfigError: a line for each thing that is wrong: keys that are not known or missing, values of another type,
            options that a recipe or an algorithm refuses, keys that do not go together. No file is looked at.
    """
    return config_of(plain_values(text), algorithms)


def config_of(values: Any, algorithms: Algorithms) -> Config:
    """Return the config of plain values; see `parse`."""
    problems: list[str] = []
    if not isinstance(values, dict):
        raise ConfigError(f"expected a mapping with the keys {', '.join(TOP)}, got {found_words(values)}")
    elsewhere = {name: f"{section}.{name}" for section, kind in SECTIONS.items() for name in keys_of(kind)}
    problems += [
        f"{name}: unknown key; {unknown_words(name, TOP, 'known keys', elsewhere)}"
        for name in values
        if name not in TOP
    ]
    problems += [f"{name}: missing" for name in TOP if name not in values and name not in OPTIONAL]
    made: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        if name == "data" and values.get(name) is None:
            made[name] = None
        elif name in values or name in OPTIONAL:
            made[name] = _section(kind, values.get(name), name, problems)
    if "recipe" in values:
        searches = isinstance(values["recipe"], dict) and SEARCH in values["recipe"]
        made |= _search(values["recipe"], problems) if searches else {"recipe": _recipe(values["recipe"], problems)}
    if "algorithm" in values:
        made["algorithm"] = _algorithm(values["algorithm"], algorithms, problems)
    # Keys are compared with each other only once each is right by itself: `Config` could not be made otherwise.
    if not problems:
        config = Config(**made)
        problems = problems_of(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _section(kind: type, given: Any, path: str, problems: list[str]) -> Any:
    """Return a section of the config; None if something is wrong with it."""
    if given is None:
        given = {}
    if not isinstance(given, dict):
        problems.append(f"{path}: expected a mapping, got {found_words(given)}")
        return None
    before = len(problems)
    fields = _fields(keys_of(kind), given, path, problems, "known keys")
    return kind(**fields) if len(problems) == before else None


def _fields(
    keys: Mapping[str, Key], given: Mapping[str, Any], path: str, problems: list[str], what: str
) -> dict[str, Any]:
    """Return the values of the keys that are given; add what is wrong to `problems`."""
    found = {}
    for name, value in given.items():
        if name not in keys:
            word = "key" if what == "known keys" else "option"
            problems.append(f"{path}.{name}: unknown {word}; {unknown_words(name, keys, what)}")
            continue
        try:
            found[name] = convert(keys[name], value)
        except WrongValueError as error:
            problems.append(f"{path}.{name}: {error}")
    problems += [
        f"{path}.{name}: missing; expected {key.words}"
        for name, key in keys.items()
        if key.required and name not in given
    ]
    return found


# -- recipe and algorithm: a name, and options -------------------------------------------------------------------------


def recipe_keys(kind: type[Recipe]) -> dict[str, Key]:
    """Return the options of a recipe: the fields that describe bytes."""
    other = [field.name for field in dataclasses.fields(kind) if not field.metadata.get("stored", True)]
    return keys_of(kind, leave=other)


def recipes() -> dict[str, Recipe]:
    """Return the recipes that a config may name: short names first, then the types'."""
    short = short_names()
    # Formats that a user has registered are there, too.
    types = dict.fromkeys((*map(type, short.values()), *registrations()))
    return {**short, **{kind.__name__: kind() for kind in types}}


def _search(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the recipes to choose from, and the keys of the search."""
    before, path = len(problems), f"recipe.{SEARCH}"
    options = {name: value for name, value in given.items() if name != SEARCH}
    fields = _fields(keys_of(SearchKeys), options, "recipe", problems, "known keys")
    listed = given[SEARCH]
    if not isinstance(listed, list):
        problems.append(f"{path}: expected a list of recipes, or null among them, got {found_words(listed)}")
        return {}
    # null among the recipes means that a weight may stay dense.
    chosen = [one and _recipe(one, problems, f"{path}[{number}]") for number, one in enumerate(listed)]
    if len(problems) > before:
        return {}
    return {"search": SearchKeys(**fields), "recipe": _make(path, _menu, tuple(chosen), {}, problems)}


def _menu(chosen: tuple[Recipe | None, ...]) -> Menu:
    try:
        return Menu(chosen)
    except (ValueError, TypeError) as error:
        # The message stands under a key of the config.
        raise ValueError(str(error).removeprefix("search_formats: ")) from None


def _recipe(given: Any, problems: list[str], path: str = "recipe") -> Recipe | None:
    known = recipes()
    named = _read_named(given, path, list(known), problems)
    if named is None:
        return None
    name, options = named
    before = len(problems)
    what = f"options of {type(known[name]).__name__}"
    fields = _fields(_without_required(recipe_keys(type(known[name]))), options, path, problems, what)
    return None if len(problems) > before else _make(path, dataclasses.replace, known[name], fields, problems)


def _algorithm(given: Any, algorithms: Algorithms, problems: list[str], path: str = "algorithm") -> Algorithm | None:
    """Return an algorithm; its options may be algorithms, given in the same way, or null if they may be left out."""
    named = _read_named(given, path, list(algorithms), problems)
    if named is None:
        return None
    name, options = named
    before = len(problems)
    keys = keys_of(algorithms[name])
    # keys.py converts plain values alone, so algorithms among the options are made here.
    inner = {
        option: _algorithm(value, algorithms, problems, f"{path}.{option}")
        for option, value in options.items()
        if option in keys and keys[option].takes_algorithm and value is not None
    }
    plain = {option: value for option, value in options.items() if option not in inner}
    fields = {**_fields(keys, plain, path, problems, f"options of {name}"), **inner}
    return None if len(problems) > before else _make(path, _call, algorithms[name], fields, problems)


def _call(kind: Any, **fields: Any) -> Any:
    return kind(**fields)


def _make(path: str, make: Any, kind: Any, fields: Mapping[str, Any], problems: list[str]) -> Any:
    """Return what `make` returns; add what it refuses to `problems`."""
    try:
        return make(kind, **fields)
    except (ValueError, TypeError) as error:
        problems.append(f"{path}: {error}")
        return None


def _read_named(
    given: Any, path: str, known: Collection[str], problems: list[str]
) -> tuple[str, dict[str, Any]] | None:
    """Return the name and options of `NAME`, or of a mapping with `name: NAME` and options; None if it is neither."""
    if isinstance(given, str):
        given = {NAME: given}
    if not isinstance(given, dict):
        problems.append(f"{path}: expected a name, or a mapping with a name and options, got {found_words(given)}")
        return None
    name = given.get(NAME)
    if not isinstance(name, str):
        what = "missing; expected" if NAME not in given else "expected"
        got = "" if NAME not in given else f", got {found_words(name)}"
        problems.append(f"{path}.{NAME}: {what} one of {', '.join(known)}{got}")
        return None
    if name not in known:
        what = "recipe" if path.partition(".")[0] == "recipe" else "algorithm"
        problems.append(f"{path}.{NAME}: unknown {what} {name!r}; {unknown_words(name, known, 'known names')}")
        return None
    return name, {option: value for option, value in given.items() if option != NAME}


def _without_required(keys: Mapping[str, Key]) -> dict[str, Key]:
    """Return the keys, none of them required: what is not given stays as the named recipe has it."""
    return {name: dataclasses.replace(key, default=None) for name, key in keys.items()}
