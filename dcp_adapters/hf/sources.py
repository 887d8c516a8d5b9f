"""Where an export takes tensors from: live tensors and shards, a checkpoint on disk, a directory of dense weights.

A source tells names, formats and shapes at once, and hands out whole tensors one at a time, on the CPU. For shards this
is a collective: all ranks ask for the same tensors in the same order, whichever rank keeps them. A checkpoint or a
directory is read only by the rank that needs the tensor.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.expand import entry_of, expand_leaf, plain_leaf, quantized_local, refuse_hidden
from dcp_adapters.hf.directory import read_directory
from dcp_adapters.hf.names import pieces_of
from dcp_adapters.hf.prefixes import under, weights_prefix
from dcp_adapters.hf.schemes import COUNTS, VALUES, is_quantized
from dcp_adapters.hf.stored_directory import StoredDirectory, is_directory
from dcp_adapters.plain_memory import is_plain
from dcp_adapters.source import Source, Stored
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.torch_private import flatten_state_dict
from fsdp_hooks.byte_sums import Piece
from fsdp_hooks.torch_private import dtensor_around, local_of


class LiveSource(Source):
    """The tensors of a state dict: plain ones, and the shards of this rank.

    Args:
        state_dict: nested or flat.
        prefix: take only names that begin with it, and cut it off; None: find the subtree that holds the weights.
        like: names of the model's weights; they identify the subtree where nothing is quantized.

    Raises:
        ValueError: nothing has the prefix; the weights are in several subtrees; an entry is no tensor.
    """

    def __init__(
        self, state_dict: Mapping[str, Any], prefix: str | None = None, like: Collection[str] | None = None
    ) -> None:
        values = live_tensors(state_dict, prefix, like, what="an export")
        self.entries = {name: entry_of(name, value) for name, value in values.items()}
        self._parts = {name: expand_leaf(name, value) or {"": value} for name, value in values.items()}

    def is_collective(self, name: str) -> bool:
        """Whether it is sharded."""
        return any(
            isinstance(part, DTensor) and not all(place.is_replicate() for place in part.placements)
            for part in self._parts[name].values()
        )

    def parts(self, name: str) -> dict[str, Tensor]:
        """Gathers what is sharded, part by part."""
        return {part: _whole_part(tensor).to("cpu").contiguous() for part, tensor in self._parts[name].items()}

    def help_read(self, name: str) -> None:
        """Takes part in the same collectives, and drops the results."""
        for part in self._parts[name].values():
            _whole_part(part)

    def scalar(self, name: str, part: str) -> float:
        """This rank's value; ranks whose shards do not agree have different ones."""
        tensor = self._parts[name][part]
        return float(local_of(tensor))

    def replicas(self, name: str) -> list[Tensor]:
        """Whatever is not sharded."""
        if self.is_collective(name):
            return []
        parts = self._parts[name].values()
        return [local_of(part).detach().contiguous() for part in parts]


class StoredSource(Source):
    """The tensors of a checkpoint or a directory on disk, under shorter names.

    Args:
        stored: where they are.
        prefix, like: as of LiveSource.
        what: who asks, for errors.

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
        self._names = under(prefix, {name: name for name in stored.entries}, str(stored.path))
        self.entries = {short: replace(stored.entries[name], name=short) for short, name in self._names.items()}

    def parts(self, name: str) -> dict[str, Tensor]:
        """From disk."""
        return self._stored.parts(self._names[name])

    def part(self, name: str, part: str) -> Tensor:
        """From disk."""
        return self._stored.part(self._names[name], part)

    def pieces(self, name: str, part: str) -> Iterator[Piece]:
        """From disk."""
        return self._stored.pieces(self._names[name], part)


class JoinedSources(Source):
    """Several sources as one; a name is taken from the first that has it, and so is a linear.

    A linear of an expert has two names: in a weight [E, N, K] of all experts, and alone.
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
                if not linears[name] or not linears[name] <= taken:
                    self._of.setdefault(name, source)
            taken |= set().union(*linears.values())
        self.entries = {name: source.entries[name] for name, source in self._of.items()}

    def is_collective(self, name: str) -> bool:
        """As its source says."""
        return self._of[name].is_collective(name)

    def parts(self, name: str) -> dict[str, Tensor]:
        """From its source."""
        return self._of[name].parts(name)

    def help_read(self, name: str) -> None:
        """From its source."""
        self._of[name].help_read(name)

    def scalar(self, name: str, part: str) -> float:
        """From its source."""
        return self._of[name].scalar(name, part)

    def replicas(self, name: str) -> list[Tensor]:
        """Of its source."""
        return self._of[name].replicas(name)


def live_tensors(
    state_dict: Mapping[str, Any], prefix: str | None, like: Collection[str] | None = None, *, what: str
) -> dict[str, Tensor]:
    """The tensors of a state dict, aliased, by the names that the plain model gives them.

    Args:
        state_dict: as of LiveSource.
        prefix: as of LiveSource.
        like: as of LiveSource.
        what: who asks, for errors: "an export".

    Raises:
        ValueError: as of LiveSource.
    """
    flat, paths = flatten_state_dict(dict(state_dict))
    quantized = {name for name, value in flat.items() if quantized_local(value) is not None}
    prefix = weights_prefix(paths, quantized, like) if prefix is None else prefix
    values: dict[str, Tensor] = {}
    for name, value in under(prefix, flat, "the state dict").items():
        refuse_hidden(name, value)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; {what} holds tensors only: leave it out")
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no values; load the weights first")
        values[name] = plain_leaf(value).detach()
        if quantized_local(value) is None and not is_plain(local_of(values[name])):
            raise ValueError(
                f"{name} is a {type(local_of(value)).__name__}, of which {what} knows no bytes; expected dense "
                "tensors and those of this library: dequantize it first"
            )
    return values


def source_of(value: Any, prefix: str | None, like: Collection[str] | None = None, *, check: bool = True) -> Source:
    """The source of what `export_hf` was given.

    Args:
        value: a module, a state dict, a calibration's result, the path of a checkpoint or of a dense directory.
        prefix: as of LiveSource.
        like: as of LiveSource.
        check: compare what is read of a checkpoint with its checksums, where it has some.

    Raises:
        CheckpointUnusable: a checkpoint cannot be read.
        ValueError: as of LiveSource; a directory that is quantized, or holds integers that may be codes.
        TypeError: anything else.
    """
    if isinstance(value, str | os.PathLike):
        if not is_directory(value):
            return StoredSource(StoredCheckpoint(value, check=check), prefix, like)
        directory = read_directory(value)
        codes = [name for name, tensor in directory.tensors.items() if tensor.dtype not in VALUES | COUNTS]
        if is_quantized(directory) or codes:
            raise ValueError(f"{directory.path} holds quantized weights; rest= takes a directory of dense ones")
        return StoredSource(StoredDirectory(value), prefix="")
    if not isinstance(value, Mapping) and hasattr(value, "state_dict"):  # a module, the result of a calibration
        value = value.state_dict()
    if not isinstance(value, Mapping):
        raise TypeError(
            f"expected a module, a state dict, a calibration's result or the path of a checkpoint, got "
            f"{type(value).__name__}"
        )
    return LiveSource(value, prefix, like)


def _whole_part(tensor: Tensor) -> Tensor:
    """All of a part, where it lives; a collective for shards. Float8 travels as bytes, which every backend knows."""
    if isinstance(tensor, DTensor):
        local = local_of(tensor)
        dtype = local.dtype
        if dtype.itemsize == 1:
            tensor = dtensor_around(local.view(torch.uint8), tensor.device_mesh, tensor.placements, tensor.shape)
        tensor = tensor.full_tensor().view(dtype)
    return tensor.detach()
