"""The calls of a process group between one sender and its receivers: broadcasts, one after the other.

    header    three numbers: what comes, and how much of it
    tell      bytes, behind a header with their number and digest
    answers   what each rank says, in rank order

A call that failed or was late breaks the link for good: nobody knows which call of the others it would meet.
"""

import datetime as dt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_adapters.streams.transport import WeightStreamError, message_digest
from fsdp_hooks.devices import this_device

ANSWER = 1024  # bytes
FOREVER = dt.timedelta(days=30)


class GroupLink:
    """The calls of a process group, one after the other.

    root: the sender's rank. broken: whether a call failed or was late; the group cannot be used any more.
    """

    def __init__(self, group: Any, root: int, timeout: float) -> None:
        self._group, self._root, self.timeout = group, root, dt.timedelta(seconds=timeout)
        self.device = _device(group)
        self.broken = False

    def room(self, size: int) -> Tensor:
        """uint8 [size]. Raises WeightStreamError where there is none: sizes are what the sender says."""
        try:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            self.broken = True
            raise WeightStreamError(
                f"a message of weights has {size} bytes, and there is no room for it on {self.device}; make buckets "
                "smaller, or let sender and receiver have the same version of this library"
            ) from error

    def broadcast(self, tensor: Tensor, timeout: dt.timedelta | None = None, root: int | None = None) -> Any:
        """Begin to send or receive; what is late breaks the group, so that no thread of it waits for longer."""
        options: Any = dist.BroadcastOptions()
        options.rootRank = self._root if root is None else root
        options.timeout = timeout or self.timeout
        return self._group.broadcast([tensor], options)

    def wait(self, work: Any) -> None:
        """Wait for what was begun."""
        work.wait()

    def header(self, kind: int, first: int, second: int) -> Any:
        """Begin to send three numbers."""
        return self.broadcast(torch.tensor([kind, first, second], dtype=torch.int64, device="cpu").to(self.device))

    def hear(self, timeout: dt.timedelta) -> tuple[int, int, int]:
        """The sender's next three numbers."""
        told = torch.zeros(3, dtype=torch.int64, device=self.device)
        self.wait(self.broadcast(told, timeout))
        kind, first, second = told.tolist()
        return kind, first, second

    def tell(self, kind: int, data: bytes) -> None:
        """Send bytes, behind a header with their number and digest."""
        self.wait(self.header(kind, len(data), message_digest(data)))
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        self.wait(self.broadcast(sent))

    def receive(self, size: int, digest: int) -> bytes:
        """Bytes, whose number and digest a header has told. Raises RuntimeError where they are others."""
        memory = self.room(size)
        self.wait(self.broadcast(memory))
        data = bytes(memory.tolist())
        if message_digest(data) != digest:
            raise RuntimeError(f"{size} bytes that came are not those that were sent")
        return data

    def answers(self, text: str) -> list[str]:
        """What each rank says, in rank order."""
        own = text.encode()[:ANSWER].ljust(ANSWER, b"\0")
        said = []
        for rank in range(self._group.size()):
            told = bytearray(own) if rank == self._group.rank() else bytearray(ANSWER)
            sent = torch.frombuffer(told, dtype=torch.uint8).to(self.device)
            self.wait(self.broadcast(sent, root=rank))
            said.append(bytes(sent.tolist()).rstrip(b"\0").decode(errors="replace"))
        return said

    def errors(self, told: Any) -> "_Errors":
        """A block in which errors of the group become those of a stream, `told(why)`."""
        return _Errors(self, told)


class _Errors:
    def __init__(self, link: GroupLink, told: Any) -> None:
        self._link, self._told = link, told

    def __enter__(self) -> None:
        if self._link.broken:
            raise self._told("the group is broken since an earlier error")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, WeightStreamError):
            self._link.broken = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._told(f"the other side is gone or late ({first})") from None


def _device(group: Any) -> torch.device:
    """The CPU for gloo, the current GPU for NCCL."""
    if "gloo" in group.name():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return this_device("cpu" if accelerator is None else accelerator)
