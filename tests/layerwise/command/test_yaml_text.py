"""YAML as plain values: scalars as YAML 1.2 has them, and what is refused, with its line."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from layerwise.command.yaml_text import ConfigError, plain_values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("Off", "Off"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'true'", "true"),
        ('"12"', "12"),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("1e-2", 0.01),
        (".5", 0.5),
        ("2026-11-22", "2026-11-22"),
        ("9" * 30, "9" * 30),
        ("~/model", "~/model"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = plain_values(f"key: {text}\n")["key"]
    assert (found, type(found)) == (value, type(value))


def test_lists_mappings_and_aliases() -> None:
    text = "a: &here [1, two, {three: 3}]\nb: *here\nc: |\n  line\n"
    assert plain_values(text) == {"a": [1, "two", {"three": 3}], "b": [1, "two", {"three": 3}], "c": "line\n"}
    assert plain_values("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: the key 'c' stands twice, first in line 2"),
        ("a: 1\n'a': 1\n", "line 2: the key 'a' stands twice, first in line 1"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "line 3: merge keys (<<) are not supported; write the keys out"),
        ("a: !!python/name:os.system\n", "the tag 'tag:yaml.org,2002:python/name:os.system' has no meaning here"),
        ("a: !!int '3'\n", "line 1: the tag 'tag:yaml.org,2002:int' has no meaning here; leave it out"),
        ("[1]: 2\n", "line 1: a key that is a list or a mapping; expected a name"),
        ("a: {b: 1\n", "line 2: it is no YAML: "),
        ("a: 1\n---\nb: 1\n", "line 2: it is no YAML: but found another document"),
        ("a: *gone\n", "line 1: it is no YAML: found undefined alias 'gone'"),
        ("a: \x00\n", "it is no YAML: "),
        ("a: &x [*x]\n", "it is nested deeper than 50 levels"),
        ("[" * 5000, "it is nested deeper than 50 levels"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plain_values(text)
    assert message in str(caught.value)


def test_an_alias_is_made_once_however_often_it_is_named() -> None:
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))]
    assert len(plain_values("\n".join(lines))) == 40  # 9^39 values, were each made anew


def test_without_pyyaml_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'qtensor-fsdp\[command\]'"):
        plain_values("a: 1")
