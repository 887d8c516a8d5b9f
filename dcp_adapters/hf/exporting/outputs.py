"""What an export writes: the tensors that one tensor of the source becomes, and the files that they are in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_adapters.hf.files.engine_names import Piece
from dcp_adapters.hf.layouts.forms import SAME, Form
from qtensor.spec.recipes import Recipe


@dataclass(frozen=True)
class Written:
    """One tensor of a file.

    part: of the source's tensor, "" for a dense one, INPUT_SCALE or SHAPE for `value`. piece: the rows it holds; None
    for all.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: str
    form: Form = SAME
    piece: Piece | None = None
    value: float | tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Return its bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Output:
    """What becomes of one tensor of the source.

    recipe: None for a dense one. scale: the global scale under which it is quantized again, None if the bytes stay.
    twin: another tensor of the source, tied to this one; it must be equal, and is not written.
    """

    source: str
    recipe: Recipe | None
    written: tuple[Written, ...]
    scale: float | None = None
    twin: str | None = None

    @property
    def nbytes(self) -> int:
        """Return its bytes in the file."""
        return sum(written.nbytes for written in self.written)


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file: its name and what is in it."""

    name: str
    outputs: tuple[Output, ...]


def files_within(outputs: Sequence[Output], limit: int) -> tuple[FilePlan, ...]:
    """Put outputs into files of at most `limit` bytes; a larger output is alone in its file."""
    names: dict[str, str] = {}
    for output in outputs:
        for written in output.written:
            if written.name in names:
                raise ValueError(f"{written.name} would hold both {names[written.name]} and {output.source}")
            names[written.name] = output.source
    groups: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if groups[-1] and filled + output.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    # The names that transformers and engines look for.
    if len(groups) == 1:
        return (FilePlan("model.safetensors", tuple(groups[0])),)
    return tuple(
        FilePlan(f"model-{number:05}-of-{len(groups):05}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    )
