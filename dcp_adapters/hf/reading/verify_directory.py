"""Is a Hugging Face directory sound? Headers and JSON agree, every tensor can be read, no quantized weight holds NaN.

Files that `export_hf` wrote say the digest of each of their tensors, and the tensors are compared with that. Files by
others have nothing of the kind, so bytes that changed into other valid ones are not found in them; the report says so
in a warning.

If config.json names a model of transformers, and that is installed, the tensors are also compared with what it would
read: a tensor that is there twice under two names, one that is missing, one of another shape.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from dcp_adapters.hf.files.directory import INDEX, Directory, FileTensor, read_directory
from dcp_adapters.hf.files.file_digests import DIGESTS, RecordedDigests
from dcp_adapters.hf.models.architectures import architecture_said
from dcp_adapters.hf.reading.stored_directory import StoredDirectory
from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.soundness import Level
from dcp_adapters.stored.part_values import value_fault
from dcp_adapters.stored.verifying.deep import and_deep
from dcp_adapters.stored.verifying.findings import Finding, VerifyReport

SHOWN = 3  # names in a sentence


def verify_directory(
    path: str | os.PathLike[str], *, level: Level = "bytes", advance: Advance = ignore_progress
) -> VerifyReport:
    """Read a whole directory and report everything that is wrong with it.

    Args:
        path: a directory of safetensors, dense or quantized.
        level: "deep" or "own_scales" also asks what soundness.py says of each quantized tensor.
        advance: told the bytes of each tensor that is done.

    Returns:
        The report; `checksums` counts the tensors of files whose digest agreed. What is wrong with the directory never
        raises.
    """
    try:
        stored, directory = StoredDirectory(path), read_directory(path)
        recorded = RecordedDigests(directory)
    except (ValueError, OSError) as error:
        return VerifyReport(str(path), (Finding("error", "", "", str(error)),))
    findings = [*_find_lacking(recorded), *_find_unnamed(directory), *_find_misread(directory, stored)]
    left = dict(directory.tensors)
    chunks = nbytes = agreed = 0

    def compare(tensors: Iterable[FileTensor]) -> None:
        nonlocal agreed
        for tensor in tensors:
            # A tensor may be held by several entries; it is compared once.
            if left.pop(tensor.name, None) is None or not recorded.has(tensor):
                continue
            problem = _digest_problem(recorded, tensor, stored)
            agreed += problem is None
            if problem is not None:
                findings.append(Finding("error", tensor.file, tensor.name, problem))

    for name, entry in stored.entries.items():
        compare(stored.held(name))
        problems = _find_problems(entry, partial(stored.parts, name))
        findings += [Finding("error", stored.file(name), key, message) for key, message in problems]
        chunks, nbytes = chunks + stored.chunks(name), nbytes + entry.nbytes
        advance(entry.nbytes)
    # Tensors that are no part of an entry, such as shapes beside codes, have digests, too.
    compare([*left.values()])
    if not directory.tensors:
        findings.append(Finding("error", "", "", "its files hold no tensors: there was nothing to verify"))
    report = VerifyReport(str(path), tuple(findings), len(stored.entries), chunks, nbytes, agreed)
    return report if level == "bytes" else and_deep(report, lambda: stored, level)


def _find_lacking(recorded: RecordedDigests) -> Iterator[Finding]:
    """Yield files without digests, and digests without a tensor."""
    if recorded.lacking:
        files = few_of(recorded.lacking, SHOWN)
        message = f"{files}: no {DIGESTS} in the metadata: bytes that changed into other valid ones cannot be found"
        yield Finding("warning", "", "", message)
    for file, name in recorded.lost:
        yield Finding("error", file, name, f"the file's {DIGESTS} has a digest of it, and the file has no such tensor")


def _find_unnamed(directory: Directory) -> Iterator[Finding]:
    """Yield files whose tensors nobody reads, since the index does not name them."""
    named = {tensor.file for tensor in directory.tensors.values()}
    for file in sorted(path.name for path in directory.path.glob("*.safetensors")):
        if file not in named:
            yield Finding("warning", file, "", f"{INDEX} does not name it, so its tensors are not read")


def _find_misread(directory: Directory, stored: StoredDirectory) -> Iterator[Finding]:
    """Yield what transformers would not find, find twice, or not know, if config.json names one of its models."""
    said = directory.config.get("quantization_config")
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    # Without a class it would be a guess, and a report must not accuse files by a guess.
    known = isinstance(directory.config.get("architectures"), list)
    architecture = architecture_said(directory.config, quantized_as=method) if known else None
    if architecture is None:
        return
    read = architecture.reads(stored.weights())
    for own, names in read.twice.items():
        message = f"{' and '.join(names)} are all {own} of the model: it is there twice, and one of them is read"
        yield Finding(
            "error", directory.tensors[names[-1]].file if names[-1] in directory.tensors else "", own, message
        )
    for own, problem in read.unlike.items():
        yield Finding("error", "", own, f"what config.json describes has another: {problem}")
    for own in read.missing:
        message = (
            "the model that config.json describes has it, and the directory does not: whoever loads it makes it up"
        )
        yield Finding("error", "", own, message)
    for name in read.unexpected:
        yield Finding("warning", "", name, "the model that config.json describes has no such tensor; it is not read")


def _digest_problem(recorded: RecordedDigests, tensor: FileTensor, stored: StoredDirectory) -> str | None:
    """Say what is wrong with one tensor of a file; None if nothing is."""
    try:
        return recorded.problem(tensor, stored.as_held(tensor))
    except Exception as error:  # noqa: BLE001 - damaged files raise errors of all kinds
        return f"it can not be read: {type(error).__name__}: {error}"


def _find_problems(entry: Entry, read: Callable[[], dict[str, Tensor]]) -> list[tuple[str, str]]:
    """Return what is wrong with one tensor, as pairs of a key and a message."""
    try:
        parts = read()
    except Exception as error:  # noqa: BLE001 - damaged files raise errors of all kinds
        return [(entry.name, f"it can not be read: {type(error).__name__}: {error}")]
    if entry.recipe is None:
        return []
    faults = ((entry.key(spec.name), value_fault(spec, parts[spec.name])) for spec in entry.specs())
    return [(key, message) for key, message in faults if message is not None]
