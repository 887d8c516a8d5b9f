"""What senders and receivers have in common: who says what when, and what is checked before a version counts.

    sender      begin(announcement) -> bucket(tensors), bucket(tensors), ... -> end()    or, at any point, abort(error)
    receiver    with receiver.receive() as weights:      waits for an announcement
                    for tensors in weights:              one bucket at a time, valid until the next one is asked for
                        ...
                                                         after the last: compares digests, then answers the sender

`weights` ends only when the sender has said that the version is complete and every byte has been compared. Until then
nothing of it is a version: whatever happens, both sides raise WeightStreamError, `receiver.version` is that of the last
complete one, and the engine must not serve what it has half loaded.

A delta travels in the same way, as one bucket. A receiver looks at `weights.base`: None says that all tensors come, a
number that `weights.delta()` has what leads from that version to this one.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.patch_format import delta_from_bytes, delta_to_bytes
from dcp_adapters.plain.plain_memory import memory_of
from dcp_adapters.streams.announcement import DELTA, Announcement
from fsdp_hooks.kernels.digest import digest


class WeightStreamError(RuntimeError):
    """Weights did not arrive as a whole; the text says what came, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(text)


class Sender(Protocol):
    """Takes the buckets of one version after the other; used by one rank, which calls in the order above."""

    def begin(self, announcement: Announcement) -> None:
        """Say what comes, and wait until it is wanted."""

    def bucket(self, tensors: Mapping[str, Tensor]) -> None:
        """Send a bucket; waits while the receiver is behind. The tensors are not kept."""

    def end(self) -> None:
        """Say that this was all, and wait until the receiver has compared it."""

    def abort(self, error: BaseException) -> None:
        """Tell the receiver that no more comes; must not raise."""


class Incoming(ABC):
    """One version on its way in: an iterator of buckets, name -> tensor; or, where `base` is a number, a delta.

    Attributes:
        announcement: what it is.
        came: buckets that have come.
        complete: whether everything came and was compared.

    Example:
        ```python
        >>> with SharedMemoryReceiver("weights.socket") as receiver, receiver.receive() as weights:
        ...     received = {name: tensor.clone() for tensors in weights for name, tensor in tensors.items()}
        >>> weights.version, weights.base, sorted(received)
        (1, None, ['up.weight', 'up.weight_scale'])
        ```
    """

    def __init__(self, announcement: Announcement) -> None:
        self.announcement = announcement
        self.came = 0
        self.complete = False

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.announcement.version

    @property
    def base(self) -> int | None:
        """The version since which this one has the changes; None where all tensors come."""
        return self.announcement.base

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The buckets. Raises WeightStreamError where something does not arrive, or a delta comes."""
        if self.base is not None:
            raise self.broken(f"it comes as a delta since version {self.base}; take delta() instead of iterating")
        yield from self._buckets()

    def delta(self) -> Delta:
        """The delta, once all of it has come; `apply_deltas` takes it, and refuses tensors of another version.

        Raises:
            WeightStreamError: it does not arrive, or all tensors come instead of a delta.
            ValueError: it is damaged, or of other versions than were announced.
        """
        if self.base is None:
            raise self.broken("all of its tensors come, and no delta; iterate instead of taking delta()")
        data = b""
        for tensors in self._buckets():  # one
            held = tensors[DELTA].to("cpu")
            data = memory_of(held).raw
        found = delta_from_bytes(data, "the delta that came")
        if (found.base_version, found.version) != (self.base, self.version):
            raise ValueError(
                f"{found.where} leads from version {found.base_version} to {found.version}, and was announced as one "
                f"from {self.base}; send the full version"
            )
        return found

    def _buckets(self) -> Iterator[dict[str, Tensor]]:
        while self.came < len(self.announcement.buckets):
            tensors = self._next()
            self.came += 1
            yield tensors
        self._finish()
        self.complete = True

    @abstractmethod
    def _next(self) -> dict[str, Tensor]:
        """The next bucket, compared with its digest."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for the sender's last word."""

    def broken(self, why: str) -> WeightStreamError:
        """The error of a version that does not become whole."""
        return WeightStreamError(
            f"version {self.version} of the weights: {why}, after {self.came} of {len(self.announcement.buckets)} "
            "buckets; what came is not a version. Receive a whole one before the engine goes on"
        )


class Receiver(ABC):
    """Receives one version after the other.

    Attributes:
        version: of the last complete one, 0 before the first.
    """

    version = 0

    @contextmanager
    def receive(self) -> Iterator[Incoming]:
        """Wait for the next version, and take its buckets inside the block.

        Raises:
            WeightStreamError: the sender died, gave up, or is late; bytes differ from the sender's; the block ended
                before the last bucket was taken.
        """
        incoming = self._begin()
        try:
            yield incoming
            if not incoming.complete:
                raise incoming.broken("the receiver left the block before it had taken everything")
        except BaseException as error:
            self._refuse(incoming, error)
            raise
        self._accept(incoming)
        self.version = incoming.version

    @abstractmethod
    def _begin(self) -> Incoming:
        """Wait for an announcement."""

    @abstractmethod
    def _accept(self, incoming: Incoming) -> None:
        """Tell the sender that the version is complete."""

    @abstractmethod
    def _refuse(self, incoming: Incoming, error: BaseException) -> None:
        """Tell the sender why it does not become complete; must not raise."""


def send_delta(sender: Sender, delta: Delta) -> None:
    """Send a delta between two versions of a stream, and wait until it is accepted."""
    data = torch.frombuffer(bytearray(delta_to_bytes(delta)), dtype=torch.uint8)
    assert delta.version is not None
    assert delta.base_version is not None
    sender.begin(Announcement.of_delta(delta.version, delta.base_version, data.numel()))
    sender.bucket({DELTA: data})
    sender.end()


def bytes_digest(memory: Tensor) -> int:
    """A number of 63 bits for the bytes of a bucket, uint8 [n], contiguous; the same on every device of a kind."""
    if memory.is_cpu:
        return xxhash.xxh3_64_intdigest(memory_of(memory)) & (2**63 - 1)
    return int(digest([memory])) & (2**63 - 1)


def message_digest(data: bytes) -> int:
    """A number of 63 bits for the bytes of an announcement."""
    return xxhash.xxh3_64_intdigest(data) & (2**63 - 1)


def digest_of_all(digests: Sequence[int]) -> int:
    """A number for the digests of all buckets, in their order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests)) & (2**63 - 1)
