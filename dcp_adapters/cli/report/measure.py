"""Measures a checkpoint: one of its tensors in memory at a time, beside the one it is compared with, in small pieces.

What writing a tensor costs is not stored in a checkpoint, so it is measured here, on this machine and one thread:

    read_seconds    reading the tensor from the checkpoint's files, its chunks joined (from disk or the page cache)
    write_seconds   what a writer does for the same bytes besides storing them: `torch.save` of each part to nowhere,
                    and its checksum; the quickest of up to TRIES, since whatever else runs only makes it slower

Neither says how fast the storage or the network of the training job is.
"""

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import IO, Any

import torch
from torch import Tensor

from dcp_adapters.cli.report.channels import Axis, Channels
from dcp_adapters.cli.report.elements import ElementCounts, counts_elements
from dcp_adapters.cli.report.records import CheckpointReport, Compared, TensorReport
from dcp_adapters.cli.report.scales import scale_histograms
from dcp_adapters.cli.report.tiles import Tile, decodable, matrix_shape, tiles
from dcp_adapters.plain.progress_bar import Advance, ignore_progress
from dcp_adapters.records.checksums import digest_of
from dcp_adapters.records.entry import Entry, parts_of
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.inspect import inspect_checkpoint
from dcp_adapters.stored.numeric_error import ErrorSum
from qtensor.spec.selection import matches
from qtensor.tensor.quantized_tensor import QuantizedTensor

TRIES = 5
ENOUGH = 0.05  # seconds; what took longer is measured once


def measure_checkpoint(
    checkpoint: Stored,
    against: Stored | None = None,
    match: Sequence[str] = (),
    *,
    advance: Advance = ignore_progress,
) -> CheckpointReport:
    """Read and measure every tensor, or those whose names match a glob of `match`.

    `advance` is told the bytes of the checkpoint that are done.

    Raises:
        ValueError: no name matches; the two have no tensor of one name.
        CheckpointUnusable: data cannot be read.
    """
    found = inspect_checkpoint(checkpoint, match)
    if match and not found.tensors:
        raise ValueError(f"--match {' '.join(match)} matches no tensor; see the names with inspect")
    theirs = [] if against is None else [name for name in against.entries if matches(name, match or ["*"])]
    here = {stored.name for stored in found.tensors}
    if against is not None and here and here.isdisjoint(theirs):
        raise ValueError(
            f"{checkpoint.path} and {against.path} have no tensor of one name, so nothing can be compared: for example "
            f"{found.tensors[0].name!r} and {next(iter(theirs or against.entries), 'no tensor at all')!r}"
        )
    return CheckpointReport(
        path=found.path,
        against=None if against is None else str(against.path),
        tensors=list(_measure_each(checkpoint, against, found.tensors, advance)),
        files=checkpoint.file_bytes(),
        blobs=len(found.blobs),
        blob_bytes=sum(size for _, size in found.blobs),
        only_in_against=len(set(theirs) - here),
        format_version=found.format_version,
        checksums=found.checksums,
        world_size=found.world_size,
    )


def measure_tensor(stored: Entry, tensor: Tensor, reference: Tensor | None = None) -> TensorReport:
    """Measure one tensor: `tensor` as it is stored, `reference` the values that are right, of the same shape."""
    rows, columns = matrix_shape(stored.shape)
    channels, total = Channels(rows, columns), ErrorSum()
    quantized = tensor if isinstance(tensor, QuantizedTensor) else None
    counted = quantized is not None and counts_elements(quantized.recipe)
    counts = ElementCounts(quantized.recipe, tuple(stored.shape)) if quantized is not None and counted else None
    looked_at = decodable(stored.dtype)
    has_channels = looked_at and (quantized is not None or tensor.is_floating_point())
    for tile, right in _tiles_beside(tensor, reference) if looked_at else ():
        if has_channels:
            channels.add(tile)
        if right is not None:
            total.add(right, tile.values)
        if counts is not None:
            counts.add(tile, right)
    both: tuple[Axis, Axis] = ("row", "column")
    outliers = {axis: channels.outliers(axis) for axis in both if has_channels and len(stored.shape) > 1}
    listed = sorted((one for _, some in outliers.values() for one in some), key=lambda one: -one.factor)
    return TensorReport(
        name=stored.name,
        kind=stored.kind,
        dtype=dtype_name(stored.dtype),
        shape=stored.shape,
        numel=stored.numel,
        nbytes=stored.nbytes,
        chunks=1,
        entries=len(stored.part_keys()),
        quantized=quantized is not None,
        compared="no" if reference is None else "yes",
        error=total.error() if reference is not None else None,
        scales=() if quantized is None else scale_histograms(quantized),
        at_largest=counts.at_largest if counts else None,
        saturated=counts.saturated if counts else None,
        clipped=counts.clipped if counts and reference is not None else None,
        nan_codes=counts.nan_codes if counts else 0,
        not_finite=channels.not_finite,
        zero_rows=channels.zero_rows if outliers else None,
        row_outliers=outliers["row"][0] if outliers else 0,
        column_outliers=outliers["column"][0] if outliers else 0,
        outliers=tuple(listed),
        profile=channels.profile(listed[0].axis) if listed else None,
    )


def _tiles_beside(tensor: Tensor, reference: Tensor | None) -> Iterator[tuple[Tile, Tensor | None]]:
    """Yield the pieces of a tensor, each with the values that are right."""
    if reference is None:
        return zip(tiles(tensor), repeat(None))
    return zip(tiles(tensor), (tile.values for tile in tiles(reference)), strict=True)


def _measure_each(
    checkpoint: Stored,
    against: Stored | None,
    tensors: Sequence[Entry],
    advance: Advance,
) -> Iterator[TensorReport]:
    for stored in tensors:
        begin = time.perf_counter()
        tensor = checkpoint.read(stored.name)
        read = time.perf_counter() - begin
        right = against.entries.get(stored.name) if against is not None else None
        compared = _comparison(stored, right, against)
        reference = against.read(stored.name) if against is not None and compared == "yes" else None
        write, chunks = _time_writing(tensor), checkpoint.chunks(stored.name)
        report = replace(measure_tensor(stored, tensor, reference), chunks=chunks)
        # freed before the next ones are read, so that one tensor at a time is in memory
        del tensor, reference
        nbytes = right.nbytes if right is not None else None
        yield replace(report, compared=compared, reference_bytes=nbytes, read_seconds=read, write_seconds=write)
        advance(stored.nbytes)


def _comparison(stored: Entry, right: Entry | None, against: Stored | None) -> Compared:
    if against is None:
        return "no"
    if right is None:
        return "absent"
    if stored.shape != right.shape:
        return "shape"
    alike = stored.dtype.is_complex == right.dtype.is_complex
    return "yes" if alike and decodable(stored.dtype) and decodable(right.dtype) else "undecodable"


def _time_writing(tensor: Tensor) -> float:
    parts = parts_of(tensor).values()
    tries: list[float] = []
    while len(tries) < TRIES and sum(tries) < ENOUGH:
        begin = time.perf_counter()
        for part in parts:
            torch.save(part, _Nowhere())
            digest_of(part)
        tries.append(time.perf_counter() - begin)
    return min(tries)


class _Nowhere(io.RawIOBase, IO[bytes]):
    """A file that forgets what is written."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
