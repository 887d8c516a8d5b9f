"""What may be written under a key: rules, values of the types that fields have, and words for what is wrong.

The fields of a dataclass are the keys of a section. A field's type says what a value may be; `key` adds what the type
cannot say, and the sentence that describes the key to people.
"""

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_adapters.plain.words import short
from layerwise.algorithms.algorithm import Algorithm

REQUIRED: Any = dataclasses.MISSING
UNIONS = (types.UnionType, typing.Union)
LISTS = (tuple, list, Sequence)
# type of a field -> types of values that it takes; bool is no int here
SCALARS: Mapping[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    bool: (bool,),
    str: (str,),
    Path: (str,),
    type(None): (type(None),),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key is.

    text: what it is for. choices: the texts that are allowed. least: of a number. example: a value to show if there is
    no default.
    """

    text: str = ""
    choices: tuple[str, ...] = ()
    least: int | None = None
    example: str = ""


def key(
    text: str,
    default: Any = REQUIRED,
    *,
    choices: Iterable[str] = (),
    least: int | None = None,
    example: str = "",
) -> Any:
    """Return a field of a section; see `Rule`."""
    rule = Rule(text=text, choices=tuple(choices), least=least, example=example)
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Key:
    """A field as a key: its name, type, rule and default."""

    name: str
    hint: Any
    rule: Rule
    default: Any

    @property
    def required(self) -> bool:
        """Return whether it must be written."""
        return self.default is REQUIRED

    @property
    def words(self) -> str:
        """Return what may stand there."""
        return words_of(self.hint, self.rule)

    @property
    def takes_algorithm(self) -> bool:
        """Return whether it takes an algorithm, which parsing.py makes from a name and options."""
        return Algorithm in (self.hint, *typing.get_args(self.hint))


def keys_of(kind: type, *, leave: Collection[str] = ()) -> dict[str, Key]:
    """Return the keys of a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        if field.init and field.name not in leave:
            factory: Any = field.default_factory
            default = field.default if factory is REQUIRED else factory()
            found[field.name] = Key(field.name, hints[field.name], field.metadata.get("rule", Rule()), default)
    return found


class WrongValueError(Exception):
    """A value that a key cannot have; the text is for people."""


def convert(key: Key, value: Any) -> Any:
    """Return the value as the field has it. Raises WrongValueError with what was expected and what was found."""
    try:
        return _convert(key.hint, key.rule, value)
    except _NoMatch:
        raise WrongValueError(f"expected {key.words}, got {found_words(value)}") from None


class _NoMatch(Exception):  # noqa: N818 - never leaves this module
    """The value is not of the type."""


def _convert(hint: Any, rule: Rule, value: Any) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return _convert_to_any(parts, rule, value)
    if origin in LISTS:
        if not isinstance(value, list):
            raise _NoMatch
        return tuple(_convert(parts[0], rule, each) for each in value)
    choices = parts if origin is typing.Literal else rule.choices if hint is str else ()
    # In Python, True == 1 and 1 == 1.0.
    if choices and not any(value == one and type(value) is type(one) for one in choices):
        raise _NoMatch
    if origin is typing.Literal:
        return value
    # The exact type: isinstance takes True for an int.
    if hint not in SCALARS or type(value) not in SCALARS[hint]:
        raise _NoMatch
    if value == "" or (hint is int and rule.least is not None and value < rule.least):
        raise _NoMatch
    return _path(value) if hint is Path else float(value) if hint is float else value


def _path(text: str) -> Path:
    """Return the path. Raises WrongValueError if no file can have it."""
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError("no name holds a NUL")
        path = Path(text).expanduser()
        # It raises here, where the key is known, for what would fail in the middle of a run: links in a circle, say.
        path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle, a user who is not known
        raise WrongValueError(f"expected a path, got {found_words(text)}: {error}") from None
    return path


def _convert_to_any(parts: Sequence[Any], rule: Rule, value: Any) -> Any:
    """Return the value as the first of several types that has it."""
    for part in parts:
        try:
            return _convert(part, rule, value)
        except _NoMatch:
            continue
    raise _NoMatch


def words_of(hint: Any, rule: Rule) -> str:
    """Return what a type and a rule allow, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        # "null" comes last.
        return " or ".join(words_of(part, rule) for part in sorted(parts, key=lambda part: part is type(None)))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in LISTS:
        return f"a list of {'paths' if parts[0] is Path else 'texts' if parts[0] is str else 'numbers'}"
    if rule.choices and hint is str:
        return f"one of {', '.join(rule.choices)}"
    if hint is int and rule.least is not None:
        return "a positive integer" if rule.least == 1 else f"an integer of at least {rule.least}"
    known = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    known[Algorithm] = "an algorithm"
    return "null" if hint is type(None) else known.get(hint, "what no config can hold")


def found_words(value: Any) -> str:
    """Return what stands there, in few words."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else short(value)


def unknown_words(name: str, known: Iterable[str], what: str, elsewhere: Mapping[str, str] | None = None) -> str:
    """Say what an unknown name may have been meant for, and which names there are.

    Args:
        name: the one that is not known.
        known: those that are.
        what: what they are: "keys".
        elsewhere: name -> full path of keys in other places.
    """
    names = list(known)
    close = (elsewhere or {}).get(name) or nearest(name, names)
    meant = "" if close is None else f"did you mean {close!r}? "
    return f"{meant}{what} are {', '.join(names)}" if names else f"{meant}there are no {what}"


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the name that is most like another; None if none is."""
    folded = {one.casefold(): one for one in names}
    found = difflib.get_close_matches(name.casefold(), list(folded), n=1)
    return folded[found[0]] if found else None
