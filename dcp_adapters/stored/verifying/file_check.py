"""What `verify` makes of the data files: each is there, ordinary and long enough, and no two chunks share bytes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_adapters.plain.words import few_of
from dcp_adapters.stored.reading.metadata_checks import METADATA, Fault, chunk_in_words
from dcp_adapters.stored.reading.places import cut_off_fault, look_at, shared_places, sharing_message
from dcp_adapters.stored.verifying.findings import Finding

SHOWN = 3  # names in a sentence


def check_files(
    directory: Path, stored: Mapping[MetadataIndex, Any], known: Collection[MetadataIndex]
) -> tuple[list[MetadataIndex], list[Finding]]:
    """Return the chunks that can be read, in the order in which they stand in the files, and what is wrong.

    Args:
        directory: of the checkpoint.
        stored: chunk -> its place, as the metadata have it.
        known: the chunks that some tensor has.
    """
    by_file: dict[str, list[MetadataIndex]] = {}
    faults: list[Fault] = []
    readable: list[MetadataIndex] = []
    for index, info in stored.items():
        by_file.setdefault(info.relative_path, []).append(index)
        if index not in known:
            message = "bytes are stored for a chunk that no tensor has"
            faults.append(Fault(info.relative_path, chunk_in_words(index), message))
    for name in sorted(by_file):
        indices = sorted(by_file[name], key=lambda index: _place(stored[index]))
        size = look_at(directory, name)
        if not isinstance(size, int):
            held = sorted({index.fqn for index in indices})
            faults.append(Fault(name, few_of(held, SHOWN), "the file is missing" if size is None else size.message))
            continue
        faults += _faults_within(name, size, indices, stored)
        readable += [index for index in indices if index in known and _place(stored[index])[1] <= size]
    errors = [Finding("error", fault.file, fault.entry, fault.message) for fault in faults]
    return readable, [*errors, *_find_stray(directory, by_file)]


def _faults_within(
    file: str, size: int, indices: Sequence[MetadataIndex], stored: Mapping[MetadataIndex, Any]
) -> Iterator[Fault]:
    """Yield the faults of the chunks of one file, sorted by place: overlaps, then those that end behind its end."""
    for number, other, start in shared_places([stored[index] for index in indices]):
        yield Fault(file, chunk_in_words(indices[number]), sharing_message(start, indices[other]))
    for index in indices:
        _, end = _place(stored[index])
        if end > size:
            yield cut_off_fault(file, index, end, size)


def _place(info: Any) -> tuple[int, int]:
    """Return where a chunk begins and ends in its file."""
    return info.offset, info.offset + info.length


def _find_stray(directory: Path, named: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning for each data file that nothing names: an earlier save may have left it."""
    try:
        names = sorted(path.name for path in directory.iterdir() if path.suffix == ".distcp")
    except OSError as error:
        yield Finding("error", "", "", f"the directory can not be listed: {error}")
        return
    for name in names:
        if name not in named:
            yield Finding("warning", name, "", f"{METADATA} does not refer to it: left over from an earlier save")
