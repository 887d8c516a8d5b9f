"""Every question to a GPU has an answer on a CPU, with tiny sizes; every aim names a row and a figure that exist."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.gpu import asking, linear, memory, optimizer, step
from benchmarks.gpu.question import FULL, TINY, Row
from benchmarks.gpu.table import of_aims, of_question
from tests.sampling import sampled

ON_CUDA_ALONE = {"peak GB", "rest GB"}
# One of each kind: the others differ in their recipes alone, which other tests go through.
SOME = ("bf16", "nvfp4 row", "float8 tensor, products", "torchao tensorwise, fp8 gather", "mxfp8 row, high_precision")


def answered(name: str) -> tuple[Any, list[Row]]:
    question = importlib.import_module(f"benchmarks.gpu.{name}")
    rows: list[Row] = []
    asking.rows_within(question, TINY, 600, rows.append)
    assert [row.told() for row in rows if row.error] == []
    assert len({row.what for row in rows}) == len(rows)
    return question, rows


# seconds each; the others ask in the same way
@sampled("name", [name for name in asking.QUESTIONS if name not in ("gpu_tests", "step")], kept=["kernels", "linear"])
def test_every_question_is_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "WAYS", {way: optimizer.WAYS[way] for way in ("fused", "compressed")})
    monkeypatch.setattr(memory, "CONTENDERS", dict(kinds_of_contenders()))
    question, rows = answered(name)
    assert question.SECONDS > 0
    assert all(row.figures or row.skipped for row in rows)
    for aim in question.AIMS:
        assert aim.value(rows) is not None or aim.over or aim.figure == "launches", aim
        assert {aim.row, aim.over or aim.row} <= {row.what for row in rows}, aim
    assert len(of_aims({name: rows}, {name: question.AIMS})) == 2 + len(question.AIMS)
    assert len(of_question(rows)) == 2 + len(rows)


def kinds_of_contenders() -> Iterator[tuple[str, memory.Contender]]:
    """Those that aims name, and one recipe with all kinds of states; those of libraries compile."""
    named = {name for aim in memory.AIMS for name in (aim.row, aim.over)}
    for name, contender in memory.CONTENDERS.items():
        if not contender.library and (name in named or name.startswith(("bf16", next(iter(memory.RECIPES))))):
            yield name, contender


@pytest.mark.full  # it compiles
@pytest.mark.filterwarnings("ignore")  # torch's compiler and torchao warn; benchmarks run as users' scripts do
def test_a_step_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [f"{name}{said}" for name in step.CONTENDERS for said in ("", step.COMPILED)]
    for aim in step.AIMS:
        assert {aim.row, aim.over or aim.row} <= set(every), aim
    monkeypatch.setattr(step, "CONTENDERS", {name: step.CONTENDERS[name] for name in SOME})
    _, rows = answered("step")
    assert len(rows) == 2 * len(SOME)
    assert {aim.figure for aim in step.AIMS} <= {title for row in rows for title in row.figures} | ON_CUDA_ALONE
    assert all(row.figures["tokens/s"] > 0 for row in rows)


def test_the_sizes_are_those_of_llama_3_8b() -> None:
    assert FULL.shapes == [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)]
    assert FULL.sequences * FULL.tokens == 8192
    assert len(FULL.shapes) * FULL.layers == 28


def test_what_the_host_takes_beyond_bf16_is_a_difference() -> None:
    rows = list(linear.rows(TINY))
    dense = {row.what: row.figures["host us"] for row in rows if row.what.startswith(linear.DENSE)}
    few = next(row for row in rows if row.what == "mxfp8 row").figures
    assert few[linear.MORE] == pytest.approx(few["host us"] - dense[linear.DENSE], abs=0.1)
