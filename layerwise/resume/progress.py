"""progress.json: which run this is and which layers are done; the one file whose renaming commits a window.

    {"version": 1, "digest": ..., "progress": {"fingerprint", "run", "windows": [...], "finished"}}

    windows     first and last layer, their names, the directory, size and digest of each of its files, and `extra`
    run         the process that writes here; a later one takes the directory over by writing its own
    finished    null, or the digests of the finished weights
    digest      xxh3 of version and progress as canonical JSON

The file is written under a temporary name, synced and renamed, and then the directory is synced: at any moment there is
the old file or the new one. A second copy is written after it, in case the first is damaged.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from dcp_adapters.plain.durable import sync
from dcp_adapters.plain.words import short
from layerwise.resume.fingerprint import Fingerprint

FORMAT = 1
PROGRESS, BACKUP = "progress.json", "progress.backup.json"
WINDOW = re.compile(r"layers-\d{5,}-\d{5,}(-[0-9a-f]{8})?")
MOST = 10**9  # layers; numbers of more digits would make names of directories that no file system has
SUMMARY = re.compile(r"\d+ [0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Layers that were saved together.

    Attributes:
        first, last: their numbers, both included.
        names: their fqns.
        directory: of the DCP checkpoint, within the calibration's.
        files: name -> "size xxh3" of every file in it.
        extra: what the run keeps beside the tensors.
    """

    first: int
    last: int
    names: tuple[str, ...]
    directory: str
    files: Mapping[str, str]
    extra: Any = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Window":
        """Make a window of what `asdict` gave; raise ValueError, TypeError or KeyError for anything else."""
        # These names are joined with the directory and read, so none may lead out of it.
        if not WINDOW.fullmatch(record["directory"]) or any(Path(name).name != name for name in record["files"]):
            raise ValueError(f"a window in {record['directory']!r}")
        if any(not name.isprintable() for name in record["files"]):  # lone surrogates, which no file system has
            raise ValueError(f"a window in {record['directory']!r} whose files have no names")
        if not all(SUMMARY.fullmatch(summary) for summary in record["files"].values()):
            raise ValueError(f"a window in {record['directory']!r} whose files have no size and digest")
        first, last, names = record["first"], record["last"], record["names"]
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < MOST:
            raise ValueError(f"a window of layers {short(first)}..{short(last)}")
        if type(names) is not list or any(type(name) is not str for name in names):
            raise ValueError(f"a window in {record['directory']!r} whose layers have no names")
        return cls(**{**record, "names": tuple(names)})


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    fingerprint: Fingerprint
    run: str
    windows: tuple[Window, ...] = ()
    finished: Mapping[str, int] | None = None

    @property
    def next_layer(self) -> int:
        """The first layer that is not done."""
        return self.windows[-1].last + 1 if self.windows else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        finished = None if self.finished is None else {name: f"{value:016x}" for name, value in self.finished.items()}
        return {
            "fingerprint": self.fingerprint.to_json(),
            "run": self.run,
            "windows": [asdict(window) for window in self.windows],
            "finished": finished,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Progress":
        """Make what `to_json` wrote; raise ValueError, TypeError, KeyError or AttributeError for anything else."""
        finished, run = record["finished"], record["run"]
        windows = tuple(map(Window.from_json, record["windows"]))
        if any(after.first != before.last + 1 for before, after in pairwise(windows)) or (windows and windows[0].first):
            raise ValueError("windows of layers that do not follow each other from 0 on")
        if type(run) is not str or not run.split():
            raise ValueError(f"the run {short(run)}")
        return cls(
            fingerprint=Fingerprint.from_json(record["fingerprint"]),
            run=run,
            windows=windows,
            finished=None if finished is None else {name: int(value, 16) for name, value in finished.items()},
        )


def read_progress(directory: Path) -> tuple[Progress | None, list[str]]:
    """Return the progress in a directory, None if none can be read; and what is damaged, in words.

    Raises:
        ValueError: a newer version of this library has written it.
    """
    damages = []
    for name in (PROGRESS, BACKUP):
        try:
            progress = _parse((directory / name).read_bytes(), directory / name)
        except FileNotFoundError:
            damages.append(f"{name} is missing")
            continue
        except _DamagedError as error:
            damages.append(f"{name} is damaged ({error})")
            continue
        # A sound first file is enough: a run that ends between the two writes leaves no second one.
        return progress, damages
    # Both are missing: nobody has begun here, and nothing is damaged.
    return None, [] if damages == [f"{name} is missing" for name in (PROGRESS, BACKUP)] else damages


def write_progress(directory: Path, progress: Progress) -> None:
    """Commit; durable when it returns, and at any moment before there is the old or the new progress. Rank 0 only."""
    # JSON changes values (tuples, keys that are numbers), and the digest must be that of what will be read.
    record = json.loads(json.dumps(progress.to_json()))
    data = json.dumps(
        {"version": FORMAT, "digest": _record_digest(FORMAT, record), "progress": record}, indent=1
    ).encode()
    for name in (PROGRESS, BACKUP):
        # Named after the run: two runs in one directory must not write into one file.
        temporary = directory / f"{name}.{progress.run.split()[0]}.tmp"
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(directory / name)
        sync(directory)


class _DamagedError(Exception):
    """The file is not what was written."""


def _parse(data: bytes, file: Path) -> Progress:
    try:
        held = json.loads(data)
        version, digest, record = held["version"], held["digest"], held["progress"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError("not the JSON that was written") from error
    # Not taken for damage, which would restart the calibration and drop what a newer version has saved.
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"{file} has format version {version}, this library reads up to {FORMAT}: a newer one has written it; "
            "update qtensor, or give another checkpoint_dir. Nothing has been changed"
        )
    if version != FORMAT:
        raise _DamagedError(f"format version {short(version)}")
    if digest != _record_digest(version, record):
        raise _DamagedError("its digest is another one")
    try:
        return Progress.from_json(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{type(error).__name__}: {error}") from error


def _record_digest(version: int, record: Any) -> str:
    text = json.dumps([version, record], sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())
