"""Deltas in a row; full versions every so often; and what may be removed.

    full 0  ->  delta 1  ->  delta 2  ->  delta 3  |  full 4  ->  delta 5  ->  ...        Anchors(every=4)

All of this is decided from digests, numbers and names; nothing is read.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dcp_adapters.delta.make import refuse_other_layout
from dcp_adapters.delta.patches.patch import Delta


def check_chain(deltas: Sequence[Delta]) -> None:
    """Raise ValueError unless each delta leads from where the one before it leads to.

    A missing, a repeated and a misplaced one are told apart.
    """
    if not deltas:
        raise ValueError("no delta to apply; give at least one")
    for before, after in pairwise(deltas):
        refuse_other_layout(before.layout, after.layout, (before.where, after.where))
        if after.base == before.result:
            continue
        if (after.base, after.result) == (before.base, before.result):
            raise ValueError(f"{_named(after)} is {_named(before)} once more; give each delta once")
        elsewhere = [other for other in deltas if other.result == after.base]
        way_out = (
            f"{_named(elsewhere[0])} leads there: put the deltas in the order in which they were made"
            if elsewhere
            else "one in between is missing: get it, or take the next full version"
        )
        raise ValueError(
            f"{_named(after)} starts from {after.base}, and {_named(before)} leads to {before.result}; {way_out}"
        )


def deltas_left(deltas: Sequence[Delta], digest: str, where: str) -> Sequence[Delta]:
    """The deltas that a state of this digest still needs; none where it is the result already.

    Raises:
        ValueError: the chain does not hold, or the state is none of those that it passes.
    """
    check_chain(deltas)
    states = [deltas[0].base, *(delta.result for delta in deltas)]
    if digest not in states:
        raise ValueError(
            f"{where} has digest {digest}, and {_named(deltas[0])} applies to {deltas[0].base} alone: it is another "
            "state, or its bytes have changed; take the base that the delta was made from, or a full version"
        )
    return deltas[len(states) - 1 - states[::-1].index(digest) :]


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """How often a full version is saved or sent, so that no chain is longer than `every` - 1 deltas.

    Example:
        ```python
        >>> anchors = Anchors(every=3)
        >>> [anchors.is_full(deltas) for deltas in (None, 0, 1, 2)]  # how many deltas followed the last full version
        [True, False, False, True]
        ```
    """

    every: int = 10

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every={self.every!r}: expected a whole number from 1 on; 1 makes every version full")

    def is_full(self, deltas_since_full: int | None) -> bool:
        """Whether the next version is a full one; deltas_since_full: None where there is no full one."""
        return deltas_since_full is None or deltas_since_full + 1 >= self.every


def refuse_one_name(keep: Any) -> None:
    """A name is a collection of letters, which may be names of others. Raises ValueError for one."""
    if isinstance(keep, str | os.PathLike):
        raise ValueError(f"keep={keep!r} is one name; give a list of those to keep. Nothing has been removed")


def removable(bases: Mapping[str, str | None], keep: Collection[str]) -> set[str]:
    """The versions that may be removed: those that no version to be kept is built on, directly or through others.

    Args:
        bases: version -> the version that it is a delta to; None for a full one.
        keep: the versions that must stay readable.

    Raises:
        ValueError: a version to be kept, or one that it needs, is not there; versions are each other's bases; `keep`
            is one name.

    Example:
        ```python
        >>> sorted(removable({"1": None, "2": "1", "3": None, "4": "3"}, keep=["4"]))
        ['1', '2']
        ```
    """
    refuse_one_name(keep)
    needed: set[str] = set()
    for name in keep:
        path = [name]
        while True:
            if path[-1] not in bases:
                after = f", which {path[-2]} is a delta to" if len(path) > 1 else ""
                raise ValueError(f"{path[-1]} is not there{after}; nothing can be removed safely")
            base = bases[path[-1]]
            if base is None:
                break
            if base in path:
                raise ValueError(
                    f"{base} is a delta to itself through {', '.join(path)}; nothing can be removed safely"
                )
            path.append(base)
        needed.update(path)
    return set(bases) - needed


def _named(delta: Delta) -> str:
    return delta.where if delta.version is None else f"{delta.where} (to version {delta.version})"
