"""Weights to engines over torch.distributed: broadcasts from one trainer rank, in a group that it shares with engines.

The only way here to an engine on another host that is not vLLM: shared memory ends at the host, and vllm.py hands over
to transports of vLLM's own.

    group      any process group with the sender and the receivers in it; `join_group` makes one between jobs that have
               process groups of their own, without touching those

    sender                                                         receivers
    header "begin", announcement            broadcasts         ->  compare
    header "bucket i, digest", its bytes    broadcasts         ->  compare
    header "end, digest of all"             a broadcast        ->  compare
    hears a text of every receiver          broadcasts         <-  "" or what failed

While a bucket travels, the next one is made; a broadcast waits for the receiver, so no more than that is under way. A
receiver that fails goes on receiving and says so at the end: leaving would break the group for all. Over gloo the death
of a peer is an error at once; NCCL tells nobody, there the timeout is what ends the wait.
"""

import datetime as dt
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dcp_adapters.streams.announcement import Announcement
from dcp_adapters.streams.buckets import fill, room_of, views
from dcp_adapters.streams.link import FOREVER, GroupLink
from dcp_adapters.streams.transport import (
    Incoming,
    Receiver,
    WeightStreamError,
    bytes_digest,
    digest_of_all,
)
from dcp_adapters.torch_private import ProcessGroupGloo

BEGIN, BUCKET, END, ABORT = range(4)


def join_group(address: str, rank: int, ranks: int, *, timeout: float = 300.0) -> Any:
    """A gloo group of processes that need not have any process group in common; all of them call it.

    Args:
        address: "host:port" of rank 0, free there.
        rank: of this process in the group; the sender is rank 0.
        ranks: how many processes there are, the sender included.
        timeout: seconds until all of them must be there.

    Raises:
        ValueError: `address` is not "host:port"; there is no such rank.
        RuntimeError: they were not there in time.

    Example:
        ```python
        >>> group = join_group("127.0.0.1:29400", rank=0, ranks=2)  # the other process calls it with rank=1
        >>> group.size()
        2
        ```
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f'join_group: address={address!r}, expected "host:port"')
    if not 0 <= rank < ranks:
        raise ValueError(f"join_group: rank={rank} of ranks={ranks}; expected a rank from 0 to {ranks - 1}")
    within = dt.timedelta(seconds=timeout)
    store = dist.TCPStore(host, int(port), ranks, rank == 0, timeout=within)
    return ProcessGroupGloo(dist.PrefixStore("weights", store), rank, ranks, timeout=FOREVER)


class GroupSender:
    """Sends to all other ranks of a group; see `Sender` for the order of calls, which `WeightStream.send` keeps.

    Args:
        group: of this process and the receivers, from `torch.distributed.new_group` or `join_group`.
        timeout: seconds that receivers may take for a bucket, and to accept a version.

    Raises:
        ValueError: this process is not in the group, or alone in it.

    Example:
        ```python
        >>> state = {"up.weight": quantize(torch.ones(4, 64), MXFP8BlockScaling())}
        >>> stream = WeightStream(state, config={"model_type": "mine"})
        >>> group = join_group("127.0.0.1:29400", rank=0, ranks=2)  # an engine joins as rank 1
        >>> stream.send(GroupSender(group))
        ```
    """

    def __init__(self, group: Any, *, timeout: float = 300.0) -> None:
        _check_member("GroupSender", group)
        if group.size() < 2:
            raise ValueError("GroupSender: there is nobody else in the group; it needs the receivers, too")
        self._link = GroupLink(group, group.rank(), timeout)
        self._announcement: Announcement | None = None
        self._digests: list[int] = []
        self._buffers: list[Tensor] = []
        self._under_way: list[Any] = []
        self._ended = False  # whether the receivers have heard the end

    def begin(self, announcement: Announcement) -> None:
        """Tell the receivers what comes."""
        self._announcement, self._digests, self._under_way, self._ended = announcement, [], [], False
        if not self._buffers or self._buffers[0].numel() < announcement.largest:
            self._buffers = [self._link.room(announcement.largest) for _ in range(2)]
        with self._link.errors(self._error):
            self._link.tell(BEGIN, announcement.to_bytes())

    def bucket(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a bucket, wait until the last one has arrived, and send it on its way."""
        assert self._announcement is not None
        number = len(self._digests)
        records = self._announcement.buckets[number]
        memory = self._buffers[number % 2][: room_of(records)]
        fill(records, tensors, memory)
        digest = bytes_digest(memory)
        with self._link.errors(self._error):
            self._await_arrival()
            self._under_way = [self._link.header(BUCKET, number, digest), self._link.broadcast(memory)]
        self._digests.append(digest)

    def end(self) -> None:
        """Wait until all receivers have compared everything."""
        with self._link.errors(self._error):
            self._await_arrival()
            self._ended = True
            self._link.wait(self._link.header(END, len(self._digests), digest_of_all(self._digests)))
            answers = self._link.answers("")
        failed = next(filter(None, answers), None)
        if failed is not None:
            raise self._error(f"a receiver failed ({failed})")

    def abort(self, error: BaseException) -> None:
        """Tell the receivers why no more comes, unless the group is broken or they have heard the end."""
        if self._link.broken or self._announcement is None or self._ended:
            return
        try:
            self._await_arrival()
            self._link.tell(ABORT, f"{type(error).__name__}: {error}".encode())
        except RuntimeError:  # of the group
            self._link.broken = True

    def _await_arrival(self) -> None:
        for work in self._under_way:
            self._link.wait(work)
        self._under_way = []

    def _error(self, why: str) -> WeightStreamError:
        assert self._announcement is not None
        return WeightStreamError(
            f"version {self._announcement.version} of the weights: {why}, after {len(self._digests)} of "
            f"{len(self._announcement.buckets)} buckets; the model is as it was. Make the group anew if a process of "
            "it died, and send again"
        )


class GroupReceiver(Receiver):
    """Receives what a `GroupSender` of the same group sends; see `Receiver`. The tensors are in memory of their own.

    Args:
        group: as of the sender.
        sender: its rank in the group.
        timeout: seconds that it may take for a bucket, once it has begun.
        patience: seconds that it may take to announce the next version; None: as long as it likes.

    Raises:
        ValueError: this process is not in the group, or is the sender.

    Example:
        ```python
        >>> receiver = GroupReceiver(join_group("127.0.0.1:29400", rank=1, ranks=2))
        >>> with receiver.receive() as weights:
        ...     received = {name: tensor for tensors in weights for name, tensor in tensors.items()}
        >>> sorted(received)
        ['up.weight', 'up.weight_scale']
        ```
    """

    def __init__(self, group: Any, *, sender: int = 0, timeout: float = 300.0, patience: float | None = None) -> None:
        _check_member("GroupReceiver", group)
        if sender == group.rank():
            raise ValueError(f"GroupReceiver: sender={sender} is this rank itself; expected the sender's rank")
        self._link, self._patience = GroupLink(group, sender, timeout), patience

    def _begin(self) -> Incoming:
        with self._link.errors(_not_announced):
            kind, size, digest = self._link.hear(
                FOREVER if self._patience is None else dt.timedelta(seconds=self._patience)
            )
            data = self._link.receive(size, digest) if kind in (BEGIN, ABORT) else b""
        if kind != BEGIN:
            raise _not_announced(
                f"it gave up ({data.decode(errors='replace')})" if kind == ABORT else f"it sent {kind}"
            )
        try:
            return _IncomingBroadcasts(Announcement.from_bytes(data), self._link)
        except ValueError as error:  # where its buckets begin and end is not known
            self._link.broken = True
            raise _not_announced(str(error)) from None

    def _accept(self, incoming: Incoming) -> None:
        with self._link.errors(incoming.broken):
            answers = self._link.answers("")
        failed = next(filter(None, answers), None)
        if failed is not None:
            raise incoming.broken(f"another receiver failed ({failed})")

    def _refuse(self, incoming: Incoming, error: BaseException) -> None:
        assert isinstance(incoming, _IncomingBroadcasts)
        try:
            if not self._link.broken and incoming.drain():
                self._link.answers(f"{type(error).__name__}: {error}")
        except (RuntimeError, ValueError):
            self._link.broken = True


class _IncomingBroadcasts(Incoming):
    def __init__(self, announcement: Announcement, link: GroupLink) -> None:
        super().__init__(announcement)
        self._link = link
        self._digests: list[int] = []
        self._ended = False  # whether the sender has said END, and waits for an answer
        self._given_up = False

    def _next(self) -> dict[str, Tensor]:
        records, digest, memory = self._bucket()
        if bytes_digest(memory) != digest:
            raise self.broken(f"the bytes of bucket {len(self._digests)} are not those that were sent")
        return dict(views(records, memory))

    def _bucket(self) -> tuple[Any, int, Tensor]:
        with self._link.errors(self.broken):
            number, digest = self._hear(BUCKET)
            if number != len(self._digests):
                raise self.broken(f"bucket {number + 1} came in place of {len(self._digests) + 1}")
            records = self.announcement.buckets[number]
            memory = self._link.room(room_of(records))
            self._link.wait(self._link.broadcast(memory))
        self._digests.append(digest)
        return records, digest, memory

    def _finish(self) -> None:
        with self._link.errors(self.broken):
            number, digest = self._hear(END)
        self._ended = True
        if (number, digest) != (self.came, digest_of_all(self._digests)):
            raise self.broken(f"the sender says that it sent {number} buckets, or others")

    def drain(self) -> bool:
        """Receive, and drop, what the sender still sends; whether it waits for an answer then."""
        while not self._given_up and len(self._digests) < len(self.announcement.buckets):
            self._bucket()
        if not self._ended and not self._given_up:
            self._hear(END)
            self._ended = True
        return self._ended

    def _hear(self, expected: int) -> tuple[int, int]:
        kind, number, digest = self._link.hear(self._link.timeout)
        if kind == ABORT:
            self._given_up = True
            raise self.broken(f"the sender gave up ({self._link.receive(number, digest).decode(errors='replace')})")
        if kind != expected:
            self._link.broken = True
            raise self.broken(f"the sender said {kind} instead of {expected}")
        return number, digest


def _check_member(caller: str, group: Any) -> None:
    """Refuse what `new_group` returns on ranks that it leaves out; None, too, as the default group has no engine."""
    if not callable(getattr(group, "rank", None)):
        raise ValueError(
            f"{caller}: group={group!r} is no process group that this rank is in; give one of the sender and the "
            "receivers, from torch.distributed.new_group or join_group"
        )


def _not_announced(why: str) -> WeightStreamError:
    return WeightStreamError(
        f"the sender did not announce a version ({why}); see whether the trainer runs, make the group anew where a "
        "process of it died, and receive again"
    )
