"""Targets on one memory, as tied weights are: the checkpoint must have the same values for all of them.

Whoever is read last would win, without a word. Nothing tells before both have been read, so the sums of what arrives
(fsdp_hooks/byte_sums.py) are kept for such targets, and compared with what they hold in the end.
"""

import math
import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from dcp_adapters.plain_memory import is_plain
from fsdp_hooks.byte_sums import Piece, byte_sums
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.writable import meeting


class OneMemory:
    """The targets of one load that lie on each other's memory.

    Args:
        entries: what is read into, by entry of the checkpoint; entries that are not read are left out by the caller.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        local = {name: local_of(value) for name, value in entries.items() if isinstance(value, Tensor)}
        plain = {name: value.detach() for name, value in local.items() if is_plain(value)}
        self._groups = {name: group for group in meeting(plain) for name in group}
        self._targets = {name: plain[name] for name in self._groups}
        self._sums = {name: [0, 0] for name in self._groups}  # of the bytes that came, and their elements
        self._lock = threading.Lock()  # readers commit from several threads

    def arrived(self, item: ReadItem, tensor: Tensor) -> None:
        """A piece has been read.

        Raises:
            ValueError: it was the last one, and a target does not hold what was read into it.
        """
        name = item.dest_index.fqn
        if name not in self._groups:
            return
        target = self._targets[name]
        with self._lock:
            one = self._sums[name]
            one[0] += int(byte_sums([Piece(tensor.detach(), tuple(target.shape), tuple(item.dest_offsets))]))
            one[1] += tensor.numel()
            group = self._groups[name]
            if any(self._sums[each][1] < math.prod(self._targets[each].shape) for each in group):
                return
        for each in group:
            if (self._sums[each][0] - int(byte_sums([Piece.whole(self._targets[each])]))) % 2**64:
                raise ValueError(
                    f"{each} shares memory with {', '.join(other for other in group if other != each)} in the target, "
                    "and the checkpoint has different values for them. They are loaded, one over the other: untie them "
                    "in the target, or leave the one out that is to follow (allow_partial_load=True), and load again"
                )
