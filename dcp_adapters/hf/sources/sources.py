"""Where an export takes tensors from: live tensors and shards, a checkpoint on disk, a directory of dense weights.

A source tells names, formats and shapes at once, and hands out whole tensors, a group at a time. For shards
(live_source.py) this is a collective: all ranks ask for the same tensors in the same order, whichever rank keeps them.
A checkpoint or a directory is read only by the rank that needs the tensor.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dcp_adapters.hf.files.directory import read_directory
from dcp_adapters.hf.files.engine_names import pieces_of
from dcp_adapters.hf.models.adapters import own_tensors, state_of_module
from dcp_adapters.hf.models.prefixes import under, weights_prefix
from dcp_adapters.hf.reading.schemes import COUNTS, VALUES, is_quantized
from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.hf.sources.live_source import LiveSource
from dcp_adapters.records.rotations import blocks_in, say_inputs, weight_beside
from dcp_adapters.records.source import Keep, Source, Stored, TensorGroup
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from fsdp_hooks.kernels.byte_sums import TensorPiece
from fsdp_hooks.ranks.across_ranks import Ranks


class StoredSource(Source):
    """The tensors of a checkpoint or a directory on disk, under shorter names.

    Args:
        stored: where they are.
        prefix: as of LiveSource.
        like: as of LiveSource.
        what: who asks, for errors.
        adapters: as of LiveSource.

    Attributes:
        prefix: that was cut off.
        recorded: digests of tensors, by the shorter names, as they were recorded when it was saved.

    Raises:
        ValueError: as of LiveSource.
    """

    def __init__(
        self,
        stored: Stored,
        prefix: str | None = None,
        like: Collection[str] | None = None,
        *,
        what: str = "an export",
        adapters: str | None = None,
    ) -> None:
        self._stored = stored
        if prefix is None:
            places = {name: stored.paths.get(entry.part_keys()[0], (name,)) for name, entry in stored.entries.items()}
            quantized = {name for name, entry in stored.entries.items() if entry.recipe is not None}
            prefix = weights_prefix(places, quantized, like)
        blobs = [name for name in stored.blobs if name.startswith(prefix)]
        if blobs:
            raise ValueError(
                f"{stored.path}: {blobs[0]} is an entry of bytes; {what} holds tensors only: say by prefix=... "
                '(--prefix) under which name the weights are, for example "model."'
            )
        self.prefix = prefix
        self._names = under(prefix, {name: name for name in stored.entries}, str(stored.path))
        if adapters is not None:
            self._names = own_tensors(self._names, adapters)
        self.entries = {short: replace(stored.entries[name], name=short) for short, name in self._names.items()}
        self.recorded = {short: stored.digests[name] for short, name in self._names.items() if name in stored.digests}

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read from disk."""
        return self._stored.parts(self._names[name])

    def part(self, name: str, part: str) -> Tensor:
        """Read from disk."""
        return self._stored.part(self._names[name], part)

    def pieces(self, name: str, part: str) -> Iterator[TensorPiece]:
        """Read from disk."""
        return self._stored.pieces(self._names[name], part)


class JoinedSources(Source):
    """Several sources as one; a name is taken from the first source that has it, and so is a linear.

    A linear of an expert has two names: in a weight [E, N, K] of all experts, and alone.

    Raises:
        ValueError: a weight is taken from one, and another says that its inputs are rotated, or in other blocks.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._of: dict[str, Source] = {}
        taken: set[str] = set()
        for source in sources:
            linears = {
                name: {piece.module for piece in pieces_of(name, entry.shape) or ()}
                for name, entry in source.entries.items()
            }
            for name in source.entries:
                # Else a weight of all experts from one source would stand beside linears of the same experts from the
                # other.
                if not linears[name] or not linears[name] <= taken:
                    self._of.setdefault(name, source)
            taken |= set().union(*linears.values())
        self.entries = {name: source.entries[name] for name, source in self._of.items()}
        _check_rotations(sources, self._of)

    def own_name(self, name: str) -> str:
        """Ask its source."""
        return self._of[name].own_name(name)

    def check_spanned(self, group: Ranks) -> None:
        """Ask all sources."""
        for source in dict.fromkeys(self._of.values()):
            source.check_spanned(group)

    def way(self, name: str) -> str:
        """Ask its source."""
        return self._of[name].way(name)

    def begin(self, names: Sequence[str], keep: Keep) -> TensorGroup:
        """Begin with each source in turn."""
        return _JoinedGroup(self._of, names, keep)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read from its source."""
        return self._of[name].parts(name)

    def local(self, name: str) -> Tensor:
        """Read from its source."""
        return self._of[name].local(name)

    def scalar(self, name: str, part: str) -> float:
        """Read from its source."""
        return self._of[name].scalar(name, part)

    def replicas(self, name: str) -> list[Tensor]:
        """Ask its source."""
        return self._of[name].replicas(name)

    def shared(self, name: str) -> tuple[str, Tensor] | None:
        """Ask its source."""
        return self._of[name].shared(name)


def _check_rotations(sources: Sequence[Source], of: Mapping[str, Source]) -> None:
    """Raise ValueError if a source says of another one's weight that it is rotated: its owner alone knows that."""
    said = [(source, blocks_in(source.entries)) for source in sources]
    for source, blocks in said:
        for name, block in blocks.items():
            weight = weight_beside(name)
            owner = of.get(weight, source)
            own = owner.entries[name].shape[0] if name in owner.entries else 0
            if own != block and not (own and weight in source.entries):
                raise ValueError(
                    f"{weight} is taken from one source, where it is for {say_inputs(own)}, and another says by {name} "
                    f"that it is for {say_inputs(block)}; take both from the same"
                )


class _JoinedGroup(TensorGroup):
    """A group of each source."""

    def __init__(self, sources: Mapping[str, Source], names: Sequence[str], keep: Keep) -> None:
        self._sources, self._groups = sources, {}
        for source in dict.fromkeys(sources[name] for name in names):
            self._groups[source] = source.begin([name for name in names if sources[name] is source], keep)

    def parts(self, name: str) -> dict[str, Tensor] | None:
        return self._groups[self._sources[name]].parts(name)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def source_of(
    value: Any,
    prefix: str | None,
    like: Collection[str] | None = None,
    *,
    check: bool = True,
    adapters: str = "raise",
) -> Source:
    """Return the source of what `export_hf` was given.

    Args:
        value: a module, a state dict, a calibration's result, the path of a checkpoint or of a dense directory.
        prefix: as of LiveSource.
        like: as of LiveSource.
        check: compare what is read of a checkpoint with its checksums, if it has some.
        adapters: "raise", or "base" to take the model below them.

    Raises:
        CheckpointUnusable: a checkpoint cannot be read.
        ValueError: as of LiveSource; a directory that is quantized, or holds integers that may be codes.
        TypeError: anything else.
    """
    if isinstance(value, str | os.PathLike):
        if not is_directory(value):
            return StoredSource(StoredCheckpoint(value, check=check), prefix, like, adapters=adapters)
        directory = read_directory(value)
        # A dense directory may hold counters, so integers alone prove nothing; other dtypes are codes.
        codes = [name for name, tensor in directory.tensors.items() if tensor.dtype not in VALUES | COUNTS]
        if is_quantized(directory) or codes:
            raise ValueError(f"{directory.path} holds quantized weights; rest= takes a directory of dense ones")
        # A directory is flat: there is no subtree to look for.
        return StoredSource(StoredDirectory(value), prefix="")
    if isinstance(value, nn.Module):
        return LiveSource(state_of_module(value, adapters), prefix, like)
    if not isinstance(value, Mapping) and hasattr(value, "state_dict"):  # the result of a calibration
        value = value.state_dict()
    if not isinstance(value, Mapping):
        raise TypeError(
            f"expected a module, a state dict, a calibration's result or the path of a checkpoint, got "
            f"{type(value).__name__}"
        )
    return LiveSource(value, prefix, like, adapters=adapters)
