"""The public API is what public_api.json says for this version; names alone are frozen by tests/test_imports.py."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from tests.packaging import public_api
from tests.packaging.public_api import PACKAGES, REGENERATE, Surface, changes, may_follow, stored, surface, updated
from tests.test_imports import PUBLIC


def test_the_api_of_this_version_is_as_stored() -> None:
    version = public_api.current()
    changed = changes(stored().get(version, {}), public_api.of_the_code())
    assert not changed, (
        f"the public API of {version} changed:\n  "
        + "\n  ".join(changed)
        + "\nIf that is meant: say so in CHANGELOG.md, raise the version in fsdp_hooks/release.py "
        f"where {version} is released, and run: {REGENERATE}"
    )


def test_the_newest_version_stored_is_this_one() -> None:
    versions = [*stored()]
    assert versions == sorted(versions, key=public_api.numbers)
    assert versions[-1] == public_api.current()
    assert public_api.released() <= {*versions}


def test_every_public_name_is_stored() -> None:
    listed = {f"{package}.{name}" for package in PACKAGES for name in PUBLIC[package]}
    assert {name for name in stored()[public_api.current()] if name.count(".") == 1} == listed


def test_versions_tell_what_breaks() -> None:
    versions = stored()
    for before, after in pairwise(versions):
        assert may_follow(before, after, changes(versions[before], versions[after])), (before, after)


@pytest.mark.parametrize(
    ("before", "after", "line", "fine"),
    [
        ("0.1.0", "0.1.1", "+ qtensor.new: function ()", True),
        ("0.1.0", "0.1.1", "- qtensor.old: function ()", False),
        ("0.1.0", "0.2.0", "- qtensor.old: function ()", True),
        ("1.1.0", "1.2.0", "- qtensor.old: function ()", False),
        ("1.1.0", "2.0.0", "- qtensor.old: function ()", True),
        ("1.1.0", "1.1.0", "+ qtensor.new: function ()", False),
        ("1.10.0", "1.9.0", "+ qtensor.new: function ()", False),
    ],
)
def test_what_goes_needs_another_version_than_what_comes(before: str, after: str, line: str, fine: bool) -> None:
    assert may_follow(before, after, [line]) == fine


def test_the_api_of_a_released_version_is_not_written_again() -> None:
    before, after = {"1.0.0": {"a.f": "function ()"}}, {"a.f": "function (x)"}
    with pytest.raises(SystemExit, match=r"1\.0\.0 is released and its API stays as it was: raise the version"):
        updated(before, "1.0.0", after, {"1.0.0"})
    assert updated(before, "1.0.0", before["1.0.0"], {"1.0.0"}) == before
    assert updated(before, "1.0.0", after, set()) == {"1.0.0": after}
    assert updated(before, "1.1.0", after, {"1.0.0"}) == {**before, "1.1.0": after}


# -- the description sees each kind of change ------------------------------------------------------------------------


class Hidden:
    def inherited(self) -> int:
        return 1

    def _private(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Base:
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sub(Hidden, Base):
    names: tuple[str, ...] = field(default=("a",))
    shared = 3

    @property
    def twice(self) -> int:
        return 2

    @classmethod
    def make(cls, text: str) -> Sub:
        return cls(names=(text,))

    @staticmethod
    def parse(text: str) -> int:
        return len(text)


def function(x: Any, *, times: float = 0.5) -> types.ModuleType:
    raise NotImplementedError


def described(**names: Any) -> Surface:
    module = types.SimpleNamespace(__all__=list(names), **names)
    return surface({__name__.partition(".")[0]: module})


def test_the_description() -> None:
    assert described(function=function, Sub=Sub, Base=Base) == {
        "tests.Base": "class() (*, size: 'int | None' = None) -> None",
        "tests.Base.size": "field: 'int | None'",
        "tests.Sub": "class(Base) (*, size: 'int | None' = None, names: 'tuple[str, ...]' = ('a',)) -> None",
        "tests.Sub.inherited": "method (self) -> 'int'",
        "tests.Sub.make": "classmethod (cls, text: 'str') -> 'Sub'",
        "tests.Sub.names": "field: 'tuple[str, ...]'",
        "tests.Sub.parse": "staticmethod (text: 'str') -> 'int'",
        "tests.Sub.shared": "attribute",
        "tests.Sub.twice": "property: 'int'",
        "tests.function": "function (x: 'Any', *, times: 'float' = 0.5) -> 'ModuleType'",
    }
    assert "tests.Sub.size" in described(Sub=Sub)  # from a base that is not public


def test_a_change_is_told_as_a_diff() -> None:
    assert changes({"a.f": "function ()", "a.g": "function ()"}, {"a.f": "function (x)", "a.h": "function ()"}) == [
        "- a.f: function ()",
        "+ a.f: function (x)",
        "- a.g: function ()",
        "+ a.h: function ()",
    ]
