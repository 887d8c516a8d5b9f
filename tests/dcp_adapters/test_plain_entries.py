"""What is no tensor: plain Python values load, nothing else is unpickled unless the caller allows its class."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.dcp_adapters.cases import load, models, save
from tests.ranks import run_ranks, run_ranks_catching

SOME = {"nvfp4": None}
PLAIN: dict[str, Any] = {
    "numbers": (1, 2.5, True, None, 3 + 4j),
    "words": ("a", b"b", ("nested", ("deeper", {"key": [1, 2]}))),
    "set": {1, 2},
    "ordered": (OrderedDict(first=1, second=2),),
    "empty": ((), "", 0),
    "list": [1, "two", (3,)],
}


def state(entries: dict[str, Any]) -> dict[str, Any]:
    return {"model": models(0, names=SOME), "entries": entries}


def save_plain_and_other(base: Path) -> None:
    save(state(PLAIN), base / "plain")
    save(state({"options": argparse.Namespace(rate=0.5), "step": 3}), base / "other")


def load_plain(base: Path) -> None:
    target = state(dict.fromkeys(PLAIN) | {"list": [None, None, None]})
    load(target, base / "plain")
    assert target["entries"] == PLAIN
    assert [type(value) for value in target["entries"].values()] == [type(value) for value in PLAIN.values()]


def load_other(base: Path) -> None:
    load(state({"options": None, "step": 0}), base / "other")


def load_other_allowed(base: Path) -> None:
    target = state({"options": None, "step": 0})
    with torch.serialization.safe_globals([argparse.Namespace]):
        load(target, base / "other")
    assert target["entries"] == {"options": argparse.Namespace(rate=0.5), "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base: Path = ranks.agreed(tmp_path_factory.mktemp("plain"))
    run_ranks(2, save_plain_and_other, base)
    return base


def test_plain_values_load_and_other_classes_only_where_allowed(saved: Path) -> None:
    for world in (1, 3):
        run_ranks(world, load_plain, saved)
        run_ranks(world, load_other_allowed, saved)


def test_what_is_not_allowed_is_not_unpickled_and_the_error_names_the_entry(saved: Path) -> None:
    for world in (1, 3):
        for error in run_ranks_catching(world, load_other, saved):
            assert "entries.options" in error
            assert "safe_globals" in error
            assert "argparse.Namespace" in error
