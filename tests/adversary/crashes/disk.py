"""What a file system may hold after a crash of the machine, given what was done to it and what was synced.

A file: what it held at its last fsync is there. Of what was written since, any part may be: nothing, all, a prefix, any
blocks, or only the new size, with zeros. A directory: its names as of its last fsync are there. Of what was done to its
names since:

    journal     a prefix of what was done to all directories, at least up to the last fsync of anything: ext4, xfs
    directory   for each directory a prefix of its own
    weak        for each directory any part, renames still in one step: what POSIX leaves to a file system
    two_step    likewise, and a rename is a new name and the loss of the old one, in any order
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.adversary.crashes.tape import Op, Record

Order = Literal["journal", "directory", "weak", "two_step"]
ORDERS: tuple[Order, ...] = ("journal", "directory", "weak", "two_step")
Tree = dict[str, bytes | None]  # path -> content, None for a directory
BLOCK = 4096


@dataclass(eq=False)
class File:
    """kept: what is on the disk for sure. now: what processes read. since: what was written after `kept`."""

    kept: bytes = b""
    now: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: cut to that size

    def write(self, offset: int, data: bytes | None) -> None:
        self.since.append((offset, data))
        self.now = _changed(self.now, offset, data)

    def sync(self) -> None:
        self.kept, self.since = self.now, []

    def contents(self, draw: random.Random) -> list[bytes]:
        """What it may hold: the extremes first."""
        if not self.since:
            return [self.kept]
        some = [_applied(self.kept, self.since[: draw.randrange(len(self.since))])]
        torn = _applied(self.kept, [write for write in self.since if draw.random() < 0.5])
        zeros = _changed(self.kept, len(self.now), None)
        blocks = bytearray(zeros)
        for at in range(0, len(self.now), BLOCK):
            if draw.random() < 0.5:
                blocks[at : at + BLOCK] = self.now[at : at + BLOCK]
        half = self.now[: len(self.now) // 2]
        return list(dict.fromkeys([self.kept, self.now, zeros, half, bytes(blocks), torn, *some]))


@dataclass(eq=False)
class Directory:
    """kept: names that are on the disk for sure. now: those that processes see. since: the changes between the two."""

    kept: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)
    since: list[Change] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.since:
            for directory, name, node in change.steps:
                if directory is not self:  # a rename between two directories is in one step
                    directory.since.remove(change)
                    _rename(directory.kept, name, node)
        self.kept, self.since = dict(self.now), []


Node = File | Directory


@dataclass(eq=False)
class Change:
    """Of names, in one step: (directory, name, what it names from then on or None)."""

    steps: tuple[tuple[Directory, str, Node | None], ...]
    number: int


class Disk:
    """The tree below a root, as records tell it."""

    def __init__(self) -> None:
        self.root = Directory()
        self.inodes: dict[int, File] = {}
        self.count = self.synced = 0  # changes of names so far, and how many of them the last fsync of anything saw

    def play(self, record: Record) -> None:
        """One record."""
        match record.op:
            case Op.CREATE:
                made = self.inodes[record.inode] = File()
                self._change((*self._place(record.path), made))
            case Op.MKDIR:
                self._change((*self._place(record.path), Directory()))
            case Op.WRITE:
                self.inodes[record.inode].write(record.offset, record.data)
            case Op.TRUNCATE:
                self.inodes[record.inode].write(record.offset, None)
            case Op.UNLINK | Op.RMDIR:
                self._change((*self._place(record.path), None))
            case Op.RENAME | Op.LINK:
                old, new = self._place(record.path), self._place(record.other)
                moved = old[0].now[old[1]]
                gone = ((*old, None),) if record.op is Op.RENAME else ()
                self._change((*new, moved), *gone)
            case Op.SYNC:
                self._renamed_unseen(record)
                self._found(record.path, record.inode).sync()
                self.synced = self.count
            case Op.STRANGE:
                raise NotImplementedError(f"{record.path}: tape.c does not record it")

    def settle(self) -> None:
        """All is on the disk."""
        for node in _nodes(self.root):
            node.sync()

    def visible(self) -> Tree:
        """What processes see; what a killed process leaves."""
        return dict(_tree(self.root, "", {}, {}, now=True))

    def states(self, order: Order, most: int, draw: random.Random) -> Iterator[Tree]:
        """What a crash may leave: all of it up to `most` states, beyond that as many at random."""
        changes = self._changes(order)
        files = [node for node in _nodes(self.root) if isinstance(node, File) and node.since]
        contents = [file.contents(draw) for file in files]
        several = 1
        for choices in contents:
            several *= len(choices)
        kept_ways = _ways(changes, order, self.synced, most, draw)
        if len(kept_ways) * several <= most:
            pairs: Iterator[tuple[frozenset[int], Sequence[bytes]]] = itertools.product(
                kept_ways, itertools.product(*contents)
            )
        else:
            drawn = [(draw.choice(kept_ways), [draw.choice(choices) for choices in contents]) for _ in range(most - 2)]
            lost, whole = [[held[0] for held in contents], [held[min(1, len(held) - 1)] for held in contents]]
            ends = [(kept_ways[0], lost), (kept_ways[-1], whole)]
            pairs = iter([*ends, *drawn])
        for kept, held in pairs:
            names = {id(node): dict(node.kept) for node in _nodes(self.root) if isinstance(node, Directory)}
            for place, change in enumerate(changes):
                if place not in kept:
                    continue
                for directory, name, node in change.steps:
                    _rename(names.setdefault(id(directory), dict(directory.kept)), name, node)
            yield dict(_tree(self.root, "", names, dict(zip(map(id, files), held, strict=True)), now=False))

    # -- below the surface ---------------------------------------------------------------------------------------------

    def _found(self, path: str, inode: int) -> Node:
        node: Node = self.root
        if path.endswith(" (deleted)"):
            return self.inodes.get(inode, File())
        for name in filter(None, path.split("/")):
            assert isinstance(node, Directory)
            if name not in node.now:  # another process removed it between the look at its name and this record
                return self.inodes.get(inode, File())
            node = node.now[name]
        return node

    def _renamed_unseen(self, record: Record) -> None:
        """A file that is synced under a name that no record gave it: safetensors renames by a call of its own."""
        directory, name = self._place(record.path) if record.path else (self.root, "")
        node = self.inodes.get(record.inode)
        if name in directory.now or node is None:
            return
        for old in [old for old, there in directory.now.items() if there is node]:
            self._change((directory, name, node), (directory, old, None))

    def _place(self, path: str) -> tuple[Directory, str]:
        above, _, name = path.rpartition("/")
        directory = self._found(above, 0)
        assert isinstance(directory, Directory)
        return directory, name

    def _change(self, *steps: tuple[Directory, str, Node | None]) -> None:
        change = Change(steps, self.count)
        self.count += 1
        for directory in dict.fromkeys(step[0] for step in steps):
            directory.since.append(change)
        for directory, name, node in steps:
            _rename(directory.now, name, node)

    def _changes(self, order: Order) -> list[Change]:
        """Changes that may be lost, in the order they were made."""
        found = {
            change.number: change for node in _nodes(self.root) if isinstance(node, Directory) for change in node.since
        }
        ordered = [found[number] for number in sorted(found)]
        if order == "two_step":
            return [Change((step,), change.number) for change in ordered for step in change.steps]
        return ordered


def _ways(changes: Sequence[Change], order: Order, synced: int, most: int, draw: random.Random) -> list[frozenset[int]]:
    """Which changes may have been kept, by their places; none first, all last."""
    count = len(changes)
    if order == "journal":
        least = sum(change.number < synced for change in changes)
        return [frozenset(range(end)) for end in range(least, count + 1)]
    if order == "directory":
        of: dict[int, list[int]] = {}
        for place, change in enumerate(changes):
            of.setdefault(id(change.steps[0][0]), []).append(place)
        choices = [[frozenset(places[:end]) for end in range(len(places) + 1)] for places in of.values()]
        ways = itertools.product(*choices)
        found = [frozenset[int]().union(*way) for way in itertools.islice(ways, most)]
        return [*found, frozenset(range(count))]
    if 1 << count <= most:
        return [frozenset(place for place in range(count) if bits >> place & 1) for bits in range(1 << count)]
    some = [frozenset(place for place in range(count) if draw.random() < 0.5) for _ in range(most)]
    single = [frozenset({place}) for place in range(count)]
    all_but = [frozenset(range(count)) - one for one in single]
    return [frozenset(), *single, *all_but, *some, frozenset(range(count))]


def _nodes(root: Directory) -> list[Node]:
    """All that can be reached, now or on the disk."""
    seen: dict[int, Node] = {}
    queue: list[Node] = [root]
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, Directory):
            queue += [*node.kept.values(), *node.now.values()]
            queue += [made for change in node.since for _, _, made in change.steps if made is not None]
    return list(seen.values())


def _tree(
    directory: Directory, above: str, names: dict[int, dict[str, Node]], held: dict[int, bytes], *, now: bool
) -> Iterator[tuple[str, bytes | None]]:
    entries = directory.now if now else names.get(id(directory), directory.kept)
    for name, node in entries.items():
        path = f"{above}{name}"
        if isinstance(node, Directory):
            yield path, None
            yield from _tree(node, f"{path}/", names, held, now=now)
        else:
            yield path, node.now if now else held.get(id(node), node.kept)


def _rename(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _changed(content: bytes, offset: int, data: bytes | None) -> bytes:
    if data is None:
        return content[:offset].ljust(offset, b"\0")
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


def _applied(content: bytes, writes: Sequence[tuple[int, bytes | None]]) -> bytes:
    for offset, data in writes:
        content = _changed(content, offset, data)
    return content
