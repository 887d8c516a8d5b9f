"""What a run tells the next one in its checkpoint_dir: which config it had, and how far its outputs are.

    checkpoint_dir/command.json    {"version": 1, "config": ..., "files": {path: [bytes, ns]}, "state": ...}

    writing     the layers are done, the outputs were free, and this run has begun to write them
    finished    all of them are written

`files` are those the run reads, with size and time of change, so that "finished" means: of these very files. A run of
the same config and files that finds "writing" goes on: an exported directory is complete where it exists, since it
gets its name at the end; checkpoint and reports are written again. Layers are not this file's matter: `calibrate` keeps
them beside it, compared bit by bit.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dcp_adapters.plain.durable import sync
from layerwise.command.config import Config, plain
from layerwise.command.model import directory_files

NAME = "command.json"
VERSION = 1
WRITING, FINISHED = "writing", "finished"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run's record; see the module."""

    config: Mapping[str, Any]
    files: Mapping[str, list[int]]
    state: str = WRITING

    def same_run(self, other: "RunRecord | None") -> bool:
        """Return whether both are of the same config and the same files."""
        return other is not None and (self.config, self.files) == (other.config, other.files)

    def changed(self, other: "RunRecord") -> str | None:
        """Return the first file that has changed, or is in only one of two records of the same config; else None."""
        if self.config != other.config:
            return None
        names = [*self.files, *other.files]
        return next((name for name in names if self.files.get(name) != other.files.get(name)), None)


def record_of(config: Config) -> RunRecord:
    """Return the record of a run of this config that begins now."""
    data = config.data
    named = [None if data is None else data.path, config.output.like]
    read = [*directory_files(config.model.path), *(path for path in named if path is not None)]
    if data is not None and data.tokenizer is not None:
        read += directory_files(data.tokenizer)
    return RunRecord(
        # Through JSON, so that it equals a record that was read: tuples become lists.
        config=json.loads(json.dumps(plain(config))),
        files={str(path.absolute()): _state_of(path) for path in read},
    )


def _state_of(path: Path) -> list[int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return []
    # Size and time, no digest: reading a large model's files would take minutes before every start.
    return [found.st_size, found.st_mtime_ns]


def read_record(directory: Path | None) -> RunRecord | None:
    """Return the record in a directory; None if this version reads none there."""
    if directory is None:
        return None
    try:
        # A record that cannot be read counts as none: then outputs that exist are refused, and nothing is overwritten.
        held = json.loads((directory / NAME).read_bytes())
        if held.pop("version") != VERSION:
            return None
        return RunRecord(**held)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_record(directory: Path, record: RunRecord, state: str) -> None:
    """Replace the record in one step; it is durable when this returns."""
    temporary = directory / f".{NAME}.{uuid.uuid4().hex[:8]}.partial"
    text = json.dumps({"version": VERSION, **asdict(replace(record, state=state))}, indent=1)
    temporary.write_text(text, encoding="utf-8")
    # The bytes must be durable before the name is, or a crash may leave an empty record under it.
    sync(temporary)
    temporary.replace(directory / NAME)
    sync(directory)
