"""The checker of orders finds what is not ordered, and nothing else, in logs written by hand."""

from __future__ import annotations

import pytest

from tests.gpu_offline.ordering import (
    HOST,
    Allocated,
    Entry,
    Fault,
    Freed,
    HostWaited,
    Lent,
    Ran,
    Recorded,
    Waited,
    copies_to_host,
    faults_of,
    waits_of_host,
)

COMPUTE, SIDE = 0, 1
NONE: frozenset[int] = frozenset()
X = frozenset({7})
BEGIN: list[Entry] = [Allocated(7, COMPUTE, "x"), Ran(COMPUTE, "make", NONE, X)]
WAIT: list[Entry] = [Recorded(1, COMPUTE), Waited(SIDE, 1)]
BACK: list[Entry] = [Recorded(2, SIDE), Waited(COMPUTE, 2)]
READ: list[Entry] = [Ran(SIDE, "read", X, NONE)]
WRITE: list[Entry] = [Ran(COMPUTE, "write", NONE, X)]
AGAIN: list[Entry] = [Freed(7), Allocated(8, COMPUTE, "y")]
MADE, READ_BY, WRITTEN = "write by make on stream 0", "read by read on stream 1", "write by write on stream 0"


def test_a_read_without_a_wait_is_found() -> None:
    assert faults_of(BEGIN + READ) == [Fault("x", MADE, READ_BY)]
    assert str(faults_of(BEGIN + READ)[0]) == f"x: {MADE} and {READ_BY} are not ordered"
    assert faults_of(BEGIN + WAIT + READ) == []


def test_a_write_while_another_stream_reads_is_found() -> None:
    assert faults_of(BEGIN + WAIT + READ + WRITE) == [Fault("x", READ_BY, WRITTEN)]
    assert faults_of(BEGIN + WAIT + READ + BACK + WRITE) == []


def test_two_reads_need_no_order() -> None:
    assert faults_of([*BEGIN, *WAIT, *READ, Ran(COMPUTE, "read", X, NONE)]) == []


def test_an_event_stands_for_what_came_before_it_was_recorded() -> None:
    assert faults_of([Recorded(1, COMPUTE), *BEGIN, Waited(SIDE, 1), *READ]) == [Fault("x", MADE, READ_BY)]
    assert faults_of([*BEGIN, Waited(SIDE, 1), *READ]) == [Fault("x", MADE, READ_BY)]  # never recorded: no wait


def test_an_order_passes_through_a_third_stream() -> None:
    through = [Recorded(1, COMPUTE), Waited(2, 1), Recorded(3, 2), Waited(SIDE, 3)]
    assert faults_of(BEGIN + through + READ) == []
    assert faults_of(BEGIN + through[:3] + READ) == [Fault("x", MADE, READ_BY)]


def test_what_the_cpu_waited_for_is_before_all_that_it_asks_for_later() -> None:
    assert faults_of([*BEGIN, HostWaited("item", COMPUTE), *READ]) == []
    assert faults_of([*BEGIN, Recorded(1, COMPUTE), HostWaited("synchronize", event=1), *READ]) == []
    by_cpu = [Ran(HOST, "print", X, NONE)]
    assert faults_of(BEGIN + by_cpu) == [Fault("x", MADE, "read by print on the CPU")]
    assert faults_of([*BEGIN, HostWaited("item", COMPUTE), *by_cpu]) == []


def test_memory_that_is_given_away_while_another_stream_reads_is_found() -> None:
    given = Fault("x", READ_BY, "its memory going to y")
    assert faults_of(BEGIN + WAIT + READ + AGAIN) == [given]
    assert faults_of(BEGIN + WAIT + READ + BACK + AGAIN) == []
    assert faults_of([*BEGIN, *WAIT, *READ, AGAIN[0], *BACK, AGAIN[1]]) == []  # it waits before it asks
    assert faults_of([*BEGIN, *WAIT, *READ, AGAIN[0], Allocated(8, SIDE, "y")]) == []  # of another stream's memory


def test_the_allocator_waits_for_streams_that_it_was_told_of() -> None:
    assert faults_of([*BEGIN, *WAIT, *READ, Lent(7, SIDE), *AGAIN]) == []
    assert faults_of([*BEGIN, *WAIT, *READ, Lent(7, 2), *AGAIN]) != []


@pytest.mark.parametrize("missing", range(5))
def test_each_wait_of_a_pipeline_counts(missing: int) -> None:
    """Copy in, gather, compute, and the buffer again: as FSDP2 does it."""
    buffer = frozenset({9})
    log: list[Entry] = [
        *BEGIN,
        Recorded(1, COMPUTE),
        Waited(SIDE, 1),
        Allocated(9, SIDE, "buffer"),
        Ran(SIDE, "copy in", X, buffer),
        Recorded(2, SIDE),
        Waited(2, 2),
        Ran(2, "gather", buffer, buffer),
        Recorded(3, 2),
        Waited(COMPUTE, 3),
        Ran(COMPUTE, "use", buffer, NONE),
        *WRITE,
        Recorded(4, COMPUTE),
        Waited(SIDE, 4),
        Ran(SIDE, "copy in", X, buffer),
        Recorded(5, SIDE),
        Waited(2, 5),
        Ran(2, "gather", buffer, buffer),
    ]
    waits = [place for place, entry in enumerate(log) if isinstance(entry, Waited)]
    assert faults_of(log) == []
    assert faults_of(log[: waits[missing]] + log[waits[missing] + 1 :]) != []


def test_waits_and_copies_of_the_cpu_are_listed() -> None:
    log = [
        *BEGIN,
        Allocated(9, HOST, "on the CPU"),
        Ran(COMPUTE, "copy", X, frozenset({9})),
        HostWaited("item", COMPUTE),
    ]
    assert waits_of_host(log) == ["item"]
    assert copies_to_host(log) == ["copy"]
    assert copies_to_host(BEGIN + WAIT + READ) == []
