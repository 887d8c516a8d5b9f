"""Nested values are taken apart and put together again: same types, same attributes, same objects as leaves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from layerwise.inputs.values.structure import flatten, paths, unflatten

Pair = namedtuple("Pair", "left right")
A, B = torch.zeros(1), torch.ones(2)


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None

    def __post_init__(self) -> None:
        self.made = getattr(self, "made", 0) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    count: int = 3


class Words(list):
    pass


def _words() -> Words:
    words = Words([A, 2])
    words.note = B
    return words


def _same(one: Any, other: Any) -> bool:
    if one is A or one is B:
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        same = list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
        return same and (not dataclasses.is_dataclass(one) or _same_fields(one, other))
    if isinstance(one, list | tuple):
        same = len(one) == len(other) and all(map(_same, one, other))
        return same and _same(getattr(one, "note", 0), getattr(other, "note", 0))
    return _same_fields(one, other) if dataclasses.is_dataclass(one) else one == other


def _same_fields(one: Any, other: Any) -> bool:
    return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))


VALUES = {
    "leaf": A,
    "nested": {"a": (A, [B, {"b": None}]), 3: ()},
    "named tuple": Pair(A, Pair(1, B)),
    "return type": torch.ones(3).max(0),
    "dataclass": Plain(A, Plain(B, 4)),
    "frozen": Frozen((A, B)),
    "model output": BaseModelOutputWithPast(last_hidden_state=A, hidden_states=(B, A)),
    "model output of one tuple": BaseModelOutputWithPast(hidden_states=(B, A)),
    "ordered": OrderedDict(b=A, a=B),
    "default": defaultdict(list, a=[A]),
    "list of its own": _words(),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_types_and_its_very_leaves(name: str) -> None:
    value = VALUES[name]
    leaves, structure = flatten(value)
    again = unflatten(structure, leaves)
    assert _same(value, again) or name == "return type"
    assert type(again) is type(value)
    assert flatten(again)[1] == structure
    assert len(leaves) == len(paths(structure, "x"))
    assert all(one is other for one, other in zip(leaves, flatten(again)[0], strict=True))


def test_what_a_container_was_given_beyond_its_items_is_kept() -> None:
    words, counted, default = (
        unflatten(*reversed(flatten(VALUES[n]))) for n in ("list of its own", "dataclass", "default")
    )
    assert words.note is B
    assert counted.made == 1, "__post_init__ ran again"
    assert default["new"] == []


def test_other_leaves_take_the_places() -> None:
    leaves, structure = flatten(Plain((1, [2]), {"k": 3}))
    again = unflatten(structure, [leaf * 10 for leaf in leaves])
    assert again == Plain((10, [20]), {"k": 30})


def test_objects_and_what_is_said_to_be_a_leaf_are_leaves() -> None:
    shared, user, module = {"a": A}, UserDict(a=A), torch.nn.Linear(1, 1)
    leaves, _ = flatten((shared, user, module, torch.Size([1, 2]), Plain), lambda value: value is shared)
    assert leaves[0] is shared
    assert leaves[1] is user
    assert leaves[2:] == [module, torch.Size([1, 2]), Plain]


def test_a_container_that_contains_itself_is_no_endless_story() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    leaves, _ = flatten(loop)
    assert leaves[0] is A
    assert leaves[1] is loop


def test_leaves_have_the_names_one_would_write() -> None:
    _, structure = flatten({"mask": (A, B), "pair": Pair(1, Plain(2))})
    assert paths(structure, "kwargs") == [
        "kwargs['mask'][0]",
        "kwargs['mask'][1]",
        "kwargs['pair'].left",
        "kwargs['pair'].right.x",
        "kwargs['pair'].right.y",
        "kwargs['pair'].right.made",
    ]


def test_structures_differ_where_values_differ_in_shape() -> None:
    values = [(A,), [A], {"a": A}, {"b": A}, Pair(A, B), (A, B), Plain(A), A, ()]
    structures = [flatten(value)[1] for value in values]
    assert all((one == other) == (i == j) for i, one in enumerate(structures) for j, other in enumerate(structures))
