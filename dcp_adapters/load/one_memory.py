"""Targets on one memory, as tied weights are: the checkpoint must have the same values for all of them.

Whoever is read last would win, without a word. Nothing tells before both have been read, so the sums of what arrives
(fsdp_hooks/kernels/byte_sums.py), and of what a conversion has written, are kept for such targets, and compared
with what they hold in the end.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from dcp_adapters.plain.plain_memory import is_plain
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.writable import meeting
from qtensor.tensor.quantized_tensor import QuantizedTensor


class OneMemory:
    """The targets of one load that lie on each other's memory.

    Args:
        entries: what is read into, by entry of the checkpoint; entries that are not read are left out by the caller.
        converted: what conversions write, the local tensor by name.
    """

    def __init__(self, entries: Mapping[str, Any], converted: Mapping[str, Tensor]) -> None:
        local = {name: local_of(value) for name, value in entries.items() if isinstance(value, Tensor)}
        parts = {(name, part): each for name, value in converted.items() for part, each in _parts(value).items()}
        keys = {f"{name}.{part}".rstrip("."): (name, part) for name, part in parts}
        all_of_them = local | {key: parts[place] for key, place in keys.items()}
        plain = {name: value.detach() for name, value in all_of_them.items() if is_plain(value)}
        self._groups = {name: group for group in meeting(plain) for name in group}
        self._read = self._groups.keys() & local.keys()  # a conversion reads under the names of parts, too
        self._targets = {name: plain[name] for name in self._groups}
        self._sums = {name: [0, 0] for name in self._groups}  # of the bytes that came, and their elements
        self._written: dict[str, list[str]] = {}  # name of a conversion -> its targets here
        for key in keys.keys() & self._groups.keys():
            self._written.setdefault(keys[key][0], []).append(key)
        self._lock = threading.RLock()  # readers commit from several threads

    def arrived(self, item: ReadItem, tensor: Tensor) -> None:
        """A piece has been read.

        Raises:
            ValueError: it was the last one, and a target does not hold what was read into it.
        """
        name = item.dest_index.fqn
        if name not in self._read:
            return
        target = self._targets[name]
        with self._lock:
            one = self._sums[name]
            one[0] += int(byte_sums([TensorPiece(tensor.detach(), tuple(target.shape), tuple(item.dest_offsets))]))
            one[1] += tensor.numel()
            self._compare(name)

    @contextmanager
    def written(self, name: str) -> Iterator[None]:
        """A block in which a conversion is written; raises as `arrived` does."""
        if name not in self._written:
            yield
            return
        with self._lock:  # nobody else writes there before the sums are taken
            yield
            for key in self._written[name]:
                target = self._targets[key]
                self._sums[key] = [int(byte_sums([TensorPiece.whole(target)])), target.numel()]
            for key in self._written[name]:
                self._compare(key)

    def _compare(self, name: str) -> None:
        """Raise where all of a group are there, and one is no longer what it was."""
        group = self._groups[name]
        if any(self._sums[each][1] < self._targets[each].numel() for each in group):
            return
        for each in group:
            if (self._sums[each][0] - int(byte_sums([TensorPiece.whole(self._targets[each])]))) % 2**64:
                raise ValueError(
                    f"{each} shares memory with {', '.join(other for other in group if other != each)} in the target, "
                    "and the checkpoint has different values for them. They are loaded, one over the other: untie them "
                    "in the target, or leave the one out that is to follow (allow_partial_load=True), and load again"
                )


def _parts(value: Tensor) -> dict[str, Tensor]:
    return value.parts() if isinstance(value, QuantizedTensor) else {"": value}
