"""Several savers, loaders and cleaners of one directory at once, killed and cut off from power, against a model.

stage.py   processes that wait in front of each file operation; who goes next is drawn
places.py  the directory between two epochs: what is left after an end or a power loss
model.py   what may be seen: a register that saves write and loads read
play.py    one history of a seed: saves into one directory, or several who make the same export, delta or
           calibration
runs.py    histories of a run: full saves, deltas to them, removal of what is old, and loads of the newest
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.adversary.attack import Attack
from tests.adversary.crashes.host import Host

_host = Host("tests.adversary.histories.play")


@contextmanager
def _held() -> Iterator[None]:
    with _host:
        yield


def _scenario(seed: int) -> str:
    return _host.run(seed)


ATTACK = Attack("histories", _scenario, _held)
