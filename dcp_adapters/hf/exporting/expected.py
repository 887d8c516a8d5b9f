"""What the files of an export must hold: the names that its config's model asks for, and no other.

    names          of the tensors in memory, in the files: as the config's directory has them, or else as transformers
                   would write them (file_names.py)
    in_files       a source under these names
    check_outputs  what is to be written, compared with what transformers would ask for (architectures.py), or without
                   it with the names in the config's directory

So a weight is written once, under the name that engines look for, and nothing is left for them to make up.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dcp_adapters.hf.exporting.config import ModelConfig
from dcp_adapters.hf.exporting.plan import ExportPlan
from dcp_adapters.hf.layouts.layout import Layout
from dcp_adapters.hf.models.architectures import Architecture, Read, architecture_of, architecture_said
from dcp_adapters.hf.models.file_names import FileNames, names_of, without_beside
from dcp_adapters.plain.words import few_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.source import Keep, Source, TensorGroup
from fsdp_hooks.kernels.byte_sums import TensorPiece
from fsdp_hooks.ranks.across_ranks import Ranks

SHOWN = 4  # names in a sentence


@dataclass(frozen=True)
class Expected:
    """What is known of the files.

    names: of tensors in memory. held: names in the config's directory, those of linears of experts; none if it has no
    weights. architecture: of the config, as transformers builds it to read the layout; None if it is not known.
    said: whether the config names its class; else it is guessed. own: of what is exported.
    """

    names: FileNames = field(default_factory=FileNames)
    held: frozenset[str] = frozenset()
    architecture: Architecture | None = None
    said: bool = True
    own: Architecture | None = None

    def named(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names of a source's tensors to their names in the files.

        Raises:
            ValueError: the files have it in another form.
        """
        every = list(names)
        own = without_beside(every)
        found = names_of(own, self.names, self.held, self._read(own))
        other = [name for name in own if name in self.names.otherwise and found[name] == name and name not in self.held]
        if other:
            its = self.names.otherwise[other[0]]
            raise ValueError(
                f"{few_of(other, SHOWN)}: files of this model hold {few_of(its, SHOWN)} instead, from which "
                "transformers makes it, and the export does not do the reverse; leave it dense and out of what is "
                "exported, and take it from the model's directory by rest=... (--rest)"
            )
        beside = FileNames(found)
        return {name: found.get(name) or beside.file_name(name) for name in every}

    @property
    def asks(self) -> Collection[str]:
        """Return the names of what transformers builds to read the files."""
        return () if self.architecture is None else self.architecture.shapes

    def strays(self, weights: Iterable[str]) -> list[str]:
        """Return names that transformers would read, and that the config's directory does not have."""
        own = self.own
        if own is None or not self.held:
            return []
        spare = own.spare | set(own.tied.values())
        parents = {name.rpartition(".")[0] for name in self.held}
        whole = tuple(f"{parent}." for parent in parents if parent.rpartition(".")[2] == "experts")  # linears of these
        return [
            name
            for name in weights
            if name in own.shapes and name not in self.held | spare and not name.startswith(whole)
        ]

    def is_joined(self, name: str) -> bool:
        """Return whether transformers' rules join the linears of the files to this weight of all experts."""
        return name in self.names.in_memory and name not in self.names.whole

    def _read(self, own: Collection[str]) -> dict[str, str]:
        """Map names of files of other versions to those in memory."""
        known = self.names.in_files.keys() | self.names.in_memory.keys() | self.held
        if self.own is None or all(name in known for name in own):
            return {}
        return self.own.named(own).in_memory

    def in_files(self, source: Source) -> Source:
        """Return a source under the names of the files."""
        named = self.named(source.entries)
        return source if all(name == other for name, other in named.items()) else RenamedSource(source, named)


UNKNOWN = Expected()


def expected_of(described: ModelConfig, given: Any, layout: Layout) -> Expected:
    """Return what files must hold.

    Args:
        described: the model's description.
        given: what is exported; a model of transformers tells its own names.
        layout: of the files.
    """
    own = architecture_of(given)
    config = {**described.values}
    # A config may name no class, but the model that is exported has one.
    if own is not None and not config.get("architectures"):
        config["architectures"] = [own.class_name]
    built = architecture_said(config, quantized_as=layout.name)
    names = FileNames()
    architecture = own or built
    if architecture is not None:
        written: Collection[str] = described.weights
        if not written:
            # Without a directory the files are named as `save_pretrained` would name them.
            with suppress(Exception):  # an operation that transformers cannot do on the meta device: names stay
                written = architecture.written()
        names = architecture.named(written)
    return Expected(names, described.weights, built, bool(config.get("architectures")), architecture)


class RenamedSource(Source):
    """A source whose tensors have other names.

    Args:
        source: it.
        names: its names -> the other ones.

    Raises:
        ValueError: two tensors would have one name.
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._own = source, {other: name for name, other in names.items()}
        if len(self._own) < len(names):
            other = next(name for name, other in names.items() if self._own[other] != name)
            raise ValueError(
                f"{other} and {self._own[names[other]]} are both {names[other]} in the model's files; leave one of "
                "them out"
            )
        self.entries = {
            other: Entry(other, entry.recipe, entry.shape, entry.dtype)
            for other, entry in ((names[name], entry) for name, entry in source.entries.items())
        }

    def own_name(self, name: str) -> str:
        """Return the name in memory."""
        return self._source.own_name(self._own[name])

    def check_spanned(self, group: Ranks) -> None:
        """Ask the source, by its own name."""
        self._source.check_spanned(group)

    def way(self, name: str) -> str:
        """Ask the source, by its own name."""
        return self._source.way(self._own[name])

    def begin(self, names: Sequence[str], keep: Keep) -> TensorGroup:
        """Ask the source, by its own name."""
        return _RenamedGroup(self._source.begin([self._own[name] for name in names], keep), self._own)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read from the source, by its own name."""
        return self._source.parts(self._own[name])

    def part(self, name: str, part: str) -> Tensor:
        """Read from the source, by its own name."""
        return self._source.part(self._own[name], part)

    def pieces(self, name: str, part: str) -> Iterator[TensorPiece]:
        """Read from the source, by its own name."""
        return self._source.pieces(self._own[name], part)

    def local(self, name: str) -> Tensor:
        """Ask the source, by its own name."""
        return self._source.local(self._own[name])

    def scalar(self, name: str, part: str) -> float:
        """Ask the source, by its own name."""
        return self._source.scalar(self._own[name], part)

    def replicas(self, name: str) -> list[Tensor]:
        """Ask the source, by its own name."""
        return self._source.replicas(self._own[name])

    def shared(self, name: str) -> tuple[str, Tensor] | None:
        """Ask the source, by its own name."""
        return self._source.shared(self._own[name])


class _RenamedGroup(TensorGroup):
    def __init__(self, group: TensorGroup, own: Mapping[str, str]) -> None:
        self._group, self._own = group, own

    def parts(self, name: str) -> dict[str, Tensor] | None:
        return self._group.parts(self._own[name])

    def close(self) -> None:
        self._group.close()


# -- what is to be written ---------------------------------------------------------------------------------------------


def check_outputs(plan: ExportPlan, expected: Expected, *, tied: bool, rest: bool) -> None:
    """Refuse files that lack tensors of the model, hold one twice, or hold any that it does not have.

    Args:
        plan: of the export.
        expected: of its config.
        tied: whether the config ties the output projection to the embedding.
        rest: whether a second source was given.

    Raises:
        ValueError: with the names.
    """
    weights = plan.weights
    read = None if expected.architecture is None else expected.architecture.reads(weights)
    if read is not None and not expected.said and (read.unexpected or read.unlike) and not read.twice:
        read = None  # the class is a guess, and another one may know them; the config may not even say the sizes
    if read is not None:
        missing = list(read.missing)
        unknown = [name for name in read.unexpected if name not in expected.held]
        unexpected = list(dict.fromkeys(unknown + expected.strays(weights)))
        _refuse_misfits(read)
    elif expected.held:
        # Models compute inv_freq, and files of old versions have it; a tied output projection is written as the
        # embedding.
        left = ("inv_freq", "lm_head.weight") if tied else ("inv_freq",)
        missing = sorted(name for name in expected.held - weights.keys() if not name.endswith(left))
        unexpected = [name for name in weights if name not in expected.held and not name.endswith("lm_head.weight")]
    else:
        return
    if unexpected:
        raise ValueError(
            f"{_few(unexpected)}: the config's model has no such tensor, so engines would not read it. Names must be "
            "those of the model or of its files, all behind one prefix or without any; cut off a prefix by prefix=... "
            "(--prefix), leave out what is not the model's, or give the config of the model that has it"
        )
    if missing:
        who = "the source and rest= lack" if rest else "the source lacks"
        raise ValueError(
            f"{who} {len(missing)} tensors of the model ({_few(missing)}); say by rest=... (--rest) where they are "
            "taken from, for example the model's directory"
        )


def _refuse_misfits(read: Read) -> None:
    if read.twice:
        own, names = next(iter(read.twice.items()))
        raise ValueError(
            f"{' and '.join(names[:2])} are both {own} of the model, which would be written twice ({len(read.twice)} "
            "such); leave one of them out"
        )
    if read.unlike:
        own, found = next(iter(read.unlike.items()))
        raise ValueError(
            f"{own}: {found} ({len(read.unlike)} such); give the config of the model that is exported, or leave out "
            "what is not its"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:SHOWN], *["..."] * (len(names) > SHOWN)])
