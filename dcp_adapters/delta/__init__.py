"""Exact deltas: what changed between two states of the same tensors, byte for byte.

coding/              what changed between two tensors, as few bytes
patches/             a delta: what it leads from and to, and its file
make.py              a delta from two sources
files.py             from and to checkpoints and directories on disk: write_delta, patched_copy
chain.py             deltas in a row; full versions every so often, and what may be removed
retention.py         the checkpoints of a run: what each is a delta to, and those that may go
stored_states.py     checkpoints, directories and tensors as sources; with deltas applied
shards.py            what a rank holds of a state dict
live.py              the version that a rank sent last, and what changed since
apply.py             live weights to a later version: all of it or nothing

A load of a checkpoint that is a delta needs coding/ alone, so the public names come with their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_adapters.delta.apply import apply_deltas
    from dcp_adapters.delta.chain import Anchors, removable
    from dcp_adapters.delta.files import PatchedCopy, WrittenDelta, patched_copy, write_delta
    from dcp_adapters.delta.live import HeldVersion
    from dcp_adapters.delta.patches.patch import Delta
    from dcp_adapters.delta.patches.patch_format import delta_from_bytes, delta_to_bytes, open_delta, save_delta
    from dcp_adapters.delta.retention import checkpoint_bases, remove_checkpoints

__all__ = [
    "Anchors",
    "Delta",
    "HeldVersion",
    "PatchedCopy",
    "WrittenDelta",
    "apply_deltas",
    "checkpoint_bases",
    "delta_from_bytes",
    "delta_to_bytes",
    "open_delta",
    "patched_copy",
    "removable",
    "remove_checkpoints",
    "save_delta",
    "write_delta",
]

# public name -> the module of this folder that it comes from
_MODULES = {
    "Anchors": "chain",
    "Delta": "patches.patch",
    "HeldVersion": "live",
    "PatchedCopy": "files",
    "WrittenDelta": "files",
    "apply_deltas": "apply",
    "checkpoint_bases": "retention",
    "delta_from_bytes": "patches.patch_format",
    "delta_to_bytes": "patches.patch_format",
    "open_delta": "patches.patch_format",
    "patched_copy": "files",
    "removable": "chain",
    "remove_checkpoints": "retention",
    "save_delta": "patches.patch_format",
    "write_delta": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
