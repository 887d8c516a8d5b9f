"""What is in a checkpoint or a Hugging Face directory: tensors, recipes, sizes, who wrote it. Reads no tensor data.

The record is plain data: `to_json` is what `--json` prints (its layout has the version FORMAT), `render` is the same
for people.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_adapters.plain.tables import human_bytes, table
from dcp_adapters.plain.words import in_natural_order
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.records.source import Stored
from qtensor.spec.selection import matches

FORMAT = "dcp_adapters.inspect/1"


@dataclass(frozen=True)
class Total:
    """Sums over the tensors of one kind."""

    kind: str
    tensors: int
    parameters: int
    nbytes: int

    @property
    def bytes_per_parameter(self) -> float | None:
        """None if there is no parameter."""
        return self.nbytes / self.parameters if self.parameters else None

    def to_json(self) -> dict[str, Any]:
        """Return the sums and their quotient, as plain data."""
        return {
            "kind": self.kind,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bytes_per_parameter": self.bytes_per_parameter,
        }


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    layout: how a Hugging Face directory is quantized, "" if it is not; None for a checkpoint. chunks: name of a
    tensor -> number of its chunks. format_version: the manifest's, None without one. world_size: at least so many ranks
    wrote it, None if the file names do not tell; a rank that had nothing to write leaves no trace. blobs: (name,
    bytes) of entries of bytes. base: path to the checkpoint that this one is a delta to. stored: bytes in its files.
    """

    path: str
    layout: str | None
    format_version: int | None
    checksums: bool
    world_size: int | None
    files: int
    tensors: Sequence[Entry]
    chunks: Mapping[str, int]
    blobs: Sequence[tuple[str, int]]
    base: str | None = None
    stored: int = 0

    @property
    def totals(self) -> list[Total]:
        """One for each kind of tensor, the largest first."""
        kinds: dict[str, list[Entry]] = {}
        for tensor in self.tensors:
            kinds.setdefault(tensor.kind, []).append(tensor)
        return sorted((_total(kind, found) for kind, found in kinds.items()), key=lambda total: -total.nbytes)

    @property
    def total(self) -> Total:
        """Over all tensors."""
        return _total("total", self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added under the same FORMAT."""
        return {
            "format": FORMAT,
            "checkpoint": self.path,
            "format_version": self.format_version,
            "checksums": self.checksums,
            "world_size_at_least": self.world_size,
            "files": self.files,
            **({} if self.layout is None else {"layout": self.layout}),
            **({} if self.base is None else {"base": self.base, "stored_bytes": self.stored}),
            "tensors": [_tensor_json(tensor, self.chunks[tensor.name]) for tensor in self.tensors],
            "bytes_entries": [{"name": name, "bytes": size} for name, size in self.blobs],
            "totals": [total.to_json() for total in self.totals],
            "total": self.total.to_json(),
        }

    def render(self) -> str:
        """Return a text for people."""
        tensors = [
            (
                tensor.name,
                tensor.kind,
                str(list(tensor.shape)),
                " ".join(part for part in tensor.parts() if part),
                str(self.chunks[tensor.name]),
                human_bytes(tensor.nbytes),
            )
            for tensor in self.tensors
        ]
        totals = [
            (
                total.kind,
                str(total.tensors),
                f"{total.parameters:,}",
                human_bytes(total.nbytes),
                "-" if total.bytes_per_parameter is None else f"{total.bytes_per_parameter:.4g}",
            )
            for total in (*self.totals, self.total)
        ]
        blocks = [
            self._head(),
            table(
                ("tensor", "kind", "shape", "parts", "chunks", "bytes"),
                tensors,
                right=("shape", "chunks", "bytes"),
                style=_style_of,
            ),
        ]
        if self.blobs:
            blobs = [(name, human_bytes(size)) for name, size in self.blobs]
            blocks.append(table(("bytes entry", "bytes"), blobs, right=("bytes",), style=_style_of))
        columns = ("kind", "tensors", "parameters", "bytes", "bytes/parameter")
        blocks.append(table(columns, totals, right=columns[1:], style=_style_of))
        return "\n\n".join(blocks)

    def _head(self) -> str:
        if self.layout is not None:
            quantized = f"layout {self.layout}" if self.layout else "not quantized"
            return f"{self.path}: Hugging Face directory, {quantized}, files: {self.files}"
        saved = (
            "no quantized tensors (not saved with QuantizedSavePlanner)"
            if self.format_version is None
            else f"format version {self.format_version}"
        )
        world = "unknown" if self.world_size is None else f"at least {self.world_size}"
        if self.base is not None:
            saved += f", {human_bytes(self.stored)} stored as a delta to {self.base}"
        return (
            f"{self.path}: {saved}, checksums: {'yes' if self.checksums else 'no'}, "
            f"world size: {world}, files: {self.files}"
        )


def inspect_checkpoint(checkpoint: Stored, patterns: Sequence[str] = ()) -> Inspection:
    """Describe a checkpoint, or only the entries whose names match one of the globs, in the order of their names."""
    files, globs = checkpoint.file_bytes(), patterns or ["*"]
    chosen = [name for name in in_natural_order(checkpoint.entries) if matches(name, globs)]
    return Inspection(
        path=str(checkpoint.path),
        layout=checkpoint.layout,
        format_version=checkpoint.format_version,
        checksums=checkpoint.has_checksums,
        world_size=_world_size(files),
        files=len(files),
        tensors=[checkpoint.entries[name] for name in chosen],
        chunks={name: checkpoint.chunks(name) for name in chosen},
        base=checkpoint.base,
        stored=sum(files.values()),
        blobs=[
            (name, checkpoint.blob_size(name)) for name in in_natural_order(checkpoint.blobs) if matches(name, globs)
        ],
    )


def _style_of(column: str, cell: str) -> str:
    """Return the style of a cell: quantized kinds and sizes in colour, dense kinds plain, details faint."""
    if column == "kind":
        return "bold" if cell == "total" else "" if isinstance(getattr(torch, cell, None), torch.dtype) else "cyan"
    return {"bytes": "green", "parts": "dim", "chunks": "dim", "shape": "dim"}.get(column, "")


def _total(kind: str, tensors: Sequence[Entry]) -> Total:
    return Total(kind, len(tensors), sum(tensor.numel for tensor in tensors), sum(tensor.nbytes for tensor in tensors))


def _world_size(files: Iterable[str]) -> int | None:
    """Return one more than the highest rank in file names `__<rank>_<...>.distcp`; None if any is another name."""
    found = [re.fullmatch(r"__(\d{1,9})_\w+\.distcp", file) for file in files]
    return max((int(match[1]) + 1 for match in found if match), default=None) if all(found) else None


def _tensor_json(tensor: Entry, chunks: int) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "recipe": None if tensor.recipe is None else tensor.recipe.to_json(),
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "parts": [part for part in tensor.parts() if part],
        "bytes": tensor.nbytes,
        "chunks": chunks,
    }
