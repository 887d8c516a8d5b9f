"""A tensor's name in memory, and its name in the files of a directory.

Transformers' rules say which is which (architectures.py). What is made of these names is decided here, from names
alone:

    FileNames       both directions, also for what stands beside a weight: scales of inputs and of the KV cache
    joined_names    the linears of all experts that are one weight in memory -> the name of that weight "in the files",
                    from which pieces_of (engine_names.py) gives the linears' names again
    names_of        whose names a source's tensors have: those in memory or in the files, of the model, of a module
                    inside of it, or of one that holds it
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from dcp_adapters.hf.files.engine_names import HALVES
from dcp_adapters.hf.layouts.layout import INPUT_SCALE, KV_SCALES
from qtensor.products.input_rotation import MARKER

BESIDE = (INPUT_SCALE, MARKER, *KV_SCALES)  # what a module has beside its weights, and no architecture knows


@dataclass(frozen=True)
class FileNames:
    """Names in memory and in the files; a name that is not known is the same in both.

    in_files: name in memory -> name in the files. whole: of the latter, those that one tensor of a file holds.
    otherwise: name in memory -> tensors of the files that make it up in a way that is not followed here.
    """

    in_files: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    otherwise: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def in_memory(self) -> dict[str, str]:
        """Map names in the files to names in memory."""
        return {name: own for own, name in self.in_files.items()}

    def file_name(self, name: str) -> str:
        """Return the name in the files of a name in memory."""
        return _rename(name, self.in_files, self._modules)

    def memory_name(self, name: str) -> str:
        """Return the name in memory of a name in the files."""
        return _rename(name, self.in_memory, self._modules_in_memory)

    @cached_property
    def _modules(self) -> dict[str, str]:
        return modules_renamed(self.in_files)

    @cached_property
    def _modules_in_memory(self) -> dict[str, str]:
        return modules_renamed(self.in_memory)


def modules_renamed(names: Mapping[str, str]) -> dict[str, str]:
    """Map modules to their other names, for all modules around tensors whose names end alike in both."""
    found: dict[str, str] = {}
    for own, other in names.items():
        mine, its = own.split("."), other.split(".")
        while mine and its and mine[-1] == its[-1]:
            mine, its = mine[:-1], its[:-1]
            found.setdefault(".".join(mine), ".".join(its))
    return found


def memory_modules(names: FileNames, modules: Iterable[str]) -> dict[str, str]:
    """Map modules in the files to those in memory that have another name."""
    found = {}
    for module in modules:
        other = names.memory_name(f"{module}.weight".lstrip(".")).removesuffix(".weight")
        if other != module:
            found[module] = other
    return found


def _beside(name: str, modules: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (module's other name, own name) of a scale or marker beside a weight of a known module; else None."""
    module, _, own = name.rpartition(".")
    return (modules[module], own) if own in BESIDE and module in modules else None


def _rename(name: str, names: Mapping[str, str], modules: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    weight, _, own = name.rpartition(".")
    if own == INPUT_SCALE and weight in names:  # of all experts: beside the weight, not beside its module
        return f"{names[weight]}.{own}"
    beside = _beside(name, modules)
    return name if beside is None else ".".join(filter(None, beside))


def joined_names(names: Sequence[str], leaves: Sequence[str]) -> str | None:
    """Return the name of a weight of all experts, from the names of its linears `<experts>.<e>.<leaf>.weight`.

    None if these are no linears of experts 0, 1, ..., with the same leaves each.
    """
    seen: dict[str, set[int]] = {leaf: set() for leaf in leaves}
    parents: set[str] = set()
    for name in names:
        *around, number, leaf, own = ("", "", "", *name.split("."))
        if own != "weight" or not number.isdigit() or leaf not in seen:
            return None
        seen[leaf].add(int(number))
        parents.add(".".join(filter(None, around)))
    joined = leaves[0] if len(leaves) == 1 else next((one for one, its in HALVES.items() if [*its] == [*leaves]), None)
    # All of them, from 0 on: the weight has no gaps.
    experts = set(range(len(names) // len(leaves)))
    if joined is None or len(parents) != 1 or any(each != experts for each in seen.values()):
        return None
    parent = parents.pop()
    return f"{parent}.{joined}" if parent.rpartition(".")[2] == "experts" else None


# -- whose names -------------------------------------------------------------------------------------------------------


def names_of(
    own: Collection[str], names: FileNames, held: Collection[str], read: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Map the names of a source's tensors to their names in the files, as far as these are known.

    All tensors have names of one kind; the first kind that fits them all is taken: names in memory, names in the files,
    and either of them behind a prefix or without one, if exactly one prefix fits. If no kind fits all of them, names in
    memory and those of files of another version are translated, each by itself.

    Args:
        own: of the source's tensors, without what stands beside weights.
        names: of the architecture.
        held: names of the files, those of weights of all experts too.
        read: name of a source's tensor -> the name in memory under which it would be read.
    """
    files = {name: name for name in held} | {name: name for name in names.in_memory}
    for space in (names.in_files, files):
        if all(name in space for name in own):
            return {name: space[name] for name in own}
    for space in (names.in_files, files):
        fitting = [found for found in _behind_prefixes(own, space) if found is not None]
        # With two prefixes that fit (a text model inside of two holders, say), a choice would be a guess.
        if len(fitting) == 1:
            return fitting[0]
    return {name: names.in_files.get(name) or names.in_files.get(read.get(name, ""), name) for name in own}


def _behind_prefixes(own: Collection[str], space: Mapping[str, str]) -> Iterator[dict[str, str] | None]:
    """Yield, for each prefix that the names may have too much or too little, their names in the files if all fit."""
    # A prefix that fits all names fits the first one, so that alone is searched for.
    first = next(iter(own), "")
    for added in {name[: -len(first)] for name in space if name.endswith(f".{first}")}:
        yield _all_in({name: f"{added}{name}" for name in own}, space)
    keys = first.split(".")
    for count in range(1, len(keys)):
        cut = ".".join(keys[:count]) + "."
        if all(name.startswith(cut) for name in own):
            yield _all_in({name: name.removeprefix(cut) for name in own}, space)


def _all_in(changed: Mapping[str, str], space: Mapping[str, str]) -> dict[str, str] | None:
    return (
        {name: space[other] for name, other in changed.items()} if all(o in space for o in changed.values()) else None
    )


def without_beside(names: Iterable[str]) -> list[str]:
    """Return the names of a model's tensors, without the scales and markers beside them."""
    return [name for name in names if name.rpartition(".")[2] not in BESIDE]
