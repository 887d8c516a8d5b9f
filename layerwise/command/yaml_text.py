"""YAML as plain values: one document, no key twice, and plain scalars as YAML 1.2 reads them.

PyYAML follows YAML 1.1, where `no` is False, `010` is 8, `1:30` is 90, `1e-2` is a text, `2026-11-22` is a date, and of
a key that stands twice the last one counts. So PyYAML only finds the nodes here, as texts, and this module makes values
of them: null, true and false, decimal integers, decimal numbers; anything else is a text. Tags and merge keys are
refused.
"""

import importlib
import re
from typing import Any

MISSING = "configs are read by PyYAML, which is not installed: pip install 'qtensor-fsdp[command]'"
WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
INTEGER = re.compile(r"[-+]?[0-9]+", re.ASCII)
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
DEEPEST = 50
TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


class ConfigError(ValueError):
    """A config that cannot be used; the text says all that is wrong with it."""


def plain_values(text: str) -> Any:
    """Return the one document of a YAML text, as dicts, lists, texts, numbers, booleans and None.

    Raises:
        ConfigError: it is no YAML, a key stands twice, or it uses what is refused, with the line; or PyYAML is not
            installed.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise ConfigError(MISSING) from None
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)  # which takes every scalar for a text
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{where}it is no YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"it is nested deeper than {DEEPEST} levels") from None
    return None if node is None else _Values(yaml).value(node, 0)


class _Values:
    """Makes values of nodes; a node that aliases name again is made once."""

    def __init__(self, yaml: Any) -> None:
        self.yaml = yaml
        self.made: dict[int, Any] = {}

    def value(self, node: Any, depth: int) -> Any:
        line = node.start_mark.line + 1
        # Also an alias that leads back to a node around it ends here.
        if depth > DEEPEST:
            raise ConfigError(f"line {line}: it is nested deeper than {DEEPEST} levels")
        if node.tag not in TAGS:
            raise ConfigError(f"line {line}: the tag {node.tag!r} has no meaning here; leave it out")
        # Each alias would be made anew otherwise; aliases of aliases grow exponentially.
        if id(node) not in self.made:
            if isinstance(node, self.yaml.ScalarNode):
                # A quoted scalar is a text, whatever it looks like.
                self.made[id(node)] = node.value if node.style is not None else _scalar(node.value)
            elif isinstance(node, self.yaml.SequenceNode):
                self.made[id(node)] = [self.value(each, depth + 1) for each in node.value]
            else:
                self.made[id(node)] = self._mapping(node, depth)
        return self.made[id(node)]

    def _mapping(self, node: Any, depth: int) -> dict[str, Any]:
        lines: dict[str, int] = {}
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, self.yaml.ScalarNode):
                raise ConfigError(f"line {line}: a key that is a list or a mapping; expected a name")
            if key.value == "<<" and key.style is None:
                raise ConfigError(f"line {line}: merge keys (<<) are not supported; write the keys out")
            if key.value in lines:
                raise ConfigError(f"line {line}: the key {key.value!r} stands twice, first in line {lines[key.value]}")
            lines[key.value] = line
            found[key.value] = self.value(value, depth + 1)
        return found


def _scalar(text: str) -> Any:
    """Return the value of a scalar without quotes."""
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        # A longer one may not fit in 64 bits; as a text it is refused with the key's name.
        return int(text) if len(text) < 19 else text
    return float(text) if NUMBER.fullmatch(text) else text
