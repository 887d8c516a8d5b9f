"""docs/memory.md says what was measured: its tables are those of the result that it shows."""

from __future__ import annotations

import json
import re

from benchmarks import memory
from benchmarks.memory_contenders import CONTENDERS
from tests.docs.pages import REPO, page

TEXT = page("memory.md").text
(SHOWN,) = re.findall(r"\(\.\./(benchmarks/results/\S+)-memory\.png\)", TEXT)
FOUND = json.loads((REPO / f"{SHOWN}.json").read_text())["memory"]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(tuple(f"| {name} |" for name in CONTENDERS))]


def test_the_tables_are_those_of_the_result() -> None:
    measured = rows(memory.markdown(FOUND))
    assert len(measured) == 2 * len(FOUND["contenders"]) >= 20
    assert rows(TEXT) == measured


def test_pages_and_allocator_are_as_near_as_the_page_says() -> None:
    (percent,) = re.findall(r"and are within ([\d.]+) % of the allocator's peak", " ".join(TEXT.split()))
    off = [abs(of["process"]["peak"] / of["model"]["peak"] - 1) for of in FOUND["contenders"].values()]
    assert max(off) <= float(percent) / 100
