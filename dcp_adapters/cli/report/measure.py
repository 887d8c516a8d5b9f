"""Measures a checkpoint: one of its tensors in memory at a time, beside the one it is compared with, in small pieces.

What writing a tensor costs is not stored in a checkpoint, so it is measured here, on this machine and one thread:

    read_seconds    reading the tensor from the checkpoint's files, its chunks joined (from disk or the page cache)
    write_seconds   what a writer does for the same bytes besides storing them: `torch.save` of each part to nowhere,
                    and its checksum; the quickest of up to TRIES, for whatever else runs only makes it slower

Neither says how fast the storage or the network of the training job is.
"""

import io
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

import torch
from torch import Tensor

from dcp_adapters.checksums import digest_of
from dcp_adapters.cli.report.channels import Axis, Channels
from dcp_adapters.cli.report.elements import ElementCounts, counts_elements
from dcp_adapters.cli.report.records import CheckpointReport, Compared, TensorReport
from dcp_adapters.cli.report.scales import scale_histograms
from dcp_adapters.cli.report.tiles import Tile, decodable, matrix_shape, tiles
from dcp_adapters.stored.checkpoint import StoredCheckpoint, StoredTensor
from dcp_adapters.stored.errors import ErrorSum
from dcp_adapters.stored.inspect import inspect_checkpoint, kind_of
from dcp_adapters.stored.progress import Advance, unseen
from dcp_adapters.words import matches
from qtensor.tensor import QuantizedTensor

TRIES = 5
ENOUGH = 0.05  # seconds; what took longer is measured once


def measure_checkpoint(
    checkpoint: StoredCheckpoint,
    against: StoredCheckpoint | None = None,
    match: Sequence[str] = (),
    *,
    advance: Advance = unseen,
) -> CheckpointReport:
    """Read and measure every tensor, or those whose names match a glob of `match`.

    `advance` is told the bytes of the checkpoint that are done.

    Raises:
        ValueError: no name matches; the two have no tensor of one name.
        CheckpointUnusable: data can not be read.
    """
    found = inspect_checkpoint(checkpoint, match)
    if match and not found.tensors:
        raise ValueError(f"--match {' '.join(match)} matches no tensor; see the names with inspect")
    theirs: Collection[str] = () if against is None else _matching(against.tensors, match)
    here = {stored.name for stored in found.tensors}
    if against is not None and here and here.isdisjoint(theirs):
        raise ValueError(
            f"{checkpoint.path} and {against.path} have no tensor of one name, so nothing can be compared: for example "
            f"{found.tensors[0].name!r} and {next(iter(theirs or against.tensors), 'no tensor at all')!r}"
        )
    return CheckpointReport(
        path=found.path,
        against=None if against is None else str(against.path),
        tensors=list(_measured(checkpoint, against, found.tensors, advance)),
        files=checkpoint.file_bytes(),
        blobs=len(found.blobs),
        blob_bytes=sum(size for _, size in found.blobs),
        only_in_against=len(set(theirs) - here),
        format_version=found.format_version,
        checksums=found.checksums,
        world_size=found.world_size,
    )


def measure_tensor(
    stored: StoredTensor,
    tensor: Tensor,
    reference: Tensor | None = None,
    *,
    compared: Compared = "no",
    seconds: tuple[float, float] = (0.0, 0.0),
) -> TensorReport:
    """The record of one tensor.

    Args:
        stored: its description.
        tensor: its values, a QuantizedTensor where it is stored quantized.
        reference: those that are right, of the same shape.
        compared: whether there was something to compare with.
        seconds: that reading and writing took.
    """
    rows, columns = matrix_shape(stored.shape)
    channels, total = Channels(rows, columns), ErrorSum()
    quantized = isinstance(tensor, QuantizedTensor)
    counted = isinstance(tensor, QuantizedTensor) and counts_elements(tensor.recipe)
    counts = ElementCounts(tensor.recipe, rows) if isinstance(tensor, QuantizedTensor) and counted else None
    looked_at = decodable(stored.dtype)
    has_channels = looked_at and (quantized or tensor.is_floating_point())
    for tile, right in _beside(tensor, reference) if looked_at else ():
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
        kind=kind_of(stored),
        dtype=str(stored.dtype).removeprefix("torch."),
        shape=stored.shape,
        numel=stored.numel,
        nbytes=stored.nbytes,
        chunks=stored.chunks,
        entries=len(stored.entries),
        quantized=quantized,
        compared=compared,
        error=total.error() if reference is not None else None,
        scales=scale_histograms(tensor) if isinstance(tensor, QuantizedTensor) else (),
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
        read_seconds=seconds[0],
        write_seconds=seconds[1],
    )


def _matching(names: Collection[str], match: Sequence[str]) -> list[str]:
    return [name for name in names if not match or matches(name, match)]


def _measured(
    checkpoint: StoredCheckpoint,
    against: StoredCheckpoint | None,
    tensors: Sequence[StoredTensor],
    advance: Advance,
) -> Iterator[TensorReport]:
    for stored in tensors:
        begin = time.perf_counter()
        tensor = checkpoint.read(stored.name)
        read = time.perf_counter() - begin
        right = against.tensors.get(stored.name) if against is not None else None
        compared = _comparison(stored, right, against)
        reference = against.read(stored.name) if against is not None and compared == "yes" else None
        seconds = read, _seconds_to_write(tensor)
        report = measure_tensor(stored, tensor, reference, compared=compared, seconds=seconds)
        del tensor, reference  # before the next ones are read
        yield report if right is None else replace(report, reference_bytes=right.nbytes)
        advance(stored.nbytes)


def _comparison(stored: StoredTensor, right: StoredTensor | None, against: StoredCheckpoint | None) -> Compared:
    if against is None:
        return "no"
    if right is None:
        return "absent"
    if stored.shape != right.shape:
        return "shape"
    alike = stored.dtype.is_complex == right.dtype.is_complex
    return "yes" if alike and decodable(stored.dtype) and decodable(right.dtype) else "undecodable"


def _beside(tensor: Tensor, reference: Tensor | None) -> Iterator[tuple[Tile, Tensor | None]]:
    """The pieces of a tensor, each with the values that are right."""
    if reference is None:
        yield from ((tile, None) for tile in tiles(tensor))
    else:
        for tile, right in zip(tiles(tensor), tiles(reference), strict=True):
            yield tile, right.values


def _seconds_to_write(tensor: Tensor) -> float:
    parts = list(tensor.parts().values()) if isinstance(tensor, QuantizedTensor) else [tensor]
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
