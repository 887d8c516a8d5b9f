"""Which tensors a state has, and one numbering of all their units.

    run        all tensors of one dtype, by name, one after the other
    position   of a unit in its run

Changes are coded run by run: units of a dtype change alike, so a few frames serve a model of any number of tensors.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dcp_adapters.delta.coding.changes import unit_of, unit_shape
from dcp_adapters.records.entry import Entry, PartShape
from dcp_adapters.records.recipe_names import dtype_name


@dataclass(frozen=True)
class DtypeRun:
    """The tensors of one dtype. starts: the position of the first unit of each, ascending."""

    dtype: torch.dtype
    keys: tuple[str, ...]
    starts: tuple[int, ...]
    extent: int

    @property
    def unit(self) -> torch.dtype:
        """Return the dtype of its whole numbers."""
        return unit_of(self.dtype)

    def end(self, number: int) -> int:
        """Return the position after the last unit of a tensor."""
        return self.starts[number + 1] if number + 1 < len(self.starts) else self.extent


@dataclass(frozen=True)
class StateLayout:
    """What a state has: its tensors by name, and the names of its entries of bytes."""

    entries: Mapping[str, Entry]
    blobs: frozenset[str] = frozenset()

    @staticmethod
    def of(entries: Iterable[Entry], blobs: Iterable[str] = ()) -> "StateLayout":
        """Describe a source: recipes are as they are stored."""
        stored = (entry if entry.recipe is None else replace(entry, recipe=entry.recipe.stored) for entry in entries)
        return StateLayout({entry.name: entry for entry in stored}, frozenset(blobs))

    @cached_property
    def parts(self) -> dict[str, PartShape]:
        """Return key ("w.payload") -> dtype and global shape."""
        return {key: held for entry in self.entries.values() for key, held in entry.stored().items()}

    @cached_property
    def owners(self) -> dict[str, tuple[str, str]]:
        """Return key -> name of its tensor and of the part: ("w", "payload")."""
        return {entry.key(part): (entry.name, part) for entry in self.entries.values() for part in entry.parts()}

    @cached_property
    def runs(self) -> tuple[DtypeRun, ...]:
        """Return the runs by the names of their dtypes; the tensors of each by theirs."""
        # Sorted, so that the numbering depends on names alone, and not on the order in which a rank has its tensors.
        by_dtype: dict[str, list[str]] = {}
        for key in sorted(self.parts):
            by_dtype.setdefault(dtype_name(self.parts[key][0]), []).append(key)
        found = []
        for _, keys in sorted(by_dtype.items()):
            starts, extent = [], 0
            for key in keys:
                starts.append(extent)
                extent += math.prod(self.unit_shape(key))
            found.append(DtypeRun(self.parts[keys[0]][0], tuple(keys), tuple(starts), extent))
        return tuple(found)

    def unit_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor in units."""
        return unit_shape(*self.parts[key])

    @property
    def nbytes(self) -> int:
        """Count the bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


def layout_differences(
    a: StateLayout, b: StateLayout, sides: tuple[str, str] = ("the old state", "the new one")
) -> list[str]:
    """Say why one state cannot become the other by changes of bytes, a sentence each, by name; empty if it can."""
    problems = []
    for name in sorted(a.entries.keys() | b.entries.keys()):
        held = a.entries.get(name), b.entries.get(name)
        if held[0] != held[1]:
            words = [_words(entry) for entry in held]
            problems.append(f"{name}: {sides[0]} holds {words[0]}, {sides[1]} {words[1]}")
    problems += [
        f"{name}: only {sides[0] if name in a.blobs else sides[1]} has this entry of bytes"
        for name in sorted(a.blobs ^ b.blobs)
    ]
    return problems


def _words(entry: Entry | None) -> str:
    if entry is None:
        return "no such tensor"
    appearance = f" as {dtype_name(entry.dtype)}" if entry.recipe is not None else ""
    return f"{entry.kind}{appearance} {list(entry.shape)}"
