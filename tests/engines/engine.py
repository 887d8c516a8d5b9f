"""An engine to test with: starts tests/engines/vllm_process.py in the environment that has vLLM, and asks it."""

from __future__ import annotations

import os
import subprocess
import threading
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Self

import torch

from tests.engines.messages import from_bytes, to_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
STAMP = PYTHON.parent.parent / ".installed"
TORCH = "2.13.0"  # which vLLM's build is for; products are compared bit for bit
START = 300.0  # seconds; vLLM imports for a minute where others keep the cores busy
ANSWER = 240.0


def unavailable() -> str:
    """Why no engine can be tested here; "" where it can."""
    if not STAMP.exists():
        return "no environment with vLLM: `make test-engines` builds it, in .venv-engines"
    here = torch.__version__.partition("+")[0]
    return "" if here == TORCH else f"vLLM has torch {TORCH}, this is {here}: products of another torch may differ"


class EngineError(RuntimeError):
    """What vLLM raised, as text."""


class Engine:
    """vLLM in a process of its own. Each method is a function of tests/engines/vllm_process.py."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "vllm.log"
        address = str(directory / "link")
        with Listener(address, "AF_UNIX") as listener, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "tests.engines.vllm_process", address],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._link = self._accepted(listener)

    def _accepted(self, listener: Listener) -> Connection:
        """The connection; accept() itself has no timeout."""
        found: list[Connection] = []
        waiting = threading.Thread(target=lambda: found.append(listener.accept()), daemon=True)
        waiting.start()
        for _ in range(int(START)):
            waiting.join(1)
            if found or self.process.poll() is not None:
                break
        if not found:
            self.process.kill()
            raise EngineError(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")
        return found[0]

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any, **options: Any) -> Any:
            self.tell(name, *args, **options)
            return self.answer()

        return ask

    def tell(self, name: str, *args: Any, **options: Any) -> None:
        """Ask, and go on meanwhile."""
        self._link.send_bytes(to_bytes((name, args, options)))

    def answer(self) -> Any:
        """What came of it."""
        if not self._link.poll(ANSWER):
            self.process.kill()
            raise EngineError(f"vLLM did not answer within {ANSWER} s:\n{self.log.read_text()[-3000:]}")
        try:
            value, error = from_bytes(self._link.recv_bytes())
        except EOFError:
            raise EngineError(f"vLLM died:\n{self.log.read_text()[-3000:]}") from None
        if error is not None:
            raise EngineError(error)
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
