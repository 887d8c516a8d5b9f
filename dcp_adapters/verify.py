"""Whether a checkpoint is whole."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dcp_adapters.safe_reader import SafeFileSystemReader

__all__ = ["Finding", "Report", "verify"]


@dataclass(frozen=True)
class Finding:
    """Something wrong."""

    severity: str
    file: str | None
    entry: str | None
    message: str


@dataclass
class Report:
    """What was found, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    tensors: int = 0
    chunks: int = 0
    bytes: int = 0
    checksums: int = 0


def verify(checkpoint: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Check that every chunk's file is there and long enough."""
    metadata = SafeFileSystemReader(checkpoint).read_metadata()
    report = Report(tensors=len(metadata.state_dict_metadata))
    for index, info in metadata.storage_data.items():
        report.chunks += 1
        report.bytes += info.length
        file = Path(checkpoint) / info.relative_path
        if not file.exists() or file.stat().st_size < info.offset + info.length:
            report.findings.append(Finding("error", info.relative_path, index.fqn, "missing or truncated"))
    if progress is not None:
        progress(report.bytes, report.bytes)
    return report
