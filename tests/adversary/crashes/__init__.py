"""Power loss and failing disks: every state that a file system may leave behind a crash is opened.

tape.c, tape.py   what a process and torch's writers do to files: written down, broken on demand (preloaded)
disk.py           what may be left of it: what was not synced is lost, torn, or in another order
operations.py     saves and calibrations, and what may be seen of each when
runs.py           full saves and deltas to them, and what removes those that are not needed
making.py         exports, conversions, deltas
explore.py        records one, opens the states; or breaks single calls and looks at what is left
host.py           the process in which this runs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.adversary.attack import Attack
from tests.adversary.crashes.host import Host

_host = Host("tests.adversary.crashes.explore")


@contextmanager
def _held() -> Iterator[None]:
    with _host:
        yield


def _scenario(seed: int) -> str:
    return _host.run(seed)


ATTACK = Attack("crashes", _scenario, _held)
