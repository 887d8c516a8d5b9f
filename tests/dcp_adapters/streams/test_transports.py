"""Weights on their way into another process: what arrives, and what is said when it does not.

Most tests have sender and receiver in two threads: the kernel closes a connection the same way for threads that let go
of it and for processes that die. One test a transport kills processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from dcp_adapters import (
    GroupReceiver,
    GroupSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    WeightStream,
    WeightStreamError,
    join_group,
)
from dcp_adapters.streams.announcement import Announcement
from dcp_adapters.streams.buckets import TensorRecord
from tests.dcp_adapters.streams.cases import CONFIG, assert_same, quantized, sharded, streamed
from tests.ranks import run_ranks
from tests.sampling import sampled

REPO = Path(__file__).resolve().parents[3]
SOON = 20.0  # seconds that nothing here should take on a busy machine
NOW = 0.3  # a timeout that is meant to pass


def stream(bucket_bytes: int = 3000) -> WeightStream:
    return WeightStream(quantized("nvfp4"), config=CONFIG, bucket_bytes=bucket_bytes)


@contextmanager
def in_thread(step: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a step beside the block; its result or error is in the list afterwards."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(step())
        except Exception as error:  # compared by the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(SOON)
        assert not thread.is_alive()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ends:
    """Senders and receivers, which are closed when a test ends."""

    def __init__(self, where: Path, opened: ExitStack) -> None:
        self.address, self._opened = where / "weights", opened

    def __call__(self, kind: str, *, late: float = SOON) -> tuple[Any, Any]:
        """A sender and a receiver of a transport."""
        if kind == "shared memory":
            return self.sender(timeout=late), self.receiver(timeout=late, patience=SOON)
        address, groups = f"127.0.0.1:{free_port()}", {}
        with in_thread(lambda: groups.update(sender=join_group(address, 0, 2, timeout=SOON))):
            groups["receiver"] = join_group(address, 1, 2, timeout=SOON)
        receiver = GroupReceiver(groups["receiver"], timeout=late, patience=SOON)
        return GroupSender(groups["sender"], timeout=late), receiver

    def sender(self, **options: Any) -> SharedMemorySender:
        return self._opened.enter_context(SharedMemorySender(self.address, **options))

    def receiver(self, **options: Any) -> SharedMemoryReceiver:
        return self._opened.enter_context(SharedMemoryReceiver(self.address, **options))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as opened:
        yield Ends(tmp_path, opened)


def take(receiver: Any) -> dict[str, Tensor]:
    """A version, copied."""
    found: dict[str, Tensor] = {}
    with receiver.receive() as weights:
        for tensors in weights:
            found |= {name: tensor.clone() for name, tensor in tensors.items()}
    return found


TRANSPORTS = ["shared memory", "process group"]
every_transport = pytest.mark.parametrize("kind", TRANSPORTS)


@every_transport
def test_versions_arrive_bit_for_bit(kind: str, ends: Ends) -> None:
    sender, receiver = ends(kind)
    weights = stream()
    with in_thread(lambda: [weights.send(sender) for _ in range(2)]) as sent:
        for version in (1, 2):
            with receiver.receive() as incoming:
                assert (incoming.version, receiver.version) == (version, version - 1)
                assert incoming.announcement.records == weights.metadata()
                assert incoming.announcement.json == json.loads(json.dumps(weights.json))
                found: dict[str, Tensor] = {}
                for tensors in incoming:
                    found |= {name: tensor.clone() for name, tensor in tensors.items()}
            assert receiver.version == version
            assert_same(found, streamed(stream()))
    assert sent == [[None, None]]
    assert weights.version == 2


def test_what_is_received_from_shared_memory_is_that_memory(ends: Ends, tmp_path: Path) -> None:
    sender, receiver = ends("shared memory")
    with in_thread(lambda: stream().send(sender)), receiver.receive() as incoming:
        for tensors in incoming:
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
            assert len(storages) == 1
            assert next(iter(tensors.values())).untyped_storage().nbytes() >= 2 * incoming.announcement.largest
    sender.close()
    assert list(tmp_path.iterdir()) == []


@every_transport
def test_a_slow_receiver_is_waited_for(kind: str, ends: Ends) -> None:
    """The sender is never more than the ring, or one bucket under way and one in the making, ahead."""
    sender, receiver = ends(kind)
    weights, ahead, handed = stream(1), [], 0

    class Counting:
        begun = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(sender, name)

        def bucket(self, tensors: Any) -> None:
            self.begun += 1
            sender.bucket(tensors)

    counting = Counting()
    with in_thread(lambda: weights.send(counting)), receiver.receive() as incoming:
        for tensors in incoming:
            handed += 1
            if handed % 5 == 0:
                time.sleep(0.05)
            ahead.append(counting.begun - handed)
            del tensors
    assert counting.begun == handed == len(weights.sizes)
    assert max(ahead) <= 3


@every_transport
def test_a_receiver_that_fails_is_an_error_on_both_sides(kind: str, ends: Ends) -> None:
    sender, receiver = ends(kind)
    weights = stream()

    def load() -> None:
        with receiver.receive() as incoming:
            next(iter(incoming))["no such weight"]

    with in_thread(lambda: weights.send(sender)) as sent, pytest.raises(KeyError):
        load()
    (error,) = sent
    assert isinstance(error, WeightStreamError)
    assert "version 1 of the weights: a receiver failed (KeyError: 'no such weight'), after" in str(error)
    assert "the model is as it was" in str(error)
    assert (receiver.version, weights.version) == (0, 0)
    with in_thread(lambda: weights.send(sender)) as sent:  # and both go on
        assert_same(take(receiver), streamed(stream()))
    assert (sent, receiver.version) == ([None], 1)


@every_transport
def test_a_block_that_ends_early_makes_no_version(kind: str, ends: Ends) -> None:
    sender, receiver = ends(kind)
    left = "the receiver left the block before it had taken everything, after [01] of"

    def leave() -> None:
        with receiver.receive() as incoming:
            next(iter(incoming))

    with in_thread(lambda: stream().send(sender)) as sent, pytest.raises(WeightStreamError, match=left):
        leave()
    assert "a receiver failed (WeightStreamError: version 1 of the weights: the receiver left" in str(sent[0])
    assert receiver.version == 0


@every_transport
def test_a_sender_that_gives_up_says_why(kind: str, ends: Ends) -> None:
    sender, receiver = ends(kind)
    weights = stream()

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(sender, name)

        def bucket(self, tensors: Any) -> None:
            if "layers.1.norm.weight" in tensors:
                raise MemoryError("no room for a bucket")
            sender.bucket(tensors)

    with in_thread(lambda: weights.send(Failing())) as sent, pytest.raises(WeightStreamError) as caught:
        take(receiver)
    assert re.fullmatch(
        r"version 1 of the weights: the sender gave up \(RuntimeError: MemoryError: no room for a bucket\), after \d+ "
        r"of \d+ buckets; what came is not a version\. Receive a whole one before the engine goes on",
        str(caught.value),
    )
    assert str(sent[0]) == "MemoryError: no room for a bucket"
    assert (receiver.version, weights.version) == (0, 0)


@every_transport
def test_bytes_that_changed_on_the_way_are_refused(kind: str, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends(kind)
    module = sys.modules[type(sender).__module__]
    told = module.bytes_digest
    counted = iter(range(10**6))
    lock = threading.Lock()

    def digest(memory: Tensor) -> int:
        with lock:
            return int(told(memory)) ^ (next(counted) == 4)

    monkeypatch.setattr(module, "bytes_digest", digest)
    with (
        in_thread(lambda: stream().send(sender)) as sent,
        pytest.raises(WeightStreamError, match="the bytes of bucket"),
    ):
        take(receiver)
    assert isinstance(sent[0], WeightStreamError)
    assert receiver.version == 0


@every_transport
def test_a_receiver_that_hangs_is_waited_for_no_longer_than_said(kind: str, ends: Ends) -> None:
    sender, receiver = ends(kind, late=NOW)
    with in_thread(lambda: stream().send(sender)) as sent, suppress(WeightStreamError), receiver.receive() as incoming:
        next(iter(incoming))
        while not sent:
            time.sleep(0.01)
    assert isinstance(sent[0], WeightStreamError)
    assert re.search(r"1 of 1 receivers did not free a slot|the other side is gone or late", str(sent[0]))


@every_transport
def test_a_sender_that_hangs_is_waited_for_no_longer_than_said(kind: str, ends: Ends) -> None:
    sender, receiver = ends(kind, late=NOW)
    weights, go = stream(), threading.Event()

    def hang(tensors: Any) -> None:
        go.wait(SOON)
        raise MemoryError("late")

    class Hanging:
        def __getattr__(self, name: str) -> Any:
            return hang if name == "bucket" else getattr(sender, name)

    with in_thread(lambda: weights.send(Hanging())):
        with pytest.raises(WeightStreamError, match=r"version 1 of the weights: the .* is gone or late \("):
            take(receiver)
        go.set()
    assert receiver.version == 0


# -- shared memory alone -----------------------------------------------------------------------------------------------


def test_several_engines_take_every_version(ends: Ends) -> None:
    sender = ends.sender(receivers=2, timeout=SOON)
    receivers = [ends.receiver(timeout=SOON) for _ in range(2)]
    expected = streamed(stream())
    with in_thread(lambda: stream().send(sender)), in_thread(lambda: take(receivers[0])) as first:
        assert_same(take(receivers[1]), expected)
    assert_same(first[0], expected)


def test_nobody_there_is_said_on_either_side(tmp_path: Path) -> None:
    address = tmp_path / "weights"
    with pytest.raises(WeightStreamError, match=re.escape(f"{address}: no sender listens there; start the trainer")):
        take(SharedMemoryReceiver(address, patience=NOW))
    with (
        SharedMemorySender(address, timeout=NOW, receivers=2) as sender,
        pytest.raises(WeightStreamError, match=r"0 of 2 receivers connected to .* within 0\.3 s; start the others"),
    ):
        stream().send(sender)


JUNK = {
    "no JSON": b"{",
    "no text": b'"\xff"',
    "deep": b"[" * 100_000,
    "no object": b'["kind"]',
    "no kind": b'{"king": "begin"}',
    "another kind": b'{"kind": "began"}',
    "no number": b'{"kind": "begin", "slots": 2}',
    "a text": b'{"kind": "begin", "slots": 2, "slot": "64"}',
    "a reason that is none": b'{"kind": "refused", "why": 3}',
}
UNHEARD = "it said what no sender or receiver of this version says; let both have the same version"


@pytest.mark.parametrize("case", JUNK)
def test_words_that_are_none_are_errors_of_the_stream(case: str, tmp_path: Path) -> None:
    address = tmp_path / "weights"
    head = struct.pack("<QQ", len(JUNK[case]), 0)

    def say(connected: socket.socket, *messages: bytes) -> None:
        with suppress(OSError):  # the other side may have heard enough
            connected.sendall(b"".join(messages))

    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(address))
        listener.listen(1)
        told, accepted = re.escape(f"did not announce a version ({UNHEARD})"), list[socket.socket]()

        def answer() -> None:
            accepted.append(listener.accept()[0])
            say(accepted[0], head, JUNK[case])

        with in_thread(answer), pytest.raises(WeightStreamError, match=told):
            take(SharedMemoryReceiver(address, patience=SOON))
        accepted[0].close()
    hello = b'{"kind": "hello"}'
    with SharedMemorySender(tmp_path / "other", timeout=SOON) as sender, closing(socket.socket(socket.AF_UNIX)) as fake:
        fake.connect(str(tmp_path / "other"))
        say(fake, struct.pack("<QQ", len(hello), 0), hello, head, JUNK[case])
        fake.shutdown(socket.SHUT_WR)
        with pytest.raises(WeightStreamError, match=re.escape(f"a receiver is gone ({UNHEARD})")):
            stream().send(sender)


@pytest.mark.parametrize(
    ("slots", "slot", "files", "off"),
    [(0, 10**6, 1, 0), (-1, 10**6, 1, 0), (2, 64, 1, 0), (2, 10**6, 0, 0), (2, 10**6, 1, 1)],
)
def test_a_ring_that_cannot_hold_the_buckets_is_refused(
    slots: int, slot: int, files: int, off: int, tmp_path: Path
) -> None:
    record = TensorRecord("w", torch.uint8, (1000,))
    behind = Announcement(1, (record,), (1,), {}).to_bytes()
    digest = xxhash.xxh3_64_intdigest(behind) & (2**63 - 1)
    told = json.dumps({"kind": "begin", "slots": slots, "slot": slot, "digest": digest + off}).encode()
    with closing(socket.socket(socket.AF_UNIX)) as listener, open(tmp_path / "ring", "w+b") as ring:  # noqa: PTH123
        ring.truncate(2 * 10**6)
        listener.bind(str(tmp_path / "weights"))
        listener.listen(1)

        accepted: list[socket.socket] = []

        def say() -> None:
            accepted.append(listener.accept()[0])
            head = struct.pack("<QQ", len(told), len(behind))
            sent = socket.send_fds(accepted[0], [head], [ring.fileno()][:files])
            accepted[0].sendall(head[sent:] + told + behind)

        expected = f"{slots} slots of {slot} bytes in {files} files, for buckets of 1024"
        if off:
            expected = "its announcement is not the one that was sent"
        with in_thread(say), pytest.raises(WeightStreamError, match=re.escape(expected)):
            take(SharedMemoryReceiver(tmp_path / "weights", patience=SOON))
        accepted[0].close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "RecursionError: "),
        (b'{"version": 1, "tensors": [], "sizes": [1e999], "json": {}, "base": null}', "OverflowError: "),
        (b'{"version": 1, "tensors": [], "sizes": [1], "json": {}, "base": null}', "of 0 tensors has buckets of 1"),
        (b"{}", "KeyError: 'version'|KeyError: 'tensors'"),
    ],
)
def test_an_announcement_that_is_none_says_what_to_do(data: bytes, words: str) -> None:
    with pytest.raises(
        ValueError, match=f"an announcement.*({words}).*; let sender and receiver have the same version"
    ):
        Announcement.from_bytes(data)


class FakeGroup:
    """A group of two whose other rank sends these numbers and bytes."""

    def __init__(self, *said: Tensor) -> None:
        self.said = list(said)

    def name(self) -> str:
        return "gloo"

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def broadcast(self, tensors: list[Tensor], _: Any) -> Any:
        tensors[0].copy_(self.said.pop(0))
        return self

    def wait(self) -> None:
        """It has come."""


def test_a_group_hears_of_what_has_no_room_and_of_announcements_that_are_none() -> None:
    def numbers(*told: int) -> Tensor:
        return torch.tensor(told, dtype=torch.int64)

    receiver = GroupReceiver(FakeGroup(numbers(0, 2**60, 0)))
    with pytest.raises(
        WeightStreamError, match=rf"a message of weights has {2**60} bytes, and there is no room for it"
    ):
        take(receiver)
    text, digest = torch.tensor(list(b"{}"), dtype=torch.uint8), xxhash.xxh3_64_intdigest(b"{}") & (2**63 - 1)
    receiver = GroupReceiver(FakeGroup(numbers(0, 2, digest + 1), text))
    with pytest.raises(WeightStreamError, match="2 bytes that came are not those that were sent"):
        take(receiver)
    receiver = GroupReceiver(FakeGroup(numbers(0, 2, digest), text))
    with pytest.raises(
        WeightStreamError, match=r"did not announce a version \(an announcement of weights cannot be read"
    ):
        take(receiver)
    with pytest.raises(WeightStreamError, match="the group is broken since an earlier error"):
        take(receiver)
    digest = xxhash.xxh3_64_intdigest(b"\xff") & (2**63 - 1)
    receiver = GroupReceiver(FakeGroup(numbers(3, 1, digest), torch.tensor([255], dtype=torch.uint8)))
    with pytest.raises(WeightStreamError, match=r"it gave up \(\ufffd\)"):
        take(receiver)


def test_an_address_is_taken_once_and_left_behind_by_the_dead(tmp_path: Path) -> None:
    address = tmp_path / "weights"
    with SharedMemorySender(address), pytest.raises(FileExistsError, match="another sender listens there"):
        SharedMemorySender(address)
    assert not address.exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(address))
    dead.close()
    SharedMemorySender(address).close()
    with pytest.raises(ValueError, match="longer than the 100 bytes that a socket's path may have"):
        SharedMemorySender(tmp_path / ("x" * 100))
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path / 'no'}: no such directory; create it first")):
        SharedMemorySender(tmp_path / "no" / "weights")
    address.write_text("mine")
    with pytest.raises(FileExistsError, match="weights exists already, and is no socket; choose another address"):
        SharedMemorySender(address)
    assert address.read_text() == "mine"


@pytest.mark.parametrize("option", ["receivers", "slots", "timeout"])
def test_numbers_that_would_wait_for_ever_or_for_nobody_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"SharedMemorySender: {option}=0, expected a positive number"):
        SharedMemorySender(tmp_path / "weights", **{option: 0})
    assert not list(tmp_path.iterdir())


def test_a_group_without_a_peer_is_refused() -> None:
    for made in (GroupSender, GroupReceiver):
        with pytest.raises(ValueError, match=f"{made.__name__}: group=None is no process group that this rank is in"):
            made(None)
    port = free_port()
    alone = join_group(f"127.0.0.1:{port}", 0, 1, timeout=SOON)
    with pytest.raises(ValueError, match=r"GroupSender: there is nobody else in the group; it needs the receivers, to"):
        GroupSender(alone)
    with pytest.raises(ValueError, match=r"GroupReceiver: sender=0 is this rank itself; expected the sender's rank"):
        GroupReceiver(alone)
    for rank, ranks in ((2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"join_group: rank={rank} of ranks={ranks}; expected a rank from 0 to 1"):
            join_group(f"127.0.0.1:{port}", rank, ranks, timeout=NOW)


def test_a_receiver_that_was_lost_may_come_back(ends: Ends) -> None:
    sender, receiver = ends("shared memory")

    def lose() -> None:
        with suppress(WeightStreamError), receiver.receive() as incoming:
            next(iter(incoming))
            receiver.close()

    with in_thread(lambda: stream().send(sender)) as sent:
        lose()
    assert "a receiver is gone" in str(sent[0])
    with in_thread(lambda: stream().send(sender)) as sent:
        assert_same(take(receiver), streamed(stream()))
    assert sent == [None]


# -- processes that are killed -----------------------------------------------------------------------------------------

OTHER = """
import os, signal, sys
from tests.dcp_adapters.streams import test_transports as here
from dcp_adapters import *
kind, role, address = sys.argv[1:]
if kind == "shared memory":
    end = SharedMemorySender(address) if role == "sender" else SharedMemoryReceiver(address)
else:
    group = join_group(address, 0 if role == "sender" else 1, 2)
    end = GroupSender(group) if role == "sender" else GroupReceiver(group)

class Dying:
    taken = 0
    def __getattr__(self, name):
        return getattr(end, name)
    def bucket(self, tensors):
        self.taken += 1
        if self.taken == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        end.bucket(tensors)

if role == "sender":
    here.stream().send(Dying())
with end.receive() as weights:
    for number, _ in enumerate(weights):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def other_process(*arguments: str) -> Iterator[None]:
    """A process that kills itself in the middle of a version."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([sys.executable, "-c", OTHER, *arguments], env=environment, cwd=REPO)
    try:
        yield
        assert other.wait(SOON) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait()


LONG = 90.0  # the other process imports torch first


# Another process imports torch: in `make test` each end dies once, and each transport has a dead end.
@sampled("kind", TRANSPORTS, ["shared memory"])
def test_the_death_of_the_sender_is_an_error(kind: str, ends: Ends) -> None:
    address = str(ends.address) if kind == "shared memory" else f"127.0.0.1:{free_port()}"
    with other_process(kind, "sender", address):
        if kind == "shared memory":
            receiver: Any = ends.receiver(timeout=LONG, patience=LONG)
        else:
            receiver = GroupReceiver(join_group(address, 1, 2, timeout=LONG), timeout=LONG, patience=LONG)
        with pytest.raises(WeightStreamError, match=r"version 1 .* is gone or late.*, after [23] of \d+ buckets; what"):
            take(receiver)
        assert receiver.version == 0


@sampled("kind", TRANSPORTS, ["process group"])
def test_the_death_of_the_receiver_is_an_error(kind: str, ends: Ends) -> None:
    address = str(ends.address) if kind == "shared memory" else f"127.0.0.1:{free_port()}"
    with other_process(kind, "receiver", address):
        if kind == "shared memory":
            sender: Any = ends.sender(timeout=LONG)
        else:
            sender = GroupSender(join_group(address, 0, 2, timeout=LONG), timeout=LONG)
        weights = stream()
        with pytest.raises(WeightStreamError, match=r"version 1 .* is gone.*; the model is as it was"):
            weights.send(sender)
        assert weights.version == 0


# -- two trainer ranks -------------------------------------------------------------------------------------------------


def _trainer_and_engine(path: str) -> str:
    """Ranks 0 and 1 train; a thread of rank 0 stands for the engine."""
    model = sharded(quantized("nvfp4"))
    weights = WeightStream(model, config=CONFIG, bucket_bytes=3000)
    if dist.get_rank() == 1:
        weights.send(None)
        with pytest.raises(WeightStreamError, match="a receiver failed") as caught:
            weights.send(None)
        assert weights.version == 1
        return str(caught.value)
    found: list[Any] = []

    def engine() -> None:
        with SharedMemoryReceiver(f"{path}/weights", timeout=SOON) as receiver:
            found.append(take(receiver))
            with receiver.receive() as incoming:
                next(iter(incoming))

    with SharedMemorySender(f"{path}/weights", timeout=SOON) as sender, in_thread(engine) as ended:
        weights.send(sender)
        with pytest.raises(WeightStreamError, match="a receiver failed") as caught:
            weights.send(sender)
    assert isinstance(ended[0], WeightStreamError)
    assert found[0].keys() == {each.name for each in weights.metadata()}
    assert weights.version == 1
    return str(caught.value)


def test_all_trainer_ranks_hear_of_an_engine_that_failed(tmp_path: Path) -> None:
    first, second = run_ranks(2, _trainer_and_engine, str(tmp_path))
    assert first == second
