"""One window on disk: a DCP checkpoint, and the size and digest of each of its files.

Digests of whole files find any damage on any number of ranks. The checkpoint's own checksums are of chunks, and a rank
that reads a part of a chunk cannot compare it.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import CheckpointException

from dcp_adapters import AtomicFileSystemWriter, QuantizedLoadPlanner, QuantizedSavePlanner, SafeFileSystemReader
from dcp_adapters.plain.durable import make_directory, sync_name
from fsdp_hooks.ranks.across_ranks import is_first, on_all, on_first, rank_of, ranks_of
from layerwise.resume.progress import Window

PROBE = ".probe-"
READ = 1 << 24  # bytes of a file at a time


def write_window(directory: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, str]:
    """Save with `dcp.save`, sync every file and their directory, and return the name and summary of each file.

    Raises:
        RuntimeError: some rank failed; the same text on all of them.
    """
    with _translate_errors():
        dcp.save(
            dict(state),
            # The stock writer does not sync all of `.metadata`, nor the names in the directory.
            storage_writer=AtomicFileSystemWriter(directory),
            planner=QuantizedSavePlanner(),
            process_group=group,
        )
    files = on_first(group, lambda: _list_files(directory))
    # Each rank digests what it has just written, which is in its page cache.
    own = [name for name in files if _writer_of(name) % ranks_of(group) == rank_of(group)]
    told = on_all(group, lambda: {name: _summarize(directory / name) for name in own})
    return {name: summary for part in told for name, summary in part.items()}


def _list_files(directory: Path) -> list[str]:
    """Return the files of a checkpoint, as its metadata names them."""
    # Not from the directory: on a shared file system, files of other ranks may show up there later. Nor from what
    # dcp.save returns: on torch 2.11 that metadata does not have them.
    stored = SafeFileSystemReader(directory).read_metadata().storage_data or {}
    return sorted({str(info.relative_path) for info in stored.values()} | {".metadata"})


def read_window(directory: Path, targets: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Load with `dcp.load`, in place, unpickling nothing.

    Raises:
        RuntimeError: some rank failed; the same text on all of them.
    """
    with _translate_errors():
        dcp.load(
            dict(targets),
            storage_reader=SafeFileSystemReader(directory),
            planner=QuantizedLoadPlanner(verify_checksums=True),
            process_group=group,
        )


def find_faults(parent: Path, windows: Sequence[Window], group: dist.ProcessGroup | None) -> dict[int, str]:
    """Find each damaged window: its position -> its first fault, in words. Each rank reads a share of the files.

    Raises:
        OSError: on all ranks, a file cannot be read, which says nothing of its bytes.
    """
    files = [(place, name) for place, window in enumerate(windows) for name in window.files]

    def find_own() -> list[tuple[int, str]]:
        found = []
        for place, name in files[rank_of(group) :: ranks_of(group)]:
            window = windows[place]
            fault = _find_fault(parent / window.directory / name, window.files[name])
            if fault:
                found.append((place, f"{window.directory}/{name} {fault}"))
        return found

    faults: dict[int, str] = {}
    for place, fault in sorted(fault for part in on_all(group, find_own) for fault in part):
        faults.setdefault(place, fault)
    return faults


def check_usable(directory: Path, name: str, group: dist.ProcessGroup | None) -> None:
    """Make the directory if need be, and check that every rank can write files in it and sees the same one.

    Args:
        directory: the same path on all ranks.
        name: a name for the probe file that no other run uses.
        group: the ranks.

    Raises:
        OSError: a rank cannot write there or sees another directory; names the rank and the reason.
    """
    shared = directory / f"{PROBE}{name}"

    def make() -> None:
        make_directory(directory)
        sync_name(directory)
        _write_probe(shared)

    def look() -> None:
        if not shared.exists():
            raise FileNotFoundError(
                "the directory is another one here than on rank 0, or another run has begun in it; give one of a file "
                "system that all ranks share, to one run at a time"
            )
        own = directory / f"{PROBE}{name}-{rank_of(group)}"
        try:
            _write_probe(own)
        finally:
            own.unlink(missing_ok=True)

    try:
        on_first(group, make)
        try:
            on_all(group, look)
        finally:
            if is_first(group):
                shared.unlink(missing_ok=True)
    except OSError as error:
        raise type(error)(f"checkpoint_dir={str(directory)!r} can not be used: {error}") from error


def _write_probe(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b"probe")
        stream.flush()
        os.fsync(stream.fileno())


def _writer_of(name: str) -> int:
    """Return the rank that wrote a file of a DCP checkpoint; rank 0 for the metadata."""
    found = re.match(r"__(\d+)_", name)
    return int(found[1]) if found else 0


def _summarize(file: Path) -> str:
    """Return size and digest of a file's bytes, as one text."""
    state = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(READ):
            state.update(block)
        return f"{stream.tell()} {state.hexdigest()}"


def _find_fault(file: Path, expected: str) -> str | None:
    """Say what is wrong with a file; None if nothing is."""
    size = int(expected.partition(" ")[0])
    try:
        found = file.stat().st_size
        if found != size:
            return f"has {found} bytes, expected {size}"
        return None if _summarize(file) == expected else "does not hold the bytes that were written"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except IsADirectoryError:
        return "is a directory"
    # The file may be sound, and readable in a moment; as damage it would be dropped.
    except OSError as error:
        raise type(error)(
            f"{file} can not be read ({error.strerror}), so it is not known to be damaged. Nothing has been removed: "
            "start again when it can be read, or remove its directory to calibrate its layers anew"
        ) from error


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn DCP's exception into a RuntimeError that tells each rank's error."""
    # DCP's is a BaseException, which callers that catch Exception would not see. It also warns of saving in a single
    # process, which is intended here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        try:
            yield
        except CheckpointException as error:
            failures = sorted(error.failures.items())
            text = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures)
            raise RuntimeError(text) from error
