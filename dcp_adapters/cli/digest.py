"""The command `digest`: one value for each side, and the first tensor that differs."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_adapters.cli.arguments import add_json, add_progress
from dcp_adapters.cli.printing import FINE, FOUND, show
from dcp_adapters.digests.stored import source_digests, stored_source
from dcp_adapters.hf.reading.stored_directory import is_directory
from dcp_adapters.hf.sources.sources import StoredSource
from dcp_adapters.plain.progress_bar import Advance, ignore_progress, progress_bar
from dcp_adapters.records.weight_sums import DigestDifference, add_twins, first_difference, whole_digest

FORMAT = "dcp_adapters.digest/1"
KINDS = {
    "only_in_a": "only A has it",
    "only_in_b": "only B has it",
    "other": "A and B hold other bytes, dtypes or shapes",
}
ABOUT = """\
Print one value, 32 hex digits, for all weights of a checkpoint or a Hugging Face directory. It depends on the names,
bytes, dtypes and shapes of the tensors alone: not on the number of ranks that wrote them, nor on the kind of directory.
A live model has the same value in Python: dcp_adapters.digest(model). With B, tell the first tensor that differs, with
exit status 1. Of a checkpoint, the subtree that holds the quantized weights counts; --prefix says another one. Where
it was saved with QuantizedSavePlanner(digest=True), tell whether the tensors are what was recorded, too."""
EXAMPLES = """\
examples:
  %(prog)s runs/step-1000
  %(prog)s saved-by-8-ranks saved-by-2-ranks
  %(prog)s runs/step-1000 exported                   does the engine load what was trained?
  %(prog)s runs/step-1000 --json | jq .sides[0].tensors"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("a", metavar="A", help="a checkpoint or a Hugging Face directory")
    parser.add_argument("b", metavar="B", nargs="?", help="what is compared with it")
    parser.add_argument("--prefix", metavar="NAME.", help="what the names of the weights begin with, in checkpoints")
    add_json(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the digest of each side, and the first tensor that differs."""
    paths = [arguments.a] if arguments.b is None else [arguments.a, arguments.b]
    sources = opened(paths, arguments.prefix)
    total = sum(tensor.nbytes for source in sources for tensor in source.entries.values())
    with progress_bar("digesting", total, enabled=arguments.progress) as advance:
        found = digest_of_each(paths, sources, advance=advance)
    show(found.to_json() if arguments.json else found.render())
    return FINE if found.sound else FOUND


@dataclass(frozen=True)
class Side:
    """A checkpoint or a directory, and the digest of each of its tensors.

    recorded: what a checkpoint says of its own tensors; empty if it says nothing.
    """

    path: str
    tensors: dict[str, str]
    recorded: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The digest of all tensors."""
        return whole_digest(self.tensors)

    @property
    def changed(self) -> str | None:
        """The first tensor that is not what was recorded."""
        return next((name for name, digest in self.recorded.items() if self.tensors[name] != digest), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        as_recorded = {"as_recorded": self.changed is None} if self.recorded else {}
        return {"path": self.path, "digest": self.digest, **as_recorded, "tensors": self.tensors}

    def render(self) -> list[str]:
        """Return lines for people: as sha256sum prints it, and what was recorded."""
        lines = [f"{self.digest}  {self.path}"]
        if self.changed is not None:
            lines.append(f"{self.path}: {self.changed} is not what was recorded when it was saved")
        elif self.recorded:
            left = len(self.tensors.keys() - self.recorded.keys())
            of = f", but for {left} of {len(self.tensors)} tensors, of which nothing is recorded" if left else ""
            lines.append(f"{self.path}: as recorded when it was saved{of}")
        return lines


@dataclass(frozen=True)
class Found:
    """One side or two."""

    sides: list[Side]

    @property
    def difference(self) -> DigestDifference | None:
        """The first tensor that differs, in the order of A; None if nothing does, or there is no B."""
        if len(self.sides) < 2:
            return None
        a, b = (side.tensors for side in self.sides)
        return first_difference(a, b)

    @property
    def sound(self) -> bool:
        """Whether nothing differs, neither between the sides nor from what was recorded."""
        return self.difference is None and all(side.changed is None for side in self.sides)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; keys are only ever added under the same FORMAT."""
        first = self.difference
        told = None if first is None else {"name": first.name, "kind": first.kind}
        return {"format": FORMAT, "sides": [side.to_json() for side in self.sides], "first_difference": told}

    def render(self) -> str:
        """Return a text for people."""
        lines = [line for side in self.sides for line in side.render()]
        if self.difference is not None:
            lines.append(f"first difference: {self.difference.name}: {KINDS[self.difference.kind]}")
        return "\n".join(lines)


def opened(paths: list[str], prefix: str | None) -> list[StoredSource]:
    """Open one path or two; a directory is opened as what it is compared with, see StoredDirectory."""
    # a directory has the weights alone, under no prefix
    prefixes = [None if is_directory(path) else prefix for path in paths]
    sources = [stored_source(path, own) for path, own in zip(paths, prefixes, strict=True)]
    if len(paths) < 2:
        return sources
    # a directory is opened with the entries of the other side, so a checkpoint comes first
    turn = is_directory(paths[0]) and not is_directory(paths[1])
    first, second = (1, 0) if turn else (0, 1)
    sources[second] = stored_source(paths[second], prefixes[second], sources[first].entries)
    return sources


def digest_of_each(paths: list[str], sources: list[StoredSource], *, advance: Advance = ignore_progress) -> Found:
    """Return the digests of what was opened.

    A directory leaves out a tensor that is tied to another one. If the other side has both, and they hold the same
    bytes, the directory's counts under both names.
    """
    tensors = [source_digests(source, advance=advance) for source in sources]
    if len(paths) == 2:
        a, b = tensors
        tensors = [add_twins(a, b) if is_directory(paths[0]) else a, add_twins(b, a) if is_directory(paths[1]) else b]
    return Found([Side(path, own, source.recorded) for path, own, source in zip(paths, tensors, sources, strict=True)])
