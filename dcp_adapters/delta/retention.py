"""The checkpoints of a run: what each is a delta to, and those that may go.

    runs/step-1000          full
    runs/step-1010          delta to ../step-1000
    runs/step-1020          delta to ../step-1000      keep=["step-1020"] keeps step-1000, too

How checkpoints go, and in which order, is told in stored/removal.py.
"""

import os
from collections.abc import Collection
from pathlib import Path

from dcp_adapters.delta.chain import refuse_one_name, removable
from dcp_adapters.records.manifest import base_of
from dcp_adapters.stored.reading.metadata_checks import METADATA
from dcp_adapters.stored.reading.reader import SafeFileSystemReader
from dcp_adapters.stored.removal import linked, remove_unneeded


def checkpoint_bases(root: str | os.PathLike[str]) -> dict[str, str | None]:
    """The complete checkpoints directly below a directory, each with what it is a delta to; `removable` takes this.

    Args:
        root: a local directory.

    Returns:
        name of the directory -> name of the base's; a base elsewhere by its full path; None for a full checkpoint.

    Raises:
        OSError: no such directory, or it cannot be read.
        ValueError: the `.metadata` of a checkpoint is damaged, so that nobody knows what it needs.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="run/step-1000", planner=QuantizedSavePlanner())
        >>> dcp.save(state, checkpoint_id="run/step-1010", planner=QuantizedSavePlanner(delta_to="run/step-1000"))
        >>> checkpoint_bases("run")
        {'step-1000': None, 'step-1010': 'step-1000'}
        ```
    """
    root = Path(root).resolve()
    bases: dict[str, str | None] = {}
    for path in sorted(root.iterdir()):
        if path.is_symlink() or not (path / METADATA).is_file():
            continue  # another name of a checkpoint; none, or one that is being saved
        link = base_of(SafeFileSystemReader(path).read_metadata())
        bases[path.name] = None
        if link is not None:
            base = Path(os.path.normpath(path.resolve() / link.path))
            bases[path.name] = base.name if base.parent == root else str(base)
    return bases


def remove_checkpoints(root: str | os.PathLike[str], keep: Collection[str | os.PathLike[str]]) -> list[Path]:
    """Remove the complete checkpoints below a directory that are neither kept nor needed by one that is.

    Call it between saves, on one rank. Directories without `.metadata` stay: a save may be under way there. What a
    symbolic link in the directory names is kept, too, as by `keep_latest`. Deltas in other directories are not looked
    for.

    Args:
        root: a local directory, in which each checkpoint has one of its own.
        keep: a list of the checkpoints that must stay loadable, by name or path; their bases stay with them. With an
            empty one all go that no link names.

    Returns:
        What was removed, deltas before full checkpoints.

    Raises:
        ValueError: one to be kept, or its base, is not there; a `.metadata` cannot be read. Nothing has been removed.
        OSError: a directory cannot be read, or a file cannot be removed.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="run/step-1000", planner=QuantizedSavePlanner())
        >>> dcp.save(state, checkpoint_id="run/step-1010", planner=QuantizedSavePlanner(delta_to="run/step-1000"))
        >>> remove_checkpoints("run", keep=["step-1010"])  # its base stays with it
        []
        ```
    """
    refuse_one_name(keep)
    root = Path(root).resolve()
    bases = checkpoint_bases(root)
    elsewhere: dict[str, str | None] = {
        base: None for base in bases.values() if base is not None and os.sep in base and Path(base, METADATA).is_file()
    }
    named = {place.name for place in linked(root) if place.name in bases}
    may_go = removable(bases | elsewhere, {_name(root, kept) for kept in keep} | named) - elsewhere.keys()

    def needs(checkpoint: Path) -> list[Path]:
        base = bases[checkpoint.name]
        return [] if base is None else [(root / base).resolve()]

    deltas_first = sorted(may_go, key=lambda name: (bases[name] is None, name))
    staying = [root / name for name in bases if name not in may_go]
    return remove_unneeded(root, [root / name for name in deltas_first], staying, needs)


def _name(root: Path, kept: str | os.PathLike[str]) -> str:
    """The name of a checkpoint's directory below `root`, from that, a path, or a link."""
    path = Path(kept)
    full = (root / path if len(path.parts) == 1 else path).resolve()
    if full.parent != root:
        raise ValueError(f"{kept} is not in {root}; nothing has been removed")
    return full.name
