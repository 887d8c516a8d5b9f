"""The saves of one directory: the newest that is good, and which of the others may go.

    runs/                    newest first                                      latest_verified
      step-4000/             no .metadata: being written, or its save died     passed over, with the reason
      step-3000/             has other bytes than were saved                   passed over, with the reason
      step-2000/             verifies                                          taken
      best -> step-1000/     a link into the directory: no save of its own     not counted; protects step-1000
      log.txt                no directory                                      not counted

Rank 0 looks, and tells the others: all choose the same save, or raise the same error. Nothing that does not verify is
taken, and nothing is removed unless newer saves have just been verified.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from dcp_adapters.plain.words import few_of
from dcp_adapters.records.manifest import base_of
from dcp_adapters.records.soundness import Level, check_level
from dcp_adapters.stored.reading.metadata_checks import METADATA
from dcp_adapters.stored.reading.reader import SafeFileSystemReader
from dcp_adapters.stored.removal import is_save, remove_unneeded
from dcp_adapters.stored.verifying.verify import verify
from fsdp_hooks.ranks.across_ranks import on_first
from fsdp_hooks.ranks.waiting import IN_GROUP, waited_for

Order = Literal["written", "number"]
Needs = Callable[[Path], Iterable[str | os.PathLike[str]]]
NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Skipped:
    """A directory that `latest_verified` or `keep_latest` passed over; as a string, both in one line.

    Attributes:
        path: the directory.
        reason: why it is no save, or what is wrong with it first, in words.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True)
class LatestVerified:
    """What `latest_verified` found.

    Attributes:
        path: the newest save that verifies; None if there is none.
        skipped: the newer directories that were passed over, newest first; all of them if path is None.

    Example:
        ```python
        >>> dcp.save({"weight": torch.ones(4)}, checkpoint_id="run/step-1000", planner=QuantizedSavePlanner())
        >>> found = latest_verified("run")
        >>> found.path.name, found.skipped
        ('step-1000', ())
        ```
    """

    path: Path | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Retained:
    """What `keep_latest` did.

    Attributes:
        verified: the newest saves that verify, as many as were asked for or fewer, newest first.
        removed: the saves that were removed.
        spared: older saves that stayed because a link names them, or a save that stays needs them.
        skipped: newer directories that do not verify; they stayed.

    Example:
        ```python
        >>> dcp.save({"weight": torch.ones(4)}, checkpoint_id="run/step-1000", planner=QuantizedSavePlanner())
        >>> kept = keep_latest("run", keep=2)
        >>> [save.name for save in kept.verified], kept.removed
        (['step-1000'], ())
        ```
    """

    verified: tuple[Path, ...]
    removed: tuple[Path, ...]
    spared: tuple[Path, ...]
    skipped: tuple[Skipped, ...]


def latest_verified(
    directory: str | os.PathLike[str],
    *,
    level: Level = "bytes",
    newest: Order = "written",
    group: dist.ProcessGroup | None = None,
) -> LatestVerified:
    """Return the newest save in the subdirectories that verifies; pass over damaged, half-written and foreign ones.

    A save into the directory may be under way. In a distributed job all ranks call it: rank 0 reads, the others wait
    for as long as that takes, so give it a group whose timeout allows for it.

    Args:
        directory: holds one save in each subdirectory.
        level: "bytes", what `python -m dcp_adapters verify` checks; "deep" and "own_scales", what its options of these
            names add.
        newest: "written", the save whose `.metadata` was written last (copying files may change that); "number", the
            one with the largest last number in its name.
        group: the ranks that call it; None: the default group, or this process alone.

    Returns:
        The save and what was passed over; path None if no save verifies.

    Raises:
        FileNotFoundError: no such directory.
        OSError: it is no directory, or cannot be read.
        ValueError: an unknown option; the directory is itself a checkpoint. All on all ranks.

    Warns:
        UserWarning: on rank 0, for what is passed over, with the reasons.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="run/step-1000", planner=QuantizedSavePlanner())
        >>> latest_verified("run").path.name
        'step-1000'
        ```
    """

    def look() -> LatestVerified:
        found = _newest_verified(_candidates(Path(directory), newest), 1, level)
        return LatestVerified(next(iter(found.verified), None), found.skipped)

    _check(level, newest)
    with waited_for(group, "latest_verified", IN_GROUP):
        return on_first(group, look)


def keep_latest(  # noqa: PLR0913 - options of one operation
    directory: str | os.PathLike[str],
    keep: int = 3,
    *,
    level: Level = "bytes",
    newest: Order = "written",
    needs: Needs | None = None,
    group: dist.ProcessGroup | None = None,
) -> Retained:
    """Remove the saves that are older than the newest `keep` that verify; nothing if fewer than `keep` verify.

    What has no `.metadata` is never removed, nor what a symbolic link in the directory names, nor what a save that
    stays needs; deltas in other directories are not looked for. A save is removed `.metadata` first: if that is
    interrupted, the rest is passed over as unfinished. Call it between saves, on all ranks.

    Args:
        directory: holds one save in each subdirectory.
        keep: how many verified saves to keep, at least 1.
        level: as of `latest_verified`.
        newest: as of `latest_verified`.
        needs: save -> other saves that it cannot do without, by name or path; called on rank 0. The base of a delta
            stays in any case, as does what these saves need in turn.
        group: as of `latest_verified`.

    Returns:
        What was removed and what stayed.

    Raises:
        OSError: a directory cannot be read, and nothing was removed; or a save cannot be removed, and no longer loads.
        FileNotFoundError, ValueError: as of `latest_verified`; keep is no whole number from 1 on; what a save that
            stays needs is not there, or cannot be told. All on all ranks, and nothing was removed.

    Warns:
        UserWarning: on rank 0, for newer directories that do not verify.

    Example:
        ```python
        >>> for step in (1, 2, 3):
        ...     dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"run/step-{step}", planner=QuantizedSavePlanner())
        >>> [save.name for save in keep_latest("run", keep=2).removed]
        ['step-1']
        ```
    """

    def tidy() -> Retained:
        candidates = _candidates(Path(directory), newest)
        found = _newest_verified(candidates, keep, level)
        if len(found.verified) < keep:
            return found
        older = candidates[candidates.index(found.verified[-1]) + 1 :]
        saves = [path for path in older if is_save(path) and not path.is_symlink()]
        staying = [path for path in candidates if path not in saves]
        told = needs or (lambda _: ())
        removed = remove_unneeded(Path(directory), saves, staying, lambda save: _needed_by(save, Path(directory), told))
        spared = tuple(path for path in saves if path not in removed)
        return Retained(found.verified, tuple(removed), spared, found.skipped)

    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep_latest: keep={keep!r}, expected a whole number from 1 on")
    _check(level, newest)
    # one rank reads and removes: with many, each would read everything, and they could choose differently
    with waited_for(group, "keep_latest", IN_GROUP):
        return on_first(group, tidy)


def _check(level: Level, newest: Order) -> None:
    check_level("level", level)
    if newest not in ("written", "number"):
        raise ValueError(f'newest={newest!r} is not one of "written", "number"')


def _candidates(directory: Path, newest: Order) -> list[Path]:
    """Return the subdirectories, newest first, without links to one another."""
    if (directory / METADATA).exists():
        raise ValueError(f"{directory} is a checkpoint itself; give the directory that its saves are in")
    found = sorted(directory.iterdir())
    here = directory.resolve()
    # a save that a link names is there under its own name
    own = [path for path in found if path.is_dir() and not (path.is_symlink() and path.resolve().parent == here)]
    return sorted(own, key=lambda path: _age(path, newest), reverse=True)


def _age(path: Path, newest: Order) -> tuple[int, int]:
    """Return what is larger for a newer save."""
    numbers = NUMBER.findall(path.name)
    number, written = int(numbers[-1]) if numbers else -1, 0
    # `.metadata` is written last, so its time is that of the save; without it a directory has only its own
    for file in (path / METADATA, path):
        try:
            written = file.stat().st_mtime_ns
            break
        except OSError:  # it is not there, or was just removed
            continue
    return (written, number) if newest == "written" else (number, written)


def _newest_verified(candidates: Iterable[Path], count: int, level: Level) -> Retained:
    """Return the first `count` that verify, and what was passed over before the last of them; warn of that."""
    verified: list[Path] = []
    skipped: list[Skipped] = []
    for path in candidates:
        if len(verified) == count:
            break
        reason = _why_unverified(path, level)
        if reason is None:
            verified.append(path)
        else:
            skipped.append(Skipped(path, reason))
    if skipped:
        passed = few_of(skipped, between="; ", last="; ")
        warnings.warn(f"saves that do not verify were passed over: {passed}", stacklevel=4)
    return Retained(tuple(verified), (), (), tuple(skipped))


def _why_unverified(path: Path, level: Level) -> str | None:
    """Return why a directory is no save that verifies; None if it is one."""
    try:
        if not (path / METADATA).exists():
            begun = any(file.name.endswith((".distcp", ".tmp")) for file in path.iterdir())
            return f"no {METADATA}: {'its saving has not finished' if begun else 'it is no checkpoint'}"
        errors = verify(path, level=level).errors
    except OSError as error:
        return f"it can not be read: {error}"
    if not errors:
        return None
    more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
    return f"{errors[0]}{more}"


def _needed_by(save: Path, directory: Path, told: Needs) -> list[Path]:
    """Return what one save cannot do without: the base of a delta, and what the caller tells."""
    return [*_find_bases(save), *(_find_place(save, other, directory) for other in told(save))] if is_save(save) else []


def _find_place(save: Path, other: str | os.PathLike[str], directory: Path) -> Path:
    path = Path(other)
    # a bare name is that of a save in the directory
    place = (directory / path if len(path.parts) == 1 else path).resolve()
    if not place.exists():
        raise ValueError(f"{save.name} needs {other}, which is not there; nothing has been removed")
    return place


def _find_bases(save: Path) -> list[Path]:
    """Return the full save that a delta cannot be read without; none for others."""
    try:
        link = base_of(SafeFileSystemReader(save).read_metadata())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{save.name}: nobody can tell which saves it needs ({error}); mend or remove it. Nothing has been removed"
        ) from error
    return [] if link is None else [(save.resolve() / link.path).resolve()]
