"""How many bytes of tensor storage are alive at once: counted at every torch operation, no clock and no RSS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qtensor.tensor.quantized_tensor import QuantizedTensor


class LiveStorages(TorchDispatchMode):
    """`peak`: the most bytes of storage that results of torch operations held at one moment inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, QuantizedTensor) and not leaf.is_meta:
                reference = StorageWeakRef(leaf.untyped_storage())
                self._seen[reference.cdata] = reference
        self.peak = max(self.peak, self._held())
        return out

    def _held(self) -> int:
        total = 0
        for key, reference in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total
