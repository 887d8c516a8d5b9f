"""The directory of a history between its epochs: what is left of one is where the next begins."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.adversary.crashes.disk import ORDERS, Disk, Tree
from tests.adversary.crashes.tape import Op, Tape

if TYPE_CHECKING:
    import random
    from pathlib import Path


def empty(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)


def fill(root: Path, tree: Tree) -> None:
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def after(tape: Tape, draw: random.Random, *, lost: bool) -> Tree:
    """What is there in the end, or after a power loss."""
    disk = Disk()
    for record in tape.records():
        if record.op is Op.MARK:
            disk.settle()
        else:
            disk.play(record)
    return draw.choice(list(disk.states(draw.choice(ORDERS[:3]), 16, draw))) if lost else disk.visible()
