"""How tensors came about in a run: whether row t of one stands for the same token as row t of another.

A layer that runs on two inputs of one batch computes two values for each of its tensors, row by row of the same tokens,
unless what it does depends on values: a router sends other tokens to an expert, in another order. `Lineage` sees every
torch function called inside it, and gives each floating tensor a digest of what it was made by:

    function, the digests of its floating operands, numbers that say where (indices, sizes, slices), and the contents
    of its integer and boolean tensors, operands and results

but of no floating value. So two runs give a tensor the same digest if all selections on the way to it were the same.
The reverse does not hold: what is selected elsewhere (an expert's weight of a token) may differ without changing the
order of rows, and then the rows are taken for different ones. That is the safe side.

A write in place gives its target a new digest, and the tensor that this is a view of.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fsdp_hooks.kernels.digest import digest

_PLAIN = (Tensor, Parameter)


class Lineage(TorchFunctionMode):
    """Follows tensors through the torch functions called inside it; it changes no result.

    Enter it after a `Watch`, so that it does not see what the watch's caller computes.
    """

    def __init__(self) -> None:
        super().__init__()
        # by id; the reference tells whether that id is still the same tensor
        self._digests: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._bases: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}

    def of(self, x: Tensor) -> int:
        """Return the digest of a tensor; 0 for a parameter, and for one that no function inside made or wrote."""
        known = self._digests.get(id(x))
        made = known is not None and known[0]() is x and type(x) is not Parameter
        return known[1] if known is not None and made else 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = list(_leaves((args, kwargs)))
        floating = [leaf for leaf in operands if _is_floating(leaf)]
        before = [_version(leaf) for leaf in floating]
        result = func(*args, **kwargs)
        results = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in results if _is_floating(leaf) and not _is_among(leaf, floating)]
        written = [leaf for leaf, was in zip(floating, before, strict=True) if _version(leaf) != was]
        # Inference tensors count no writes; an operand that is returned was written in place.
        written += [leaf for leaf in floating if leaf.is_inference() and _is_among(leaf, results)]
        if made or written:
            origin = self._digest(getattr(func, "__name__", ""), operands, results)
            for number, tensor in enumerate(made):
                self._note_made(tensor, floating, origin + number)
            for tensor in written:
                self._note_written(tensor, origin)
        return result

    def _digest(self, name: str, operands: Sequence[Any], results: Sequence[Tensor]) -> int:
        found = xxhash.xxh3_64(name.encode())
        for leaf in operands:
            if _is_floating(leaf):
                found.update(f"tensor {self.of(leaf)}".encode())
            elif isinstance(leaf, Tensor):
                found.update(_content(leaf).encode())
            elif isinstance(leaf, bool | int | str | slice | torch.dtype | None):
                found.update(repr(leaf).encode())
            elif not isinstance(leaf, float):  # a number that depends on values says nothing about rows
                found.update(type(leaf).__name__.encode())
        for leaf in results:
            if not _is_floating(leaf):
                found.update(_content(leaf).encode())
        return found.intdigest()

    def _note_made(self, tensor: Tensor, operands: Sequence[Tensor], origin: int) -> None:
        self._digests[id(tensor)] = weakref.ref(tensor), origin
        place = _storage(tensor)
        # A result in the memory of an operand is a view of it: later writes into one concern both.
        base = next((leaf for leaf in operands if place is not None and _storage(leaf) == place), None)
        if base is not None:
            self._bases[id(tensor)] = weakref.ref(tensor), weakref.ref(self._base(base))

    def _note_written(self, tensor: Tensor, origin: int) -> None:
        self._digests[id(tensor)] = weakref.ref(tensor), origin
        base = self._base(tensor)
        if base is not tensor:
            both = xxhash.xxh3_64_intdigest(f"{self.of(base)} {origin}".encode())
            self._digests[id(base)] = weakref.ref(base), both

    def _base(self, tensor: Tensor) -> Tensor:
        """Return the tensor that this is a view of, itself if it is none."""
        known = self._bases.get(id(tensor))
        base = known[1]() if known is not None and known[0]() is tensor else None
        return tensor if base is None else base


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _version(tensor: Tensor) -> int:
    """Return how often it was written, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int | None:
    """Return where its memory is; None for a tensor that has none of its own."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else None


def _content(tensor: Tensor) -> str:
    """Describe the dtype, shape and values of an integer or boolean tensor."""
    return f"{tensor.dtype} {list(tensor.shape)} {int(digest([tensor]))}" if tensor.numel() else f"{list(tensor.shape)}"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    else:
        yield value
