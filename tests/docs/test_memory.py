"""docs/memory.md says what was measured: its tables are those of the result that it shows."""

from __future__ import annotations

import json
import re

from benchmarks import memory
from benchmarks.memory_contenders import CONTENDERS
from tests.docs.pages import REPO, page

WHOLE = page("memory.md").text
# one table is of another, shorter run, which its text links to
(OF_HALF,) = re.findall(r"Of \[a block of half the width\].*?(?=No GPU has been asked)", WHOLE, re.DOTALL)
(HALF,) = re.findall(r"\(\.\./(benchmarks/results/\S+)\.md\)", OF_HALF)
TEXT = WHOLE.replace(OF_HALF, "")
(SHOWN,) = re.findall(r"\(\.\./(benchmarks/results/\S+)-memory\.png\)", TEXT)
FOUND = json.loads((REPO / f"{SHOWN}.json").read_text())["memory"]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(tuple(f"| {name} |" for name in CONTENDERS))]


def test_the_tables_are_those_of_the_result() -> None:
    measured = rows(memory.markdown(FOUND))
    assert len(measured) == 2 * len(FOUND["contenders"]) >= 20
    assert rows(TEXT) == measured


def test_the_table_with_host_memory_is_that_of_its_result() -> None:
    found = json.loads((REPO / f"{HALF}.json").read_text())
    assert found["command"] == "python -m benchmarks memory"
    measured = {
        row.split(" | ")[0]: row.strip("|").split(" | ") for row in rows(memory.markdown(found["memory"]))[::-1]
    }
    shown = [row.strip("|").split(" | ") for row in rows(OF_HALF)]
    assert sum("on the host" in row[0] for row in shown) == 5
    for row in shown:
        of = measured[f"|{row[0]}"]  # of linears alone, whose table comes first
        assert row == [*of[:4], *of[10:]]


def test_pages_and_allocator_are_as_near_as_the_page_says() -> None:
    (percent,) = re.findall(r"and are within ([\d.]+) % of the allocator's peak", " ".join(TEXT.split()))
    off = [abs(of["process"]["peak"] / of["model"]["peak"] - 1) for of in FOUND["contenders"].values()]
    assert max(off) <= float(percent) / 100
