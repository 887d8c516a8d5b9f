"""Bytes are measured, not computed: meters tell allocations whose size is known, and steps whose bytes are known."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from benchmarks import memory, memory_contenders
from benchmarks.allocations import RETURNED, Meter, OfAllocator, OfCuda, OfProcess, held, meter_for
from benchmarks.live_storages import LiveStorages
from benchmarks.memory_contenders import CONTENDERS, Contender
from benchmarks.memory_process import of_contender
from benchmarks.memory_step import PARTS, Size, figures, measure
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize

MIB = 2**20
TINY = Size(hidden=64, inner=128, groups=2, vocabulary=96, tokens=8)
KEPT: list[Tensor] = []


def of_bytes(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    KEPT.clear()


def told(act: Callable[[], object]) -> tuple[int, int]:
    """Bytes alive after a call, and at most while it ran."""
    with OfAllocator() as meter:
        meter.mark("before")
        act()
        meter.mark("it")
    return meter.alive["it"] - meter.alive["before"], meter.peak["it"] - meter.alive["before"]


def test_a_tensor_that_is_alive_counts() -> None:
    assert told(lambda: KEPT.append(of_bytes(MIB))) == (MIB, MIB)


def test_one_that_was_freed_counts_for_the_peak() -> None:
    assert told(lambda: of_bytes(MIB)) == (0, MIB)


def test_a_temporary_inside_of_an_operation_counts() -> None:
    """`median` copies its input; a dispatch mode, which is told of results, does not see that."""
    values = torch.zeros(MIB // 4)
    alive, peak = told(lambda: KEPT.append(values.median()))
    assert MIB <= peak <= MIB + 64
    assert alive <= 64
    with LiveStorages() as live:
        values.median()
    assert live.peak <= 64


def test_a_buffer_inside_of_compiled_code_counts() -> None:
    def twice(a: Tensor) -> Tensor:
        return (a @ a) @ a

    matrix, compiled = torch.zeros(256, 256), torch.compile(twice)
    compiled(matrix)
    assert told(lambda: KEPT.append(compiled(matrix))) == (matrix.nbytes, 2 * matrix.nbytes)


def test_a_view_adds_nothing() -> None:
    tensor = of_bytes(MIB)
    assert told(lambda: KEPT.extend([tensor[4:], tensor.view(-1, 4).t()])) == (0, 0)


def test_a_storage_that_two_share_counts_once_and_until_both_are_gone() -> None:
    with OfAllocator() as meter:
        one = of_bytes(MIB)
        other = one.detach()
        meter.mark("both")
        del one
        meter.mark("other")
        del other
        meter.mark("none")
    assert list(meter.alive.values()) == [MIB, MIB, 0]


def test_a_storage_that_grows_counts_as_it_is() -> None:
    def grow() -> None:
        KEPT[0].untyped_storage().resize_(2 * MIB)

    with OfAllocator() as meter:
        KEPT.append(of_bytes(MIB))
        meter.mark("made")
        grow()
        meter.mark("grown")
    assert meter.alive == {"made": MIB, "grown": 2 * MIB}


def test_a_peak_is_that_of_its_stretch() -> None:
    with OfAllocator() as meter:
        of_bytes(2 * MIB)
        meter.mark("first")
        of_bytes(MIB)
        meter.mark("second")
    assert meter.peak == {"first": 2 * MIB, "second": MIB}


def test_blocks_after_each_other_do_not_mix() -> None:
    """Pieces of one block that are freed behind it are not the next one's."""
    for _ in range(3):
        assert told(lambda: KEPT.append(of_bytes(MIB))) == (MIB, MIB)
        KEPT.clear()
        KEPT.append(of_bytes(4 * MIB))
        KEPT.clear()


def test_an_error_in_a_block_is_told_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"), OfAllocator():
        raise KeyError("mine")


PAGES = """
import torch
from benchmarks.allocations import OfProcess
MIB = 2**20
with OfProcess() as meter:
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    meter.mark("made")
    torch.ones(128 * MIB, dtype=torch.uint8)
    meter.mark("freed")
    view = kept[1:]
    meter.mark("viewed")
    del kept, view
    meter.mark("none")
for of in (meter.alive, meter.peak):
    print(" ".join(str(round(of[name] / MIB)) for name in ("made", "freed", "viewed", "none")))
"""


@pytest.mark.skipif(not OfProcess.can(), reason="needs Linux's /proc and glibc")
def test_pages_of_a_process_tell_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PAGES],
        env={**os.environ, **RETURNED},
        cwd=memory.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    alive, peak = ([int(each) for each in line.split()] for line in done.stdout.splitlines())
    assert alive == pytest.approx([64, 64, 64, 0], abs=3)
    assert peak == pytest.approx([64, 192, 64, 64], abs=3)


def test_of_a_gpu_torchs_own_figures_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        now, most = 100, 100

        def take(self, count: int) -> None:
            self.now += count
            self.most = max(self.most, self.now)

        def again(self) -> None:
            self.most = self.now

    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gpu.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu.most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.again)
    with OfCuda() as meter:
        gpu.take(50)
        meter.mark("made")
        gpu.take(20)
        gpu.take(-20)
        meter.mark("freed")
    assert (meter.alive, meter.peak) == ({"made": 50, "freed": 50}, {"made": 50, "freed": 70})
    assert type(meter_for("cuda")) is OfCuda
    assert type(meter_for("cpu")) is OfAllocator


def test_storages_count_once_and_tensors_made_of_others_by_theirs() -> None:
    tensor = of_bytes(64)
    seen: set[int] = set()
    assert held([tensor, tensor[3:], tensor.view(8, 8)], seen) == 64
    assert held([tensor.detach(), 1.0, None], seen) == 0
    assert held([of_bytes(0), of_bytes(0)]) == 0
    q = quantize(torch.ones(32, 64), MXFP8BlockScaling())
    assert held([nn.Parameter(q), q.detach()]) == sum(part.nbytes for part in q.parts().values()) == 32 * 64 + 64


KNOWN = {  # bytes a parameter: weights, masters, moments, gradients
    "fp32, AdamW": (4, 0, 8, 4),
    "bf16, AdamW fused": (2, 0, 4, 2),
    "bf16, fp32 masters": (2, 4, 8, 2),
    "MXFP8, fp32 masters": (1 + 1 / 32, 4, 8, 2),
    "MXFP8, fp32 masters, on the host": (1 + 1 / 32, 0, 0, 2),
}


def measured(name: str, share: Any = "linears") -> dict[str, Any]:
    meter = OfAllocator()
    return figures(measure(CONTENDERS[name], TINY, share, meter, "cpu"), meter)


@pytest.mark.parametrize("name", KNOWN)
def test_a_step_holds_what_it_is_known_to_hold(name: str) -> None:
    found = measured(name)
    weights, masters, moments, gradients = KNOWN[name]
    parts = found["at the peak"]
    own = [parts[part] for part in ("weights", "masters", "moments", "gradients")]
    assert own == pytest.approx([weights, masters, moments, gradients], abs=0.01)  # and a count of steps for each
    assert 0 <= parts["other"] < 0.2  # digests and numbers of rows, which are small beside large weights
    assert found["rest"] == pytest.approx(weights + masters + moments + parts["other"], abs=0.01)
    assert found["with gradients"] == pytest.approx(found["rest"] + gradients, abs=0.01)
    assert found["peak"] == pytest.approx(sum(parts.values()), abs=0.01)
    assert found["grown by a step"] == 0


def test_states_in_host_memory_are_counted_apart() -> None:
    for name, host in (("", 12), ("on the host", 12), ("moments float8, on the host", 2 + 2 * (1 + 1 / 32))):
        masters = "masters remainder" if "float8" in name else "fp32 masters"
        found = measured(", ".join(filter(None, ["MXFP8", masters, name])))
        assert found["host"] == pytest.approx(host if name else 0, abs=0.01)
        assert found["at the peak"]["masters"] + found["at the peak"]["moments"] == pytest.approx(
            0 if name else 12, abs=0.01
        )


def test_temporaries_are_those_of_the_way_of_stepping() -> None:
    assert measured("fp32, AdamW")["at the peak"]["temporaries"] == pytest.approx(4, abs=0.01)
    assert measured("fp32, AdamW fused")["at the peak"]["temporaries"] == pytest.approx(0, abs=0.01)


def test_embedding_and_norms_are_counted_with_the_model_alone() -> None:
    linears, model = (measured("MXFP8, fp32 masters", share) for share in ("linears", "model"))
    blocks = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    assert linears["parameters"] == blocks
    assert model["parameters"] == blocks + 96 * 64 + 3 * 64
    assert linears["at the peak"]["weights"] == pytest.approx(1 + 1 / 32, abs=0.001)
    assert model["at the peak"]["weights"] > 1.1


class Compressing:
    """What masters= and moments= will look like; torch's AdamW takes the steps."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __new__(
        cls, kind: Any, params: Any, *, masters: str = "float32", moments: str = "float32", **options: Any
    ) -> Any:
        cls.made.append({"masters": masters, "moments": moments})
        return kind(params, **options)


def test_a_contender_waits_for_its_options_and_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = CONTENDERS["bf16, masters remainder, moments float8"]
    known = inspect.signature(MasterWeightOptimizer).parameters
    missing = " and no ".join(f"{name}=" for name in ("masters", "moments") if name not in known)
    assert compressed.missing() == (f"MasterWeightOptimizer takes no {missing} here" if missing else "")
    assert Contender(optimizer=torch.optim.SGD, library="not_there").missing() == "not_there is not installed"
    assert CONTENDERS["bf16, fp32 masters"].missing() == ""

    monkeypatch.setattr(memory_contenders, "MasterWeightOptimizer", Compressing)
    assert compressed.missing() == ""
    measured("bf16, masters remainder, moments float8")
    assert Compressing.made == [{"masters": "remainder", "moments": "float8"}]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders that are measured here, one for long runs, one whose library is missing, one whose library fails."""
    names = ("fp32, AdamW", "bf16, fp32 masters")
    chosen = {name: CONTENDERS[name] for name in names}
    chosen["absent"] = Contender(optimizer=torch.optim.SGD, library="not_there")
    chosen["long"] = Contender(optimizer=torch.optim.SGD, at_length=True)
    chosen["broken"] = Contender(optimizer=torch.optim.SGD, library="torch")
    monkeypatch.setattr(memory, "CONTENDERS", chosen)


def asked_here(name: str, *, full: bool) -> dict[str, Any]:
    if name in ("broken", "long"):
        raise RuntimeError(f"{name} ended with 1: NotImplementedError: no CPU")
    return of_contender(CONTENDERS[name], TINY, deeper=full)


@pytest.mark.usefixtures("three")
def test_the_question_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_asked", asked_here)
    results = json.loads(json.dumps(memory.run()))
    assert results["skipped"]["long"] == "asked with --full alone"
    del memory.CONTENDERS["long"]
    results = json.loads(json.dumps(memory.run(full=True)))
    assert list(results["contenders"]) == ["fp32, AdamW", "bf16, fp32 masters"]
    assert list(results["skipped"]) == ["absent", "broken"]
    text = memory.markdown(results)
    assert columns_of("bf16, fp32 masters", text) == [1 + 3 + len(PARTS) + 2, 5]
    assert "* broken ended with 1: NotImplementedError: no CPU: broken" in text
    memory.draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0

    for of in results["contenders"].values():  # as it is where not asked at length, and without Linux's pages
        del of[memory.TWICE], of["process"]
    text = memory.markdown(results)
    assert columns_of("bf16, fp32 masters", text) == [1 + 3 + len(PARTS) + 1, 5]
    assert "| bf16, fp32 masters | 14." in text
    memory.draw(results, tmp_path / "picture.png")


def columns_of(name: str, text: str) -> list[int]:
    """Of the rows of a contender."""
    return [line.count(" | ") + 1 for line in text.splitlines() if line.startswith(f"| {name} |")]


def test_what_was_not_told_apart_is_a_target_that_is_missed() -> None:
    of = {
        "process": {"peak": 13.0},
        "model": {"peak": 12.0, "at the peak": {"other": -0.5}, "grown by a step": 8},
    }
    assert [row["met"] for row in memory._targets({"a": of}).values()] == [False] * 3
    of = {"model": {"peak": 12.0, "at the peak": {"other": 0.0}, "grown by a step": 0}}
    assert [row["met"] for row in memory._targets({"a": of}).values()] == [True] * 2


@pytest.mark.usefixtures("three")
def test_of_ours_and_torchs_an_error_is_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, *, full: bool) -> dict[str, Any]:
        raise RuntimeError(f"{name} ended with 1")

    monkeypatch.setattr(memory, "_asked", fails)
    with pytest.raises(RuntimeError, match="fp32, AdamW ended with 1"):
        memory.run()


def test_a_process_that_fails_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^weather ended with 2: .*invalid choice: 'weather'"):
        memory._asked("weather", full=False)
    monkeypatch.setattr(memory, "LIMIT", 0.01)
    with pytest.raises(RuntimeError, match=r"^weather was stopped after 0\.01 s"):
        memory._asked("weather", full=False)


@pytest.mark.full  # a block of half the width
def test_a_contender_is_measured_in_a_process_of_its_own() -> None:
    found = memory._asked("bf16, AdamW fused", full=False)
    assert found["linears"]["rest"] == pytest.approx(6, abs=0.01)
    if OfProcess.can():
        assert found["process"]["peak"] == pytest.approx(found["model"]["peak"], rel=memory.OFF)


def test_a_meter_has_to_say_how_it_marks() -> None:
    with pytest.raises(NotImplementedError):
        Meter().mark("x")
