"""Dense weights that become quantized on their way: a source around another, whose chosen entries have a recipe.

The dense values are gathered, a group at a time, and quantized where they are kept. Only a tensor-wide scale must be
known before: it is made from the largest magnitude over all shards, which the ranks tell each other when they plan.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dcp_adapters.hf.exporting.plan import is_embedding
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.source import Keep, Source, TensorGroup
from fsdp_hooks.ranks.across_ranks import Ranks
from fsdp_hooks.wrappers import plain_modules
from qtensor.model.routers import is_router_class, left_alone, routers_among
from qtensor.scales.agreement import flat_amax, scale_of
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, check_shape, registered, tensor_wide
from qtensor.spec.selection import matches, unmatched


@dataclass(frozen=True)
class Quantizing:
    """recipe: how. include, exclude: globs over the modules of linears, as of quantize_.

    linears: the weights of the model's linears, by their names in memory, as those of modules are; None: every dense
    matrix `<module>.weight` but embeddings. routers: modules of linears that are routers by their classes.
    """

    recipe: Recipe
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    linears: frozenset[str] | None
    routers: frozenset[str] = frozenset()

    @staticmethod
    def of(
        given: object, recipe: Recipe, include: tuple[str, ...], exclude: tuple[str, ...], prefix: str | None
    ) -> "Quantizing":
        """Return how to quantize what is given: a module tells which of its weights are linears, a state dict not."""
        # A format that nobody has registered is refused here, with the other arguments.
        registered(recipe)
        if not isinstance(given, nn.Module):
            return Quantizing(recipe, include, exclude, None)
        return Quantizing(recipe, include, exclude, linears_of(given, prefix), routers_by_class(given, prefix))

    def chosen(self, source: Source) -> list[str]:
        """Choose the weights to quantize, in the order of the source.

        Raises:
            ValueError: an include pattern matches no linear; a shape does not fit the recipe's blocks.
        """
        linears = {
            source.own_name(name).rpartition(".")[0]: name
            for name, entry in source.entries.items()
            if entry.recipe is None
            and entry.dtype in APPEARANCE_DTYPES
            and self._is_linear(source.own_name(name), entry)
        }
        for pattern in unmatched(self.include, linears):
            raise ValueError(f"include pattern {pattern!r} matches no dense linear of the source")
        routers = routers_among(linears, map(source.own_name, source.entries)) | (self.routers & linears.keys())
        # As quantize_ does: a router decides which expert a token goes to, so it stays dense unless it is named.
        left = left_alone(routers, linears, self.include)
        names = [
            name
            for module, name in linears.items()
            if matches(module, self.include) and not matches(module, self.exclude) and module not in left
        ]
        for name in names:
            check_shape(source.entries[name].shape, self.recipe, name)
        return names

    def _is_linear(self, name: str, entry: Entry) -> bool:
        if self.linears is not None:
            return name in self.linears
        return len(entry.shape) == 2 and f".{name}".endswith(".weight") and not is_embedding(name)

    def amaxes(self, source: Source) -> dict[str, float]:
        """Map each weight to the largest finite magnitude that this rank has of it; empty if the recipe needs none."""
        # Local shards only, and no collective: all ranks tell their maxima in one exchange.
        names = self.chosen(source)
        return {name: _amax(source.local(name), self.recipe) for name in names} if tensor_wide(self.recipe) else {}


def linears_of(module: nn.Module, prefix: str | None) -> frozenset[str]:
    """Return the names of the weights of a model's linears that no other module shares, without the prefix."""
    # A weight that an embedding shares with the output projection must stay dense for the embedding.
    uses = Counter(id(param) for child in module.modules() for param in child.parameters(recurse=False))
    return frozenset(
        f"{fqn}.weight".lstrip(".").removeprefix(prefix or "")
        for fqn, child in plain_modules(module)
        if isinstance(child, nn.Linear) and uses[id(child.weight)] == 1
    )


def routers_by_class(module: nn.Module, prefix: str | None) -> frozenset[str]:
    """Return the names of a model's linears whose class says that they are routers, without the prefix."""
    return frozenset(
        fqn.removeprefix(prefix or "")
        for fqn, child in plain_modules(module)
        if isinstance(child, nn.Linear) and is_router_class(child)
    )


def quantized_on_the_way(source: Source, how: Quantizing, amaxes: Sequence[Mapping[str, float]]) -> Source:
    """Return the source with the weights quantized; `amaxes` of all ranks."""
    largest = {name: max(each.get(name, 0.0) for each in amaxes) for name in amaxes[0]}
    scales = {
        name: float(scale_of(torch.tensor(amax, dtype=torch.float32, device="cpu"), how.recipe))
        for name, amax in largest.items()
    }
    return _QuantizingSource(source, how, scales)


class _QuantizingSource(Source):
    """Hands out the dense values of the chosen entries, as the one part "", which is quantized when it is written."""

    def __init__(self, source: Source, how: Quantizing, scales: Mapping[str, float]) -> None:
        self._source, self._scales = source, scales
        entries = dict(source.entries)
        for name in how.chosen(source):
            # The stored form: how forwards compute is no part of the bytes.
            entries[name] = replace(entries[name], recipe=how.recipe.stored)
        self.entries = entries

    def own_name(self, name: str) -> str:
        return self._source.own_name(name)

    def check_spanned(self, group: Ranks) -> None:
        self._source.check_spanned(group)

    def way(self, name: str) -> str:
        return self._source.way(name)

    def begin(self, names: Sequence[str], keep: Keep) -> TensorGroup:
        return self._source.begin(names, keep)

    def parts(self, name: str) -> dict[str, Tensor]:
        return self._source.parts(name)

    def local(self, name: str) -> Tensor:
        return self._source.local(name)

    def scalar(self, name: str, part: str) -> float:
        # The plan asks for a tensor-wide scale before a value is gathered.
        return self._scales[name] if part else self._source.scalar(name, part)

    def replicas(self, name: str) -> list[Tensor]:
        return self._source.replicas(name)

    def shared(self, name: str) -> tuple[str, Tensor] | None:
        return self._source.shared(name)


def _amax(local: Tensor, recipe: Recipe) -> float:
    # An uneven shard may be empty on this rank.
    if not local.numel():
        return 0.0
    amax = flat_amax(local, recipe)
    assert amax is not None
    return float(amax.max())
