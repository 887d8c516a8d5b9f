"""Processes that take turns: each waits in front of every file operation until it is told to go on.

So a history is a list of choices, and the same choices give the same history. Runs where the recorder is preloaded.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.adversary.crashes import tape
from tests.adversary.crashes.tape import State

KILLED = "killed"
LONGEST = 10_000  # characters of an error: a pipe takes 64 KB before it blocks


@dataclass
class Actor:
    """A process. begun, ended: steps of the stage. outcome: what it returned, an exception's text, or KILLED."""

    kind: str
    number: int
    process: int
    pipe: int
    begun: int
    value: Any = None  # of a saver: what it saves
    ended: int | None = None
    outcome: Any = None
    raised: str | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None

    @property
    def well(self) -> bool:
        """Whether it came to its end without an error."""
        return self.done and self.raised is None and self.outcome != KILLED


@dataclass
class Stage:
    """Who is on it, in the order they came. Open it inside `Tape.watching`."""

    draw: random.Random
    step: int = 0
    actors: list[Actor] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def __enter__(self) -> Stage:
        tape.gate(on=True)
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.acting:
            self.kill(actor)
        tape.gate(on=False)

    @property
    def acting(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.done]

    @property
    def full(self) -> bool:
        return len(self.actors) == tape.ACTORS

    def enter(self, kind: str, part: Callable[[], Any], value: Any = None) -> Actor:
        """Fork a process that does its part, up to its first file operation."""
        number = len(self.actors)
        read, write = os.pipe()
        process = os.fork()
        if not process:
            _act(number, part, write)
        os.close(write)
        actor = Actor(kind, number, process, read, self.step, value)
        self.actors.append(actor)
        self.told.append(f"{self.step}: {kind} {value if value is not None else ''} begins as {number}")
        tape.arrived()
        self._look(actor)
        return actor

    def go(self, actor: Actor) -> None:
        """One operation."""
        self.step += 1
        self.told.append(f"{self.step}: {actor.number} {tape.asked(actor.number).rpartition('/')[2]}")
        tape.grant(actor.number)
        self._look(actor)

    def play(
        self,
        enter: Callable[[], object],
        entries: int = 0,
        *,
        comes: float = 0.0,
        dies: float,
        until: int | None = None,
    ) -> None:
        """Let one after the other act, until nobody is left or the power goes.

        Args:
            enter: lets the next actor in, or nobody; asked `entries` times.
            entries: see enter.
            comes: the chance of that in front of a step, while others act.
            dies: the chance that somebody is killed instead of a step.
            until: the step of the power loss, if there is one.
        """
        while (entries or self.acting) and self.step != until:
            if entries and (not self.acting or self.draw.random() < comes):
                entries -= 1
                enter()
            elif self.acting and self.draw.random() < dies:
                self.kill(self.draw.choice(self.acting))
            elif self.acting:
                self.go(self.draw.choice(self.acting))

    @property
    def killed(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.outcome == KILLED]

    def kill(self, actor: Actor) -> None:
        """End it in front of its next operation."""
        os.kill(actor.process, signal.SIGKILL)
        os.waitpid(actor.process, 0)
        os.close(actor.pipe)
        actor.ended, actor.outcome = self.step, KILLED
        self.told.append(f"{self.step}: {actor.kind} {actor.number} is killed")

    def _look(self, actor: Actor) -> None:
        if tape.state(actor.number) is not State.DONE:
            return
        with os.fdopen(actor.pipe, "rb") as stream:
            actor.outcome, actor.raised = pickle.loads(stream.read())
        os.waitpid(actor.process, 0)
        actor.ended = self.step
        self.told.append(f"{self.step}: {actor.kind} {actor.number} ends: {actor.raised or actor.outcome}"[:400])


def _act(number: int, part: Callable[[], Any], pipe: int) -> None:
    """In the fork; never returns."""
    with suppress(BaseException):
        tape.become_actor(number)
        try:
            told: tuple[Any, str | None] = (part(), None)
        except BaseException as error:
            told = (None, f"{type(error).__name__}: {error}"[:LONGEST])
        os.write(pipe, pickle.dumps(told))
        os.close(pipe)
        tape.leave_stage()
    os._exit(0)
