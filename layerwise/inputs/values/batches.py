"""The batches a model is calibrated on, taken from whatever the user gives, and kept, since they are needed repeatedly.

    an iterable of batches    a tensor -> model(tensor), a tuple or list -> model(*batch), a mapping -> model(**batch)
    a callable                forward_loop(model): every call of the model inside it is a batch. The model computes
                              nothing there and returns None; its hooks run, so what FSDP casts is cast.

Iterators are consumed once. The tensors of a batch are copied when it comes, so the next batch may be written into the
same memory. Objects other than tensors are not copied; if a later batch changes one, it is refused. A filled cache
among the arguments is remembered as it was, see caches.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from layerwise.inputs.values.caches import CacheState, is_cache, is_empty
from layerwise.inputs.values.contents import add_tensor, content_hash
from layerwise.inputs.values.stand_ins import replace_forward
from layerwise.inputs.values.stores import StoredTensor, is_ordinary
from layerwise.inputs.values.structure import Structure, flatten, paths, unflatten
from layerwise.weights.own_hooks import own_hooks_may_fail

Data = Iterable[Any] | Callable[[nn.Module], Any]


@dataclass(eq=False)
class Batch:
    """The arguments of one call of the model.

    Attributes:
        structure: of (args, kwargs).
        leaves: a `StoredTensor` for every tensor; everything else as it is.
        caches: filled caches among the leaves, as they were.
        hash: xxh3 of the arguments, the same on every device and in every process.
        opaque: arguments that are in the hash by their type alone.
    """

    structure: Structure
    leaves: list[Any]
    caches: list[CacheState]
    hash: int
    opaque: list[str]

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, StoredTensor]]]:
        """Return the arguments, which the caller may write into, and what each of their tensors comes from."""
        # One copy for each tensor, not for each place: arguments that were one object stay one object.
        taken: dict[int, Tensor] = {}
        used: list[tuple[Tensor, StoredTensor]] = []
        for leaf in self.leaves:
            if isinstance(leaf, StoredTensor) and id(leaf) not in taken:
                taken[id(leaf)] = leaf.tensor()
                used.append((taken[id(leaf)], leaf))
        args, kwargs = unflatten(self.structure, [taken.get(id(leaf), leaf) for leaf in self.leaves])
        return args, kwargs, used

    def cache_state(self, cache: Any) -> CacheState:
        """Return what to set a cache back to: the state in which it came, or the present one if the model fills it."""
        known = next((state for state in self.caches if state.cache is cache), None)
        if known is None:
            known = CacheState(cache)
            self.caches.append(known)
        return known


def batches_of(model: nn.Module, data: Data, keep: Callable[[Tensor], StoredTensor]) -> list[Batch]:
    """Return all batches of this rank, each as it was when it came; there may be none.

    Args:
        model: what is called; a forward_loop gets it.
        data: an iterable of batches or a forward_loop.
        keep: keeps their tensors, as copies.

    Raises:
        TypeError: `data`, or something in it, is not what a model can be called with.
        ValueError: an object other than a tensor was filled anew for a later batch.
    """
    batches: list[Batch] = []
    objects: list[tuple[str, Any, int]] = []  # what is not copied, and its content

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, structure = flatten((args, kwargs))
        names = paths(structure)
        caches = [CacheState(leaf) for leaf in leaves if is_cache(leaf) and not is_empty(leaf)]
        digest, opaque = _hash(leaves, names, caches)
        kept = [keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for name, leaf in zip(names, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                # A cache that grows is set back to its present past, so only a change of that past matters.
                past = [one for state in caches if state.cache is leaf for one in state.tensors()]
                held = past or leaf
                objects.append((f"{name} of batch {len(batches)} is a {type(leaf).__name__}", held, content_hash(held)))
        batches.append(Batch(structure, kept, caches, digest, opaque))

    if callable(data):
        _record_calls(model, data, take)
    else:
        for args, kwargs in _calls_of(data):
            take(args, kwargs)
    # Compared when all batches have come: a loader may fill the object of the first batch for the last one.
    for what, held, was in objects:
        if content_hash(held) != was:
            raise ValueError(
                f"{what} that holds other values now than when its batch was taken from data: it was filled again for "
                "a later batch, and only tensors are copied; make a new one for each batch"
            )
    return batches


def batches_on(device: torch.device, data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches with their tensors on a device."""
    for batch in data:
        leaves, structure = flatten(batch)
        yield unflatten(structure, [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


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


def _record_calls(
    model: nn.Module, loop: Callable[[nn.Module], Any], take: Callable[[tuple[Any, ...], dict[str, Any]], None]
) -> None:
    def forward(*args: Any, **kwargs: Any) -> None:
        take(args, kwargs)  # at once: the loop may fill the same memory again

    # The user's forward hooks get None for an output and may fail on it; pre-hooks see the true arguments.
    with replace_forward(model, forward), own_hooks_may_fail(model, "forward_hooks"), torch.no_grad():
        try:
            loop(model)
        except Exception as error:
            error.add_note("inside forward_loop the model only records what it is called with, and returns None")
            raise


def _hash(leaves: list[Any], names: list[str], caches: list[CacheState]) -> tuple[int, list[str]]:
    """Return the hash of a call's arguments, and the names of those that are in it by their type alone."""
    opaque = []
    digest = xxhash.xxh3_64()
    for name, leaf in zip(names, leaves, strict=True):
        digest.update(f"{name}: ".encode())
        if isinstance(leaf, Tensor):
            add_tensor(digest, leaf)
            if not is_ordinary(leaf):
                opaque.append(f"{name} ({type(leaf).__name__})")
        elif isinstance(leaf, bool | int | float | str | bytes | torch.dtype | torch.device | None):
            digest.update(repr(leaf).encode())
        # An object has no content that is the same in every process, so only its type counts, and of a cache its past.
        else:
            digest.update(type(leaf).__qualname__.encode())
            past = [tensor for state in caches if state.cache is leaf for tensor in state.tensors()]
            # A cache that is not empty, but does not show its layers, has a past that is not in the hash.
            if not is_cache(leaf) or not (past or is_empty(leaf)):
                opaque.append(f"{name} ({type(leaf).__name__})")
            for tensor in past:
                add_tensor(digest, tensor)
    return digest.intdigest(), opaque
