"""Names in the order in which people count, and values in few words."""

import re
from collections.abc import Iterable
from typing import Any

import torch

MOST_SHOWN = 200  # characters
MOST_ITEMS = 5
MOST_BITS = 2000  # Python writes no integer of more than 640 to 4,300 digits, as it is set
LEAVES = (type(None), bool, int, float, str, torch.Size, torch.dtype)


def short(value: Any) -> str:
    """Say a value in few words: hostile ones may be as long as the file, or endless."""
    if isinstance(value, torch.Size):
        return str(tuple(value))
    if not isinstance(value, LEAVES):
        return f"a {type(value).__name__}"
    # Python raises an error for the text of a longer integer, in the middle of another error's message.
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def short_each(value: Any) -> str:
    """Say a list of a few values, each in few words: "[128, 128]"; anything else as `short` does."""
    few = isinstance(value, list) and len(value) <= MOST_ITEMS
    return f"[{', '.join(map(short, value))}]" if few else short(value)


def few_of(items: Iterable[object], most: int = 8, *, between: str = ", ", last: str = " ") -> str:
    """Name the first `most` of many, and how many more there are: "a, b and 3 more"; `last` stands before the "and"."""
    told = [str(item) for item in items]
    more = f"{last}and {len(told) - most} more" if len(told) > most else ""
    return between.join(told[:most]) + more


def in_lines(items: Iterable[object]) -> str:
    """Name them as `few_of` does, each on a line of its own, the first one too."""
    line = "\n  "
    return line + few_of(items, 20, between=line, last=line)


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Sort names as people count: layers.2 before layers.10."""

    # Numbers are compared by length, then by digits: int() refuses those that are too long.
    def key(name: str) -> list[tuple[str, int, str]]:
        pieces = ((text, digits, digits.lstrip("0")) for text, digits in re.findall("([^0-9]*)([0-9]*)", name))
        return [(text, len(number) if digits else -1, number) for text, digits, number in pieces]

    return sorted(names, key=key)


def names_in(said: object) -> list[str]:
    """Return the names in a list of a JSON file; none if it is no list."""
    return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
