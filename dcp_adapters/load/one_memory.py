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

from dcp_adapters.plain.plain_memory import plain_among
from dcp_adapters.records.entry import parts_of
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums
from fsdp_hooks.torch_private import named_locals_of
from fsdp_hooks.writable import meeting


class OneMemory:
    """The targets of one load that lie on each other's memory.

    Attributes:
        read: those of them that are read, by entry of the checkpoint.
        written: name of a conversion -> its targets among them.

    Args:
        entries: what is read into, by entry of the checkpoint; entries that are not read are left out by the caller.
        converted: what conversions write, the local tensor by name.
    """

    def __init__(self, entries: Mapping[str, Any], converted: Mapping[str, Tensor]) -> None:
        local = named_locals_of(entries)
        parts = {(name, part): each for name, value in converted.items() for part, each in parts_of(value).items()}
        keys = {f"{name}.{part}".rstrip("."): (name, part) for name, part in parts}
        all_of_them = local | {key: parts[place] for key, place in keys.items()}
        plain = {name: value.detach() for name, value in plain_among(all_of_them).items()}
        self._groups = {name: group for group in meeting(plain) for name in group}
        self.read = self._groups.keys() & local.keys()  # a conversion reads under the names of parts, too
        self._targets = {name: plain[name] for name in self._groups}
        self._sums = {name: [0, 0] for name in self._groups}  # of the bytes that came, and their elements
        self.written: dict[str, list[str]] = {}
        for key in keys.keys() & self._groups.keys():
            self.written.setdefault(keys[key][0], []).append(key)
        self._lock = threading.RLock()  # readers commit from several threads

    def arrived(self, item: ReadItem, tensor: Tensor) -> None:
        """Count a piece of one of `read` that has arrived.

        Raises:
            ValueError: it was the last one, and a target does not hold what was read into it.
        """
        name = item.dest_index.fqn
        target = self._targets[name]
        with self._lock:
            one = self._sums[name]
            # a sum of bytes at their places: pieces may arrive in any order, and their sums add up to the whole one's
            one[0] += int(byte_sums([TensorPiece(tensor.detach(), tuple(target.shape), tuple(item.dest_offsets))]))
            one[1] += tensor.numel()
            self._compare(name)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Enclose the writing of one of `written`; raises as `arrived` does."""
        # nobody else may write there before the sums are taken
        with self._lock:
            yield
            for key in self.written[name]:
                target = self._targets[key]
                self._sums[key] = [int(byte_sums([TensorPiece.whole(target)])), target.numel()]
            for key in self.written[name]:
                self._compare(key)

    def _compare(self, name: str) -> None:
        """Raise if all of a group are there, and one is no longer what it was."""
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
