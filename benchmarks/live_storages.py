"""How many bytes of tensor storage are alive at once, counted at every torch operation: no clock and no RSS.

It does not see what an operation allocates and frees inside itself, nor what was alive before the block began.
"""

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts inside its block.

    Args:
        except_for: tensors whose storages do not count.
        resized: storages may grow without an operation, as those do that FSDP gathers into: look at all of them after
            every operation, instead of only when the peak could have been passed.
        grain: bytes that the peak may be off by, below; to count a great number of small storages.

    Attributes:
        peak: the most bytes of storage that results of operations held at one moment.
        collectives: how often each collective was called, by its name.
    """

    def __init__(self, *, except_for: Iterable[Tensor] = (), resized: bool = False, grain: int = 0) -> None:
        super().__init__()
        self.peak = 0
        self._resized, self._grain = resized, grain
        self._at_most = 0  # bytes alive, if nothing had died since they were last counted
        self._old_bytes = 0  # of those that were alive when all were last counted
        self._young: dict[int, StorageWeakRef] = {}  # made since then; most die young
        self.collectives: collections.Counter[str] = collections.Counter()
        self._seen: dict[int, StorageWeakRef] = {}
        self._ignored = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in except_for}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls not in (Tensor, nn.Parameter) for cls in types):
            return NotImplemented  # a subclass answers first, and its operations on plain tensors come here again
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives[func.overloadpacket.__name__] += 1
        for leaf in tree_leaves(out):
            if type(leaf) is Tensor:
                reference = StorageWeakRef(leaf.untyped_storage())
                if not any(reference.cdata in known for known in (self._ignored, self._seen, self._young)):
                    self._young[reference.cdata] = reference
                    self._at_most += leaf.untyped_storage().nbytes() if leaf.device.type != "meta" else 0
        if self._resized:
            self.peak = max(self.peak, self._count_all())
        elif self._at_most > self.peak + self._grain:
            self._at_most = self._old_bytes + _held(self._young)
            if self._at_most > self.peak + self._grain:
                self.peak = max(self.peak, self._count_all())
        return out

    def _count_all(self) -> int:
        self._seen |= self._young
        self._young.clear()
        self._at_most = self._old_bytes = _held(self._seen)
        return self._at_most


def _held(seen: dict[int, StorageWeakRef]) -> int:
    """Bytes of those that are alive; the others are removed."""
    total = 0
    for key, reference in list(seen.items()):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001 - no public way back
        if storage is None:
            del seen[key]
        elif storage.device.type != "meta":
            total += storage.nbytes()
    return total
