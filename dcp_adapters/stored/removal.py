"""Removing saves of one directory, for `keep_latest` and `remove_checkpoints`: what may go, in which order, and how.

A save stays if a symbolic link in the directory names it, or a save that stays needs it, as a delta needs its base.
Each goes before those that it needs, and its `.metadata` before its data: wherever this is interrupted, what is left
loads or is no checkpoint.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from dcp_adapters.plain.durable import sync, sync_name
from dcp_adapters.stored.reading.metadata_checks import METADATA

LOG = logging.getLogger(__name__)

Needs = Callable[[Path], Iterable[Path]]  # save -> the saves that it cannot do without, by their resolved paths


def remove_unneeded(directory: Path, saves: Sequence[Path], staying: Sequence[Path], needs: Needs) -> list[Path]:
    """Remove the saves that nothing needs which stays, and return them, in their order.

    Args:
        directory: holds the saves, and links to them.
        saves: what may go.
        staying: what stays in any case.
        needs: asked about what stays and about what goes, before anything is removed.
    """
    spared = _find_spared(directory, saves, staying, needs)
    removed = [path for path in saves if path not in spared]
    _remove(_order_users_first(removed, needs), [*staying, *spared])
    return removed


def linked(directory: Path) -> set[Path]:
    """Return what symbolic links in the directory name."""
    return {path.resolve() for path in directory.iterdir() if path.is_symlink()}


def is_save(path: Path) -> bool:
    """Return whether a directory has a `.metadata`; False if nobody may look into it."""
    try:
        return (path / METADATA).is_file()
    except OSError:
        return False


def _find_spared(directory: Path, saves: Iterable[Path], staying: Iterable[Path], needs: Needs) -> set[Path]:
    """Return those of the saves that must stay because of a link, or of others that stay."""
    by_place = {path.resolve(): path for path in saves}
    found = {by_place[place] for place in linked(directory) if place in by_place}
    # what is spared needs others in turn
    waiting = [*staying, *found]
    while waiting:
        for place in needs(waiting.pop()):
            base = by_place.get(place)
            if base is not None and base not in found:
                found.add(base)
                waiting.append(base)
    return found


def _order_users_first(removed: Sequence[Path], needs: Needs) -> list[Path]:
    """Order saves, each before those that it needs, so that an interruption leaves none without."""
    by_place = {path.resolve(): path for path in removed}
    users: dict[Path, set[Path]] = {path: set() for path in removed}
    for path in removed:
        for place in needs(path):
            if place in by_place and by_place[place] != path:
                users[by_place[place]].add(path)
    try:
        return list(TopologicalSorter(users).static_order())
    # they need each other, and go together
    except CycleError:
        return list(removed)


def _remove(saves: Iterable[Path], staying: Iterable[Path]) -> None:
    """Remove saves, each so that at no moment a part of it looks like a whole one.

    Before the first of them goes, the saves that stay are on the disk with their names, whatever wrote them: else a
    power loss could leave neither.
    """
    for path in filter(is_save, staying):
        for file in path.iterdir():
            if file.is_file():
                sync(file)
        sync(path)
        sync_name(path)
    for path in saves:
        # durable before the data go: a save whose data are gone in part must not look like a whole one
        (path / METADATA).unlink()
        sync(path)
        shutil.rmtree(path)
        LOG.info("%s is removed", path)
