"""Is a Hugging Face directory sound? Headers and JSON agree, every tensor can be read, no quantized weight holds NaN.

There are no checksums in such a directory, so bytes that changed into other valid ones are not found; the report says
so in a warning.
"""

import os
from collections.abc import Callable
from functools import partial

from torch import Tensor

from dcp_adapters.entry import Entry
from dcp_adapters.hf.stored_directory import StoredDirectory
from dcp_adapters.stored.findings import Finding, Report
from dcp_adapters.stored.part_values import value_fault
from dcp_adapters.stored.progress_bar import Advance, unseen

NO_CHECKSUMS = "safetensors have no checksums: bytes that changed into other valid ones cannot be found"


def verify_directory(path: str | os.PathLike[str], *, advance: Advance = unseen) -> Report:
    """Read a whole directory and report everything that is wrong with it.

    Args:
        path: a directory of safetensors, dense or quantized.
        advance: told the bytes of each tensor that is done.

    Returns:
        The report. What is wrong with the directory never raises.
    """
    try:
        directory = StoredDirectory(path)
    except (ValueError, OSError) as error:
        return Report(str(path), (Finding("error", "", "", str(error)),))
    findings = [Finding("warning", "", "", NO_CHECKSUMS)]
    chunks = nbytes = 0
    for name, entry in directory.entries.items():
        problems = _problems(entry, partial(directory.parts, name))
        findings += [Finding("error", directory.file(name), key, message) for key, message in problems]
        chunks, nbytes = chunks + directory.chunks(name), nbytes + entry.nbytes
        advance(entry.nbytes)
    return Report(str(path), tuple(findings), len(directory.entries), chunks, nbytes)


def _problems(entry: Entry, read: Callable[[], dict[str, Tensor]]) -> list[tuple[str, str]]:
    """What is wrong with one tensor, by key."""
    try:
        parts = read()
    except Exception as error:  # noqa: BLE001 - damaged files raise errors of all kinds
        return [(entry.name, f"it can not be read: {type(error).__name__}: {error}")]
    if entry.recipe is None:
        return []
    faults = ((entry.key(spec.name), value_fault(spec, parts[spec.name])) for spec in entry.specs())
    return [(key, message) for key, message in faults if message is not None]
