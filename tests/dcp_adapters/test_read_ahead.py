"""What is asked for ahead of a load: all that is read, in its order, and never much more than the window."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from dcp_adapters import QuantizedLoadPlanner, SafeFileSystemReader
from dcp_adapters.stored.reading import places, read_ahead
from dcp_adapters.stored.reading.read_ahead import END, NEAR, STEP, Need, ReadAhead, hints
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, alone, bits, load, save, values


def chunks(*lengths: int, path: str = "a", start: int = 0) -> list[Need]:
    """Needs of whole chunks behind each other."""
    out = []
    for length in lengths:
        out.append(Need.of(path, start, length, None))
        start += length
    return out


def test_rows_are_told_without_a_look_at_the_chunk() -> None:
    header, row, count = 1200, 5000, 40
    offset, length = 7000, header + row * count + 800
    for first, last in ((0, 40), (0, 1), (13, 20), (39, 40)):
        need = Need.of("a", offset, length, (first, last, count))
        assert offset <= need.first <= offset + header + row * first
        assert offset + header + row * last <= need.last <= offset + length
        assert need.count <= row * (last - first) + header + 800 + 2 * END
    assert Need.of("a", offset, length, (0, 0, 0)) == Need.of("a", offset, length, None)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5 * STEP), st.integers(0, 3 * STEP)), max_size=8))
def test_hints_are_the_needs_in_their_order(made: list[tuple[str, int, int]]) -> None:
    needs = [Need.of(path, offset, length, None) for path, offset, length in made]
    found = list(hints(needs))
    assert sum(hint.count for hint in found) == sum(need.count for need in needs)
    assert all(0 < hint.end - hint.begin <= STEP for hint in found)
    for need in needs:
        covered = need.first
        for hint in sorted((one for one in found if one.path == need.path), key=lambda one: one.begin):
            if hint.begin <= covered:
                covered = max(covered, hint.end)
        assert covered >= need.last


def test_small_chunks_share_a_hint_and_a_gap_ends_it() -> None:
    near, far = NEAR // 2, NEAR * 2
    needs = [*chunks(100, 200), *chunks(300, start=300 + near), *chunks(400, start=600 + near + far)]
    assert [(hint.begin, hint.end, hint.count) for hint in hints(needs)] == [
        (0, 600 + near, 600),
        (600 + near + far, 1000 + near + far, 400),
    ]


class Asked:
    """Stands for the system: keeps what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        monkeypatch.setattr(os, "posix_fadvise", self.advise, raising=False)
        monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)

    def advise(self, descriptor: int, offset: int, count: int, advice: int) -> None:
        assert advice == 3
        self.ranges.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, offset + count))


def test_no_more_is_asked_for_than_the_window_and_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW", 4 * STEP)
    asked, file = Asked(monkeypatch), tmp_path / "a"
    file.touch()
    needs = chunks(*[STEP] * 10, path=str(file))
    with ReadAhead(needs) as ahead:
        ends = [(start, end) for _, start, end in asked.ranges[4:]]
        assert [start for _, start, _ in asked.ranges[:4]] == [0, STEP, 2 * STEP, 3 * STEP]
        assert ends[:2] == [(4 * STEP, 4 * STEP + END), (5 * STEP - END, 5 * STEP)]  # of the first chunk beyond
        assert len(ends) == 12
        asked.ranges.clear()
        for number, need in enumerate(needs):
            ahead.has_read(need.count)
            assert sum(end - start for _, start, end in asked.ranges) == min(number + 1, 6) * STEP
    assert asked.ranges[-1][2] == 10 * STEP


@pytest.mark.parametrize("name", ["missing", "fifo", "."])
def test_hints_that_cannot_be_given_are_not_missed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    with ReadAhead(chunks(10, path=str(tmp_path / name))):
        pass
    monkeypatch.delattr(os, "posix_fadvise")
    with ReadAhead(chunks(10, path=str(tmp_path / "fifo"))):
        pass


def test_a_load_asks_for_all_that_it_reads_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": quantize(values((256, 256), number), RECIPES["nvfp4"]) for number in range(6)}
    save(state, tmp_path)
    asked = Asked(monkeypatch)
    target = {name: quantize(values((256, 256), 9), RECIPES["nvfp4"]) for name in state}
    opened = set(Path("/proc/self/fd").iterdir())
    load(target, tmp_path, reader=SafeFileSystemReader(tmp_path))
    assert set(Path("/proc/self/fd").iterdir()) <= opened
    for name, weight in target.items():
        assert bits(weight.parts()["payload"]) == bits(state[name].parts()["payload"])
    held = {file.name: file.stat().st_size for file in tmp_path.glob("*.distcp")}
    assert {name for name, _, _ in asked.ranges} == held.keys()
    assert sum(end - start for _, start, end in asked.ranges) <= sum(held.values()) + 2 * NEAR
    asked.ranges.clear()
    load({"w3": target["w3"]}, tmp_path, reader=SafeFileSystemReader(tmp_path), allow_partial_load=True)
    assert sum(end - start for _, start, end in asked.ranges) < sum(held.values()) / 2


def test_chunks_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner looks into archives where the reader does not, and only there."""
    with alone():
        dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path)
    looks: list[Any] = []
    check = places.check_archives

    def counting(path: Path, chunks: Any, metadata: Any) -> None:
        looks.extend(chunks)
        check(path, chunks, metadata)

    monkeypatch.setattr("dcp_adapters.load.planner.check_archives", counting)
    for reader, count in ((dcp.FileSystemReader, 1), (SafeFileSystemReader, 0)):
        looks.clear()
        with alone():
            dcp.load({"w": torch.zeros(8)}, storage_reader=reader(tmp_path), planner=QuantizedLoadPlanner())
        assert len(looks) == count
