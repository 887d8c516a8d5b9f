"""What a source is: one library's quantized modules, known by the names of classes, and how their weights become ours.

    for each module   classes met in it  ->  the source that has one of them
                      source.take(module)  ->  {name of a parameter: Taken or Refused}
    then, for all     the class `becomes`, what stands in `drops` goes, and the parameters come

`take` is pure: it reads the module, and changes nothing. A source is one file of sources/, and an entry in its list.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from dcp_adapters.adopting.outcome import Outcome
from qtensor.tensor.quantized_tensor import QuantizedTensor


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
        give: a weight of ours -> the library's tensor for an nn.Linear; raises ValueError if there is none. None:
            `release` cannot go back to this library.
    """

    library: str
    classes: frozenset[str]
    take: Callable[[nn.Module], Mapping[str, Outcome]]
    drops: tuple[str, ...] = ()
    becomes: Callable[[nn.Module], type[nn.Module]] | None = None
    give: Callable[[QuantizedTensor], Tensor] | None = None

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the module's tensors that `take` reads: its weight, and what goes with that."""
        held = {**module._parameters, **module._buffers}
        return [found for name in ("weight", *self.drops) if (found := held.get(name)) is not None]


def qualified(kind: type) -> str:
    """Return the name of a class with its module's, as `Source.classes` has it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def marks(module: nn.Module) -> Iterator[type]:
    """Yield the classes, the most special first, of a module, its own tensors and its attributes."""
    own = (module, *module._parameters.values(), *module._buffers.values(), *vars(module).values())
    for value in own:
        if value is not None:
            yield from type(value).__mro__


def mark_of(module: nn.Module, source: Source) -> str | None:
    """Return the class by which a module is one of the source's: one it names, or one of a package it names."""
    names = [qualified(kind) for kind in marks(module)]
    packages = tuple(name for name in source.classes if name.endswith("."))
    return next((name for name in names if name in source.classes or (packages and name.startswith(packages))), None)
