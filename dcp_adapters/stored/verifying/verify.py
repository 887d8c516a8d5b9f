"""Is a checkpoint complete and sound? Told without a model and without a process group.

    metadata      it is there, its records make sense, every chunk has a file
    tensors       chunks cover each one exactly (dcp_adapters/plain/tiling.py)
    manifest      both copies agree; every entry has its parts in the right dtype and shape; no part without an entry
                  (manifest_faults.py)
    files         there, inside of the directory, long enough; chunks do not share bytes (file_check.py)
    base          of a delta: it is there, and is what it was; its own data are read as far as the delta needs them
    chunks        each is read once: dtype, shape, checksum, and for parts the values (part_values.py)
    digests       if the manifest has some: of each tensor, from the sums of its chunks (digest_check.py)
    meaning       if asked for, and the bytes are sound (deep.py)

Nothing stops at the first fault: what cannot be read becomes a finding, and the rest is read. One chunk at a time is
in memory.
"""

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_adapters.plain.words import few_of
from dcp_adapters.records.checksums import CHECKSUMS, ROW, chunk_key, digest_of, rows_of
from dcp_adapters.records.manifest import MANIFEST, Manifest, manifest_of
from dcp_adapters.records.soundness import Level, check_level
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.part_values import value_fault
from dcp_adapters.stored.reading.base import Base
from dcp_adapters.stored.reading.metadata_checks import (
    METADATA,
    Fault,
    chunk_in_words,
    chunks_of,
    holding_faults,
    length_faults,
)
from dcp_adapters.stored.reading.places import contradiction
from dcp_adapters.stored.reading.reader import read_metadata_file
from dcp_adapters.stored.reading.tensor_archive import FileSlice, read_header
from dcp_adapters.stored.verifying.deep import and_deep
from dcp_adapters.stored.verifying.digest_check import DigestCheck
from dcp_adapters.stored.verifying.file_check import check_files
from dcp_adapters.stored.verifying.findings import Finding, VerifyReport
from dcp_adapters.stored.verifying.manifest_faults import manifest_faults
from dcp_adapters.torch_private import is_marked
from qtensor.spec.registry import specs_of

if TYPE_CHECKING:
    from qtensor.spec.format import PartSpec

SHOWN = 3  # names in a sentence


def verify(
    checkpoint: str | os.PathLike[str],
    *,
    level: Level = "bytes",
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read a whole checkpoint of the local file system and report everything that is wrong with it.

    Args:
        checkpoint: the directory.
        level: "bytes"; "deep" or "own_scales" reads the quantized tensors and the masters once more, if the bytes are
            sound, and asks what soundness.py says.
        progress: called after each chunk with (bytes read, bytes in all).

    Returns:
        The report. Faults of the checkpoint never raise, a missing one neither.

    Raises:
        ValueError: no such level.
    """
    check_level("verify: level", level)
    directory = Path(checkpoint)
    try:
        metadata, faults = read_metadata_file(directory / METADATA)
    except FileNotFoundError:
        message = "it is not there: saving never finished, or this is no checkpoint; use the one before it"
        faults = [Fault(METADATA, "", message)]
    except (ValueError, OSError) as error:
        faults = [Fault(METADATA, "", str(error))]
    if faults:
        return VerifyReport(str(directory), tuple(Finding("error", f.file, f.entry, f.message) for f in faults))
    report = _Verification(directory, metadata, progress or (lambda done, total: None)).run()
    return report if level == "bytes" else and_deep(report, lambda: StoredCheckpoint(directory), level)


class _Verification:
    """The findings and counts of one run over sound metadata."""

    def __init__(self, directory: Path, metadata: Metadata, progress: Callable[[int, int], None]) -> None:
        self.directory, self.metadata, self.progress = directory, metadata, progress
        self.records: dict[str, Any] = metadata.state_dict_metadata
        self.known = {  # chunk -> its shape
            index: shape for name, record in self.records.items() for index, shape in chunks_of(name, record).items()
        }
        self.findings: list[Finding] = []
        self.chunks = self.bytes = self.read = self.checksums = 0
        self.total = sum(info.length for info in metadata.storage_data.values())
        self.specs: dict[str, PartSpec] = {}  # name of a part -> what it is
        self.rows: dict[bytes, bytes] | None = None  # of the table of checksums
        self.kept: dict[MetadataIndex, Tensor] = {}  # the chunks of the checkpoint's own entries
        self.digests = DigestCheck(self.records)
        self.base: Base | None = None

    def run(self) -> VerifyReport:
        """Run all checks, in the order of the module's docstring."""
        self.add_faults(holding_faults(self.metadata))
        waiting, findings = check_files(self.directory, self.metadata.storage_data, self.known)
        self.findings += findings
        # the checkpoint's own entries first: what they say is compared with every chunk that follows
        own = (CHECKSUMS, MANIFEST)
        for entry in own:
            self.read_chunks([index for index in waiting if index.fqn == entry])
            (self.take_checksums if entry == CHECKSUMS else self.take_manifest)()
        # asked when the table is there: it tells which chunks are archives of another library's class, of any length
        self.add_faults([fault for index, fault in length_faults(self.metadata).items() if not self.is_archive(index)])
        marked = {index for index in waiting if is_marked(self.metadata.storage_data[index])}
        lost = marked if marked and not self.open_base() else set()
        self.read_chunks([index for index in waiting if index.fqn not in own and index not in lost])
        self.compare_rows()
        self.add_faults(self.digests.faults())
        if left := self.digests.unrecorded():
            message = f"the manifest has digests, and none of {len(left)} tensors"
            self.add("", few_of(left, SHOWN), message, "warning")
        if not self.records.keys() - {CHECKSUMS, MANIFEST}:
            self.add(METADATA, "", "it holds no tensors and no other entries: there was nothing to verify")
        tensors = sum(isinstance(record, TensorStorageMetadata) for record in self.records.values())
        counts = tensors, self.chunks, self.bytes, self.checksums
        return VerifyReport(str(self.directory), tuple(self.findings), *counts)

    def add(self, file: str, entry: str, message: str, severity: Literal["error", "warning"] = "error") -> None:
        """Add a finding."""
        self.findings.append(Finding(severity, file, entry, message))

    def add_faults(self, faults: Iterable[Fault]) -> None:
        """Add what pure checks found."""
        for fault in faults:
            self.add(fault.file, fault.entry, fault.message)

    # -- chunks --------------------------------------------------------------------------------------------------------

    def read_chunks(self, indices: list[MetadataIndex]) -> None:
        """Read and check chunks; each file is opened once."""
        stream: IO[bytes] | None = None
        opened = ""
        try:
            for index in indices:
                info = self.metadata.storage_data[index]
                try:
                    if stream is None or info.relative_path != opened:
                        if stream is not None:
                            stream.close()
                        stream = (self.directory / info.relative_path).open("rb")
                        opened = info.relative_path
                    self.check_chunk(index, info, FileSlice(stream, info.offset, info.length))
                # damaged archives raise errors of all kinds
                except Exception as error:  # noqa: BLE001
                    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                    message = f"it can not be read: {kind}{error}"
                    self.add(info.relative_path, chunk_in_words(index), message)
                self.read += info.length
                self.progress(self.read, self.total)
        finally:
            if stream is not None:
                stream.close()

    def check_chunk(self, index: MetadataIndex, info: Any, chunk: FileSlice) -> None:
        """Check one chunk: what it is, its checksum, its values."""
        record = self.records[index.fqn]
        data: Tensor | io.BytesIO
        if self.is_archive(index):
            what = "a tensor of another library's class: its checksum is compared, its values are not looked at"
            self.add(info.relative_path, chunk_in_words(index), what, "warning")
            data = io.BytesIO(chunk.read())
        elif is_marked(info) and self.base is not None:
            row = None if self.rows is None else self.rows.get(chunk_key(index))
            data = self.base.rebuild(index, self.metadata, chunk.read(), row)
        elif isinstance(record, TensorStorageMetadata):
            header = read_header(chunk, "its archive")
            wrong = contradiction((header.dtype, header.shape), record.properties.dtype, self.known[index])
            if wrong is not None:
                raise ValueError(wrong)
            # read only now that the header fits: a crafted archive could ask for more memory than there is
            data = torch.load(cast("IO[bytes]", chunk), map_location="cpu", weights_only=True)
        else:
            data = io.BytesIO(chunk.read())
        self.chunks += 1
        self.bytes += info.length
        if index.fqn in (CHECKSUMS, MANIFEST) and isinstance(data, Tensor):
            self.kept[index] = data
        if self.rows is not None and index.fqn != CHECKSUMS:
            self.compare(index, info.relative_path, data)
        if isinstance(data, Tensor):
            self.digests.see(index, data)
        spec = self.specs.get(index.fqn)
        if spec is not None and isinstance(data, Tensor) and data.dtype == spec.dtype:
            message = value_fault(spec, data)
            if message is not None:
                self.add(info.relative_path, chunk_in_words(index), message)

    def open_base(self) -> bool:
        """Open the base of a delta; return whether that worked. If not, it is a finding; what needs it is not read."""
        link = self.digests.manifest.base
        try:
            if link is None:
                raise ValueError("chunks are stored as what changed since a base, and the manifest names none")
            self.base = Base.of(link, self.directory)
        except (ValueError, OSError) as error:
            self.add(METADATA, "", str(error))
        return self.base is not None

    def is_archive(self, index: MetadataIndex) -> bool:
        """Return whether the table digests a chunk's archive, which holds a tensor of another library's class."""
        return self.rows is not None and chunk_key(index, archive=True) in self.rows

    def compare(self, index: MetadataIndex, file: str, data: Tensor | io.BytesIO) -> None:
        """Compare a chunk's bytes with its row in the table."""
        assert self.rows is not None
        expected = self.rows.get(chunk_key(index, archive=self.is_archive(index)))
        if expected is None:
            self.add(file, chunk_in_words(index), f"{CHECKSUMS} has no row for it")
        elif (digest := digest_of(data)) != expected:
            message = f"its checksum is {digest.hex()}, {CHECKSUMS} says {expected.hex()}: its bytes have changed"
            self.add(file, chunk_in_words(index), message)
        else:
            self.checksums += 1

    # -- the checkpoint's own entries ----------------------------------------------------------------------------------

    def join_chunks(self, name: str) -> Tensor | None:
        """Join the chunks of an entry of the checkpoint's own along dim 0; None if it is missing or unreadable."""
        pieces = sorted(
            (index for index in self.known if index.fqn == name), key=lambda index: tuple(index.offset or ())
        )
        if not pieces or any(index not in self.kept for index in pieces):
            return None
        if not pieces[0].offset:
            return self.kept[pieces[0]]
        try:
            return torch.cat([self.kept.pop(index) for index in pieces])
        except RuntimeError as error:
            self.add(METADATA, name, f"its chunks do not make up one tensor: {error}")
            return None

    def take_checksums(self) -> None:
        """Take the table of checksums, as a dict."""
        if CHECKSUMS not in self.records:
            message = "there is none: changed bytes can not be found (save with QuantizedSavePlanner(checksums=True))"
            self.add("", CHECKSUMS, message, "warning")
            return
        table = self.join_chunks(CHECKSUMS)
        if table is None:
            return  # that it cannot be read has been reported
        if table.dtype != torch.uint8 or table.ndim != 2 or table.shape[1] != ROW:
            message = f"it is {table.dtype} {tuple(table.shape)}, expected torch.uint8 with {ROW} columns"
            self.add(METADATA, CHECKSUMS, message)
            return
        self.rows = dict(rows_of(table))
        repeated = len(table) - len(self.rows)
        if repeated:
            self.add("", CHECKSUMS, f"{repeated} rows repeat the chunk of an earlier row, expected one each")

    def compare_rows(self) -> None:
        """Look for rows that belong to no chunk."""
        # the key of a row also says whether it digests a chunk's values or its archive
        chunks = {chunk_key(index, archive=archive) for index in self.known for archive in (False, True)}
        left = [key.hex() for key in self.rows or () if key not in chunks]
        if left:
            message = f"{len(left)} rows belong to no chunk of the checkpoint: {', '.join(left[:SHOWN])}"
            self.add("", CHECKSUMS, message)

    def take_manifest(self) -> None:
        """Take both copies of the manifest, which must agree, and look what they say of the stored tensors."""
        copies = []
        try:
            copies.append(manifest_of(self.metadata))
        except ValueError as error:
            self.add(METADATA, MANIFEST, str(error))
        entry = self.join_chunks(MANIFEST)
        try:
            copies.append(None if entry is None else Manifest.from_tensor(entry))
        except ValueError as error:
            self.add("", MANIFEST, str(error))
        manifests = [manifest for manifest in copies if manifest is not None]
        if not manifests and MANIFEST not in self.records:
            message = "there is none: the checkpoint was not saved with QuantizedSavePlanner"
            self.add("", MANIFEST, message, "warning")
        names = sorted({name for manifest in manifests for name in (*manifest.tensors, *manifest.digests)})
        if len(manifests) == 2 and manifests[0] != manifests[1]:
            said = [[(held.tensors.get(name), held.digests.get(name)) for name in names] for held in manifests]
            differing = [name for name, one, other in zip(names, *said, strict=True) if one != other]
            message = f"the entry and the planner data in {METADATA} differ about {', '.join(differing[:SHOWN])}"
            self.add(METADATA, MANIFEST, message)
        # of two that differ the entry counts: it is the one that a checksum covers
        for manifest in manifests[-1:] or [Manifest()]:
            self.digests.manifest = manifest
            self.add_faults(manifest_faults(manifest, self.metadata))
            for name, held in manifest.tensors.items():
                self.specs |= {f"{name}.{spec.name}": spec for spec in specs_of(held.recipe)}
