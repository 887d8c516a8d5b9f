"""The ways in which a checkpoint is read. `its`: the subject with a mutant at `path`, and what loads must give.

`expected`: what each reader gives of the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedLoadPlanner, SafeFileSystemReader, read_manifest
from dcp_adapters.digests.stored import source_digests
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.inspect import inspect_checkpoint
from dcp_adapters.stored.verifying.verify import verify
from tests.adversary.bytes_read.outcomes import TOUCHED, Case, facts
from tests.dcp_adapters.cases import alone
from tests.dcp_adapters.test_hostile import target

if TYPE_CHECKING:
    from dcp_adapters.records.soundness import Level

Reader = Callable[[Any, Case, dict[str, Any]], str]


def stored(path: Path, *, check: bool = True) -> dict[str, Any]:
    opened = StoredCheckpoint(path, check=check)
    parts = {
        entry.key(part): tensor for name, entry in opened.entries.items() for part, tensor in opened.parts(name).items()
    }
    return facts(parts) | {name: opened.read_blob(name) for name in opened.blobs}


def _read_stored(its: Any, case: Case, expected: dict[str, Any]) -> str:
    """All that is stored, compared with the checksums; where there are none any more, nothing could tell."""
    case.forged |= not _has_checksums(its.path)
    return case.read("StoredCheckpoint", lambda: stored(its.path), expected["stored"])


def _read_verified(its: Any, case: Case, expected: dict[str, Any], *, level: Level = "bytes") -> str:
    """The report finds whatever makes values others."""
    report = verify(its.path, level=level)
    if not report.ok or any(finding.severity == "warning" for finding in report.findings):
        if any(len(str(finding)) > 20000 for finding in report.findings):
            raise case.found("verify", "a finding of more than 20,000 characters")
        return "told"
    return case.read("verify, then StoredCheckpoint", lambda: stored(its.path, check=False), expected["stored"])


def read_loaded(its: Any, case: Case, expected: dict[str, Any], *, convert: bool = False) -> str:
    """A load into tensors; after an error they are as they were, or the error says otherwise."""
    state = target()
    before = facts(state)

    def load() -> dict[str, Any]:
        planner = QuantizedLoadPlanner(verify_checksums=True, on_mismatch="convert" if convert else "raise")
        try:
            with alone():
                dcp.load(state, storage_reader=SafeFileSystemReader(its.path), planner=planner)
        except BaseException as error:
            if facts(state) != before and TOUCHED not in str(error):
                raise case.found("dcp.load", f"{error!r:.1500} and the target has changed without a word") from error
            raise
        return facts(state)

    return case.read("dcp.load", load, its.values)


def _read_converted(its: Any, case: Case, expected: dict[str, Any]) -> str:
    return read_loaded(its, case, expected, convert=True)


def _read_deep(its: Any, case: Case, expected: dict[str, Any]) -> str:
    return _read_verified(its, case, expected, level="deep")


def _read_manifest(its: Any, case: Case, expected: dict[str, Any]) -> str:
    case.forged = True  # nothing protects the manifest but its other copy, which verify compares
    return case.read("read_manifest", lambda: read_manifest(its.path), expected["manifest"])


def _read_digests(its: Any, case: Case, expected: dict[str, Any]) -> str:
    case.forged = True  # they are of what is there
    return case.read("digests", lambda: source_digests(StoredCheckpoint(its.path)), expected["digests"])


def _read_inspected(its: Any, case: Case, expected: dict[str, Any]) -> str:
    case.forged = True

    def inspected() -> dict[str, Any]:
        found = inspect_checkpoint(StoredCheckpoint(its.path))
        found.render()
        return json.loads(json.dumps(found.to_json()))  # type: ignore[no-any-return]

    return case.read("inspect", inspected, expected["inspection"])


def _has_checksums(path: Path) -> bool:
    try:
        return StoredCheckpoint(path).has_checksums
    except Exception:
        return True


READERS: dict[str, Reader] = {
    "stored": _read_stored,
    "verified": _read_verified,
    "deep": _read_deep,
    "loaded": read_loaded,
    "converted": _read_converted,
    "manifest": _read_manifest,
    "digests": _read_digests,
    "inspected": _read_inspected,
}
