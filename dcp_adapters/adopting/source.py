"""What a source is: one library's quantized modules, known by the names of classes, and how their weights become ours.

    for each module   classes met in it  ->  the source that has one of them
                      source.take(module)  ->  {name of a parameter: Taken or Refused}
    then, for all     the class `becomes`, what stands in `drops` goes, and the parameters come

`take` is pure: it reads the module, and changes nothing. A source is one file of sources/, and an entry in its list.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Given, Outcome
from qtensor.tensor.quantized_tensor import QuantizedTensor

PLAIN = (bool, int, float, str, dict, set, list, tuple, type(None))  # attributes that say nothing


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of quantized modules of one library.

    Attributes:
        library: its name, as `pip install` has it.
        classes: qualified names of classes that mark a module: its own, that of a tensor it has, or of an attribute.
            One that ends with a dot means all classes of that package: those that no other source names come here,
            and should be refused.
        take: module -> the parameters that it gets, by name, or why not; none of them: nothing in it is quantized, and
            it stays as it is.
        drops: names of parameters, buffers, submodules and attributes of the module that go with the weight; those it
            does not have are passed over.
        becomes: module -> the class that it gets; None: it keeps its own.
        give: a weight of ours -> the library's tensor for an nn.Linear, or what its modules have instead; raises
            ValueError if there is none. None: `release` cannot go back to this library.
    """

    library: str
    classes: frozenset[str]
    take: Callable[[nn.Module], Mapping[str, Outcome]]
    drops: tuple[str, ...] = ()
    becomes: Callable[[nn.Module], type[nn.Module]] | None = None
    give: Callable[[QuantizedTensor], Tensor | Given] | None = None

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the module's tensors that `take` reads: its weight, and what goes with that."""
        held = {**module._parameters, **module._buffers}
        return [found for name in ("weight", *self.drops) if (found := held.get(name)) is not None]


def qualified(kind: type) -> str:
    """Return the name of a class with its module's, as `Source.classes` has it."""
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class Marks:
    """The names of the classes met in a module: of itself and its tensors (`own`), and of its attributes."""

    own: tuple[str, ...]
    attributes: tuple[str, ...]

    @staticmethod
    def of(module: nn.Module) -> "Marks":
        """Return those of a module."""
        held = (module, *module._parameters.values(), *module._buffers.values())
        attributes = (value for value in vars(module).values() if not isinstance(value, PLAIN))
        return Marks(tuple(_names(held)), tuple(_names(attributes)))

    def of_source(self, source: Source) -> str | None:
        """Return the class by which the module is one of the source's; None: it is not.

        Packages are looked for in the module and its tensors alone: anyone may keep a library's configuration.
        """
        packages = tuple(name for name in source.classes if name.endswith("."))
        for names, prefixes in ((self.own, packages), (self.attributes, ())):
            for name in names:
                if name in source.classes or (prefixes and name.startswith(prefixes)):
                    return name
        return None


def _names(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if value is not None:
            yield from map(qualified, type(value).__mro__)
