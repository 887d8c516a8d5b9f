"""The model of a disk, and that the attack finds what it is there to find: a save that syncs nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.adversary.attack import Found
from tests.adversary.crashes import explore
from tests.adversary.crashes.disk import ORDERS, Disk, Order, Tree
from tests.adversary.crashes.host import Host
from tests.adversary.crashes.operations import Saves
from tests.adversary.crashes.tape import Op, Record
from tests.adversary.histories.model import Write, may_be_seen, may_fail

BEGUN = [
    Record(Op.CREATE, "new", inode=1),
    Record(Op.WRITE, "", inode=1, data=b"content"),
]
RENAMED = Record(Op.RENAME, "new", "name")


def states(records: Iterable[Record], order: Order, old: bytes | None = None) -> list[Tree]:
    disk = Disk()
    if old is not None:
        disk.play(Record(Op.CREATE, "name", inode=9))
        disk.play(Record(Op.WRITE, "", inode=9, data=old))
        disk.settle()
    for record in records:
        disk.play(record)
    return list(disk.states(order, 1000, random.Random(0)))


@pytest.mark.parametrize("order", ORDERS[:3])
def test_a_rename_may_come_before_the_data_unless_they_are_synced(order: Order) -> None:
    found = states([*BEGUN, RENAMED], order, b"old")
    for content in (b"old", b"content", b"", b"\0" * 7, b"con"):
        assert {"name": content} in found
    synced = states([*BEGUN, Record(Op.SYNC, "new", inode=1), RENAMED], order, b"old")
    assert {tree["name"] for tree in synced} == {b"old", b"content"}


def test_what_a_directory_has_not_synced_may_be_in_another_order() -> None:
    synced = [*BEGUN, Record(Op.SYNC, "new", inode=1)]
    swapped = [*synced, RENAMED, Record(Op.UNLINK, "name")]
    assert {} in states(swapped, "weak")
    kept = [*synced, RENAMED, Record(Op.SYNC, ""), Record(Op.MKDIR, "other")]
    assert {frozenset(tree) for tree in states(kept, "weak")} == {frozenset({"name"}), frozenset({"name", "other"})}
    assert {"new": b"content", "name": b"content"} in states([*synced, RENAMED], "two_step")
    assert {} in states([*synced, Record(Op.SYNC, ""), RENAMED], "two_step")
    assert {} not in states([*synced, Record(Op.SYNC, ""), RENAMED], "weak")


def test_a_journal_keeps_all_up_to_the_last_sync() -> None:
    records = [Record(Op.MKDIR, "a"), *BEGUN, Record(Op.SYNC, "new", inode=1), Record(Op.MKDIR, "b")]
    assert {frozenset(tree) for tree in states(records, "journal")} == {
        frozenset({"a", "new"}),
        frozenset({"a", "new", "b"}),
    }
    assert {} in states(records, "directory")


def test_a_file_in_a_directory_whose_name_is_lost_is_lost() -> None:
    records = [
        Record(Op.MKDIR, "a"),
        Record(Op.CREATE, "a/file", inode=1),
        Record(Op.WRITE, "", inode=1, data=b"x"),
        Record(Op.SYNC, "a/file", inode=1),
        Record(Op.SYNC, "a"),
    ]
    assert {frozenset(tree) for tree in states(records, "weak")} == {frozenset(), frozenset({"a", "a/file"})}
    assert states([*records, Record(Op.SYNC, "")], "weak") == [{"a": None, "a/file": b"x"}]


def test_a_load_sees_what_no_later_save_has_surely_replaced() -> None:
    one, two = Write(1, 0, 5, sure=True), Write(2, 6, 10, sure=True)
    assert may_be_seen(None, [one, two], 11, 12) == {2}
    assert may_be_seen(None, [one, two], 8, 9) == {1, 2}
    assert may_be_seen(None, [one, two], 1, 3) == {None, 1}
    assert may_be_seen(None, [one, Write(2, 6, 10, sure=False)], 11, 12) == {1, 2}
    assert may_be_seen(None, [one, Write(2, 6, None, sure=False, clears=True)], 11, 12) == {None, 1, 2}
    assert not may_fail([one], [(0, 5)], 6, 7)
    assert may_fail([one, two], [(0, 5), (6, 10)], 4, 9)


class Unsynced(Saves):
    def build(self) -> None:
        super().build()
        self.ranks = 1
        self.options = [{**options, "sync_files": False} for options in self.options]


def scenario(seed: int, base: Path) -> explore.Told:
    """Runs in the process that has the recorder."""
    draw = random.Random(seed)
    return explore.crashes(explore.Scene(base, Unsynced(draw)), draw)


def test_a_file_may_be_removed_while_it_is_synced() -> None:
    """Whoever syncs looks its name up first, and another process may be quicker."""
    disk = Disk()
    for record in [*BEGUN, Record(Op.UNLINK, "new"), Record(Op.SYNC, "new", inode=1)]:
        disk.play(record)
    assert disk.visible() == {}


def test_a_save_that_syncs_nothing_is_found() -> None:
    with Host(__name__) as host, pytest.raises(Found, match=r"'sync_files': False(.|\n)*expected"):
        host.run(3)
