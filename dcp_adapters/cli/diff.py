"""The command `diff`: how two checkpoints differ; one tensor of each is in memory at a time.

Tensors are compared by their logical names, so a quantized one meets the dense one it was made from, and it does not
matter how many ranks wrote either side. Where both sides have a tensor of one shape, the values of the first are the
reference of the error (see stored/numeric_error.py); remainders of masters are the whole numbers that they stand for.
The manifest and the checksums are about the tensors and not compared.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.cli.arguments import add_json, add_progress, open_stored
from dcp_adapters.cli.printing import FINE, FOUND, show
from dcp_adapters.plain.progress_bar import Advance, ignore_progress, progress_bar
from dcp_adapters.plain.tables import table
from dcp_adapters.plain.words import in_natural_order
from dcp_adapters.records.entry import Entry, parts_of
from dcp_adapters.records.masters import is_remainder
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.numeric_error import SLICE, Error, error_between
from qtensor.states.kinds import WORD

FORMAT = "dcp_adapters.diff/1"
ABOUT = """\
Compare two checkpoints tensor by tensor. Tensors are matched by name, whatever number of ranks wrote them; a quantized
one is compared with a dense one, or with one of another recipe, by its dequantized values. For each tensor that
differs: how many bytes, the largest absolute error, the relative error (Frobenius norm) and the signal-to-noise ratio
of B, with A as the reference. One tensor of each is in memory at a time. Exit status 1 if anything differs."""
EXAMPLES = """\
examples:
  %(prog)s saved-by-8-ranks saved-by-2-ranks
  %(prog)s dense quantized                           how much did quantizing cost?"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("a", metavar="A", help="the reference")
    parser.add_argument("b", metavar="B", help="what is compared with it")
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print what differs."""
    a, b = open_stored(arguments.a), open_stored(arguments.b)
    total = sum(tensor.nbytes for tensor in a.entries.values())
    with progress_bar("comparing", total, enabled=arguments.progress) as advance:
        found = diff(a, b, advance=advance)
    show(found.to_json() if arguments.json else found.render())
    return FOUND if found.differences else FINE


@dataclass(frozen=True)
class Difference:
    """One name.

    kind: only_in_a, only_in_b, shape, recipe (other recipe, or quantized and dense), dtype, bytes (the same kind of
    tensor with other bytes), or blob (entries of bytes). a, b: what each side holds, in words.
    """

    name: str
    kind: str
    a: str | None = None
    b: str | None = None
    differing_bytes: int | None = None
    error: Error | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; None if something does not apply."""
        nothing = dict.fromkeys(("max_abs", "relative", "snr_db", "not_finite"))
        return {
            "name": self.name,
            "kind": self.kind,
            "a": self.a,
            "b": self.b,
            "differing_bytes": self.differing_bytes,
            **(nothing if self.error is None else self.error.to_json()),
        }


@dataclass(frozen=True)
class Diff:
    """All differences; `compared` names were looked at."""

    a: str
    b: str
    compared: int
    differences: list[Difference]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added under the same FORMAT."""
        return {
            "format": FORMAT,
            "a": self.a,
            "b": self.b,
            "compared": self.compared,
            "differences": [difference.to_json() for difference in self.differences],
        }

    def render(self) -> str:
        """Return a text for people."""
        if not self.differences:
            return f"no differences ({self.compared} entries compared)"
        columns = ("name", "difference", "A", "B", "bytes", "max |B-A|", "|B-A|/|A|", "SNR dB")
        body = table(columns, [_row(difference) for difference in self.differences], right=columns[4:])
        return f"{body}\n\n{len(self.differences)} of {self.compared} entries differ"


def diff(a: Stored, b: Stored, *, advance: Advance = ignore_progress) -> Diff:
    """Compare two checkpoints; `advance` is told the bytes of A that are done.

    Raises:
        ValueError: neither side has anything to compare.
    """
    found = []
    names = in_natural_order({*a.entries, *b.entries})
    for name in names:
        left, right = a.entries.get(name), b.entries.get(name)
        found.append(_compare_tensors(a, b, left, right))
        advance(left.nbytes if left else 0)
    blobs = in_natural_order({*a.blobs, *b.blobs})
    found += [_compare_blobs(a, b, name) for name in blobs]
    compared = len(names) + len(set(blobs) - set(names))
    if not compared:
        raise ValueError(f"{a.path} and {b.path}: neither holds tensors or other entries, so nothing can be compared")
    return Diff(str(a.path), str(b.path), compared, [difference for difference in found if difference])


def _compare_tensors(a: Stored, b: Stored, left: Entry | None, right: Entry | None) -> Difference | None:
    if left is None or right is None:
        return _say_only(left, right)
    words = Difference(left.name, "bytes", _words(left), _words(right))
    if left.shape != right.shape:
        return replace(words, kind="shape")
    x, y = _numbers(a.read(left.name), left.name), _numbers(b.read(right.name), right.name)
    if left.recipe != right.recipe:
        return replace(words, kind="recipe", error=error_between(x, y))
    if left.dtype != right.dtype:
        return replace(words, kind="dtype", error=error_between(x, y))
    differing = _count_differing_bytes(x, y)
    return replace(words, differing_bytes=differing, error=error_between(x, y)) if differing else None


def _numbers(x: Tensor, name: str) -> Tensor:
    """Return a remainder as the whole numbers that it is: as float16, most differences of them are nonsense."""
    return x.view(torch.int16) if is_remainder(name) and x.dtype == WORD else x


def _say_only(left: Entry | None, right: Entry | None) -> Difference:
    if left is not None:
        return Difference(left.name, "only_in_a", a=_words(left))
    assert right is not None
    return Difference(right.name, "only_in_b", b=_words(right))


def _compare_blobs(a: Stored, b: Stored, name: str) -> Difference | None:
    """Compare an entry of bytes; if the other side has a tensor of this name, both are reported as missing."""
    if name not in b.blobs:
        return Difference(name, "only_in_a", a="bytes")
    if name not in a.blobs:
        return Difference(name, "only_in_b", b="bytes")
    x, y = a.read_blob(name), b.read_blob(name)
    if x == y:
        return None
    common = min(len(x), len(y))
    # a copy: torch warns of tensors over memory that may not be written
    left, right = (torch.frombuffer(bytearray(data[:common]), dtype=torch.uint8) for data in (x, y))
    differing = int((left != right).sum()) + abs(len(x) - len(y))
    return Difference(name, "blob", f"{len(x)} bytes", f"{len(y)} bytes", differing)


def _count_differing_bytes(x: Tensor, y: Tensor) -> int:
    count = 0
    for p, q in zip(parts_of(x).values(), parts_of(y).values(), strict=True):
        for left, right in zip(_slices(p), _slices(q), strict=True):
            count += int((left.view(torch.uint8) != right.view(torch.uint8)).sum())
    return count


def _slices(x: Tensor) -> Iterator[Tensor]:
    """Yield 1-D pieces of at most SLICE elements."""
    flat = x.contiguous().reshape(-1)
    return (flat[start : start + SLICE] for start in range(0, flat.numel(), SLICE))


def _words(tensor: Entry) -> str:
    appearance = f" as {dtype_name(tensor.dtype)}" if tensor.recipe is not None else ""
    kind = "remainder" if is_remainder(tensor.name) and tensor.dtype == WORD else tensor.kind
    return f"{kind}{appearance} {list(tensor.shape)}"


def _row(difference: Difference) -> tuple[str, ...]:
    error, differing = difference.error, difference.differing_bytes
    numbers = ("", "", "") if error is None else error.cells()
    note = f" ({error.not_finite} not finite)" if error is not None and error.not_finite else ""
    kind = difference.kind.replace("_", " ") + note
    return (
        difference.name,
        kind,
        difference.a or "",
        difference.b or "",
        "" if differing is None else str(differing),
        *numbers,
    )
