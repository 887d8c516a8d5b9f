"""A round of the soak with a weight stream: trainers send versions to a receiver, and one of them all is killed.

version 1                            whole, by WeightStream.send
versions 2, 3, ..                    what changed, by send_since; the receiver applies the delta
SIGKILL the receiver or trainers     after a random share of a usual stream's duration
the others must end by themselves    with an error that says so
a receiver that is left              holds a version, to the byte: the last that was accepted, or the one under way
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak_jobs import GROUP_TIMEOUT, Job, Receive, Send
from benchmarks.soak_processes import MARGIN, START_TIMEOUT, Rank, begun, done, gone, ranks_of, until

VERSIONS = 6
TRAINERS = (1, 2)


@dataclass
class Streams:
    """The rounds of one soak. count, fail: where it takes its counts and failures. usual: seconds of a whole stream."""

    context: Any
    directory: Path
    random: random.Random
    count: Callable[..., None]
    fail: Callable[[str, str], None]
    usual: float = 0.5
    calls: int = 0

    def round(self) -> bool:
        """One stream with a fault; whether somebody was killed in time."""
        self.calls += 1
        trainers = self.random.choice(TRAINERS)
        receiver = trainers  # its place among the ranks
        victims = self.random.choice(((receiver,), (0,), (trainers - 1,), tuple(range(trainers))))
        share = self.random.random()
        address = self.directory / f"stream-{self.calls}"
        send, receive = Send(address=address, versions=VERSIONS), Receive(address=address, versions=VERSIONS)
        name = f"stream, {trainers} trainers, ranks {victims} die after {share:.2f}"
        jobs: list[Job] = [send] * trainers
        with ranks_of(self.context, [*jobs, receive], self.directory / f"stream-store-{self.calls}") as ranks:
            if not until(ranks, lambda rank: begun(rank) or rank.ended, START_TIMEOUT):
                self.fail(name, "the ranks did not get to the stream")
                return False
            until(ranks, done, share * self.usual)
            for rank in ranks:
                rank.read()
            killed = [rank for rank in (ranks[number] for number in victims) if not done(rank)]
            for rank in killed:
                rank.kill()
            if not until(ranks, gone, GROUP_TIMEOUT + MARGIN):
                self.fail(name, "a rank hung")
            self._judge(ranks[:trainers], ranks[receiver], killed, name)
        address.unlink(missing_ok=True)
        return bool(killed)

    def _judge(self, trainers: list[Rank], receiver: Rank, killed: list[Rank], name: str) -> None:
        for number, rank in enumerate([*trainers, receiver]):
            if rank not in killed and (rank.outcome is None or not done(rank)):
                self.fail(name, f"rank {number} died unasked: {rank.outcome}")
        wrong = [value for kind, value in receiver.said if kind == "wrong"]
        if wrong:
            self.fail(name, f"the receiver holds other bytes than were sent: {wrong[0]}")
        sent, came = _last(trainers[0]), _last(receiver)
        if sent > came + 1 or (receiver not in killed and came not in (sent, sent + 1)):
            self.fail(name, f"{sent} versions were accepted, and the receiver holds version {came}")
        self.count("streams", "versions received whole", min(came, 1))
        self.count("streams", "versions received as deltas", max(came - 1, 0))
        if not killed:
            seconds = [float(rank.outcome[1]) for rank in trainers if rank.outcome and rank.outcome[0] == "streamed"]
            if not seconds or came != VERSIONS:
                self.fail(name, f"a stream that nobody interrupted came to version {came}: {trainers[0].outcome}")
            self.usual += (max(seconds, default=self.usual) - self.usual) / 4
            self.count("streams", "done before the kill")
            return
        everyone = "all trainers" if len(killed) == len(trainers) else "one trainer"
        self.count("killed in a stream", "the receiver" if receiver in killed else everyone)
        for rank in (rank for rank in [*trainers, receiver] if rank not in killed and rank.outcome):
            self.count("others in a stream", rank.outcome[0])


def _last(rank: Rank) -> int:
    return max((int(value) for kind, value in rank.said if kind == "version"), default=0)
