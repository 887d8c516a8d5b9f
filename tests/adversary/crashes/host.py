"""The process in which scenarios run: it has the recorder preloaded. `Host` is its other end.

It answers (module, seed) with (word, counts, ""), or with a traceback. What torch logs of errors that are meant is left
out, since the traceback tells more.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from tests.adversary.attack import Found
from tests.adversary.crashes.tape import environment, seed_names

REPO = Path(__file__).resolve().parents[3]
MEMORY = Path("/dev/shm")  # a file system in memory, where there is one: an fsync costs nothing
LONGEST = 600.0  # seconds of a scenario


class Host:
    """Runs scenarios of one module, and adds up what they tell of themselves."""

    def __init__(self, module: str) -> None:
        self.module, self.counts = module, Counter[str]()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Host:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        told = ", ".join(f"{number} {what}" for what, number in sorted(self.counts.items()))
        sys.stderr.write(f"{self.module.rpartition('.')[2]}: {told}\n")

    def run(self, seed: int) -> str:
        """The word for the scenario of a seed."""
        assert self.process is not None, "the attack runs inside `held`"
        try:
            self.connection.send((self.module, seed))
            if not self.connection.poll(LONGEST):
                raise Found(f"the scenario took more than {LONGEST:.0f} s")
            word, counts, trace = self.connection.recv()
        except (Found, OSError, EOFError) as error:
            status = self.process.poll()
            self._stop()
            self._start()
            raise Found(f"the process of the scenario ended or hung (status {status}): {error!r}") from error
        self.counts.update(counts)
        if trace:
            raise Found(trace)
        return str(word)

    def _start(self) -> None:
        own, other = socket.socketpair()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({other.fileno()})"]
        self.process = subprocess.Popen(
            command, pass_fds=[other.fileno()], env=environment(), cwd=REPO, stderr=subprocess.DEVNULL
        )
        other.close()
        self.connection = Connection(own.detach())

    def _stop(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.wait()
            self.process = None


def serve(descriptor: int) -> None:
    """Answer until the other end is closed."""
    connection = Connection(descriptor)
    base = Path(tempfile.mkdtemp(prefix="adversary-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)).resolve()
    try:
        while True:
            module, seed = connection.recv()
            seed_names(seed)
            try:
                told = importlib.import_module(module).scenario(seed, base / "scene")
                connection.send((told.word, told.counts, ""))
            except BaseException:
                connection.send(("", {}, traceback.format_exc()))
    except EOFError:
        pass
    finally:
        shutil.rmtree(base, ignore_errors=True)
