"""Every public name shows its use: the section Example of its docstring, which runs here as a doctest does.

An example runs behind the lines that docs/api/qtensor.md shows (SETUP), in one process with a process group of its own,
in an empty directory. What it shows as output is compared; a line that shows none may have any.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_adapters import SharedMemoryReceiver, SharedMemorySender, WeightStream
from qtensor import MXFP8BlockScaling, quantize
from tests.docs.messages import PACKAGES
from tests.docs.pages import page
from tests.ranks import run_ranks

SETUP = next(block.text for block in page("api/qtensor.md").python if "import *" in block.text)
WITHOUT = {  # public name: why it has no example
    "dcp_adapters.Skipped": "is handed out with a warning, by latest_verified and keep_latest, for a damaged save",
    "dcp_adapters.WeightStreamError": "an error of a transport, whose text says what to do",
    "layerwise.LinearErrors": "what search_formats hands to on_event",
}
NOT_RUN = {  # public name: why its example is only compiled
    "dcp_adapters.GroupReceiver": "needs a second process; docs/engines.md runs both ends",
    "dcp_adapters.GroupSender": "needs a second process; docs/engines.md runs both ends",
    "dcp_adapters.join_group": "needs a second process; docs/engines.md runs both ends",
    **dict.fromkeys(
        ("dcp_adapters.adopt", "dcp_adapters.release", "dcp_adapters.AdoptionReport", "dcp_adapters.AdoptedWeight"),
        "needs a model that another library quantized; tests/docs/test_coming_from.py runs the pages of these",
    ),
    "dcp_adapters.export_gguf": "needs a GGUF file of the same model; tests/dcp_adapters/gguf runs it",
    "dcp_adapters.vllm_source": "needs vLLM; tests/dcp_adapters/streams/test_vllm_source.py calls it",
}
PUBLIC = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
SECTION = re.compile(r"^Example:\n {4}```python\n(?P<code>(?: {4}.*\n)+?) {4}```$", re.MULTILINE)


def example(name: str) -> str:
    """The code of a public name's example, "" for none."""
    package, _, short = name.partition(".")
    docstring = inspect.cleandoc(getattr(importlib.import_module(package), short).__doc__ or "")
    (code,) = SECTION.findall(docstring + "\n") or [""]
    return textwrap.dedent(code)


class Shown(doctest.OutputChecker):
    """Compares what an example shows, and nothing where it shows nothing."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def ran(code: str, name: str) -> list[str]:
    """Runs an example, and returns what went wrong."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SETUP, "SETUP", "exec"), names)
    wrong: list[str] = []
    test = doctest.DocTestParser().get_doctest(code, names, name, None, 0)
    doctest.DocTestRunner(Shown()).run(test, out=wrong.append)
    return wrong


# -- engines, as threads ---------------------------------------------------------------------------------------------


def _send() -> None:
    state = {"up.weight": quantize(torch.ones(4, 64), MXFP8BlockScaling())}
    with SharedMemorySender("weights.socket") as sender:
        WeightStream(state, config={"model_type": "mine"}, no_dist=True).send(sender)


def _receive() -> None:
    with SharedMemoryReceiver("weights.socket") as receiver, receiver.receive() as weights:
        assert [*weights]


BESIDE: dict[str, Callable[[], object]] = {  # public name: what runs meanwhile, as the process at the other end
    "dcp_adapters.Incoming": _send,
    "dcp_adapters.SharedMemoryReceiver": _send,
    "dcp_adapters.SharedMemorySender": _receive,
}


def _examples(directory: Path) -> list[str]:
    """On one rank: every example in a directory of its own, since many name `step-1000`."""
    wrong = []
    for name in PUBLIC:
        if name in {*WITHOUT, *NOT_RUN}:
            continue
        (directory / name).mkdir()
        with contextlib.chdir(directory / name), ThreadPoolExecutor() as threads:
            other = threads.submit(BESIDE.get(name, int))
            wrong += ran(example(name), name)
            other.result()
    return wrong


def test_every_public_name_has_an_example_or_a_reason() -> None:
    assert {name for name in PUBLIC if not example(name)} == {*WITHOUT}
    assert {*NOT_RUN} <= {*PUBLIC}


@pytest.mark.slow
def test_the_examples_run(shared_tmp_path: Path) -> None:
    (wrong,) = run_ranks(1, _examples, shared_tmp_path, timeout=250)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NOT_RUN)
def test_those_that_are_not_run_compile(name: str) -> None:
    for one in _statements(example(name)):
        compile(one, name, "single")


def _statements(code: str) -> Iterator[str]:
    parsed = doctest.DocTestParser().get_examples(code)
    assert parsed
    yield from (one.source for one in parsed)


def test_an_example_that_shows_what_is_not_so_is_found() -> None:
    assert not ran(">>> 1 + 1\n>>> 1 + 2\n3\n", "right")
    assert "Got:\n    3" in "".join(ran(">>> 1 + 2\n4\n", "wrong"))
    assert "NameError" in "".join(ran(">>> nobody\n", "raises"))
