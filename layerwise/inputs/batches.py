"""The batches a model is calibrated on, from whatever the user has, and kept: they are needed more than once.

    an iterable of batches    a tensor -> model(tensor), a tuple or list -> model(*batch), a mapping -> model(**batch)
    a callable                forward_loop(model): every call of the model inside it is a batch. The model computes
                              nothing there and returns None; its hooks run, so what FSDP casts is cast.

Iterators are consumed once. A filled cache among the arguments is remembered as it was, see `caches`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from dcp_adapters.plain_memory import memory_of
from layerwise.inputs.caches import CacheState, is_cache, is_empty
from layerwise.inputs.stand_ins import forward_of
from layerwise.inputs.stores import Kept, Store, is_plain
from layerwise.inputs.structure import Structure, flatten, paths, rebuild

__all__ = ["Batch", "Data", "batches_of"]

Data = Iterable[Any] | Callable[[nn.Module], Any]


@dataclass(eq=False)
class Batch:
    """What the model is called with once.

    Attributes:
        structure: of (args, kwargs).
        leaves: a `Kept` for every tensor; everything else as it is.
        caches: filled caches among the leaves, as they were.
        hash: xxh3 of the arguments, the same on every device and in every process.
        opaque: arguments that are in the hash by their type alone.
    """

    structure: Structure
    leaves: list[Any]
    caches: list[CacheState]
    hash: int
    opaque: list[str]

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Kept]]]:
        """The arguments, and which of their tensors comes from where.

        Raises:
            RuntimeError: their values have changed since they were taken.
        """
        taken: dict[int, Tensor] = {}
        used: list[tuple[Tensor, Kept]] = []
        for leaf in self.leaves:
            if isinstance(leaf, Kept) and id(leaf) not in taken:
                taken[id(leaf)] = leaf.tensor(fresh=False)
                used.append((taken[id(leaf)], leaf))
        leaves = [taken.get(id(leaf), leaf) for leaf in self.leaves]
        if _hash(leaves, paths(self.structure), self.caches)[0] != self.hash:
            raise RuntimeError(
                "a batch holds other values than when it was taken from data: whatever made it has filled the same "
                "memory again since; give each batch memory of its own, or calibrate with inputs_on='cpu'"
            )
        args, kwargs = rebuild(self.structure, leaves)
        return args, kwargs, used


def batches_of(model: nn.Module, data: Data, keep: Callable[[Tensor], Kept]) -> Iterator[Batch]:
    """All batches of this rank; there may be none.

    Args:
        model: what is called; a forward_loop gets it.
        data: an iterable of batches or a forward_loop.
        keep: where their tensors are kept.

    Raises:
        TypeError: `data`, or something in it, is not what a model can be called with.
    """
    calls = _calls_in(model, data) if callable(data) else _calls_of(data)
    for args, kwargs in calls:
        leaves, structure = flatten((args, kwargs))
        caches = [CacheState(leaf) for leaf in leaves if is_cache(leaf) and not is_empty(leaf)]
        digest, opaque = _hash(leaves, paths(structure), caches)
        yield Batch(
            structure, [keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], caches, digest, opaque
        )


def _calls_of(data: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if isinstance(data, Tensor | Mapping | str | bytes):
        raise TypeError(
            f"data must be an iterable of batches or a callable forward_loop(model), got a {type(data).__name__}; put "
            "one batch into a list"
        )
    for number, batch in enumerate(data):
        if isinstance(batch, Tensor):
            yield (batch,), {}
        elif isinstance(batch, tuple | list):
            yield tuple(batch), {}
        elif isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
            yield (), dict(batch)
        else:
            raise TypeError(
                f"batch {number} of data is a {type(batch).__name__}; expected a tensor, a tuple or list of positional "
                "arguments, or a mapping of keyword arguments"
            )


def _calls_in(model: nn.Module, loop: Callable[[nn.Module], Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    with forward_of(model, forward), torch.no_grad():
        try:
            loop(model)
        except Exception as error:
            error.add_note("inside forward_loop the model only records what it is called with, and returns None")
            raise
    return calls


def _hash(leaves: list[Any], names: list[str], caches: list[CacheState]) -> tuple[int, list[str]]:
    """The hash of a call's arguments, and those of them that are in it by their type alone."""
    opaque = []
    digest = xxhash.xxh3_64()
    for name, leaf in zip(names, leaves, strict=True):
        digest.update(f"{name}: ".encode())
        if isinstance(leaf, Tensor):
            _add(digest, leaf)
            if not is_plain(leaf):
                opaque.append(f"{name} ({type(leaf).__name__})")
        elif isinstance(leaf, bool | int | float | str | bytes | torch.dtype | torch.device | None):
            digest.update(repr(leaf).encode())
        else:  # an object: only that it is there, and for a cache what it holds
            digest.update(type(leaf).__qualname__.encode())
            past = [tensor for state in caches if state.cache is leaf for tensor in state.tensors()]
            if not is_cache(leaf) or not (past or is_empty(leaf)):
                opaque.append(f"{name} ({type(leaf).__name__})")
            for tensor in past:
                _add(digest, tensor)
    return digest.intdigest(), opaque


def _add(digest: xxhash.xxh3_64, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if is_plain(tensor) and tensor.numel():
        data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        digest.update(memory_of(data))


def keeper(store: Store) -> Callable[[Tensor], Kept]:
    """`Store.keep` that keeps a tensor once that is in several batches; one with other values by then is another."""
    known: dict[tuple[int, int], tuple[Tensor, Kept]] = {}

    def keep(tensor: Tensor) -> Kept:
        digest = xxhash.xxh3_64()  # not its version: who fills a buffer through numpy raises none
        _add(digest, tensor)
        key = (id(tensor), digest.intdigest())
        if key not in known:
            known[key] = (tensor, store.keep(tensor))
        return known[key][1]

    return keep
