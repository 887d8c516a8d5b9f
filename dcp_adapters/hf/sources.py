"""Where an export takes tensors from: live tensors and shards, a checkpoint on disk, a directory of dense weights.

A source tells names, formats and shapes at once, and hands out whole tensors, a group at a time. For shards this is a
collective: all ranks ask for the same tensors in the same order, whichever rank keeps them. A checkpoint or a directory
is read only by the rank that needs the tensor.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.expand import (
    entry_of,
    expand_leaf,
    gathered_leaf,
    plain_leaf,
    quantized_local,
    refuse_hidden,
)
from dcp_adapters.hf.directory import read_directory
from dcp_adapters.hf.names import pieces_of
from dcp_adapters.hf.prefixes import under, weights_prefix
from dcp_adapters.hf.schemes import COUNTS, VALUES, is_quantized
from dcp_adapters.hf.stored_directory import StoredDirectory, is_directory
from dcp_adapters.plain_memory import is_plain
from dcp_adapters.source import Group, Keep, Source, Stored
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.torch_private import flatten_state_dict
from fsdp_hooks.byte_sums import Piece
from fsdp_hooks.gathering import Gathering, cut_of
from fsdp_hooks.torch_private import dtensor_around, local_of
from qtensor.high_precision import HighPrecisionWeight


class LiveSource(Source):
    """The tensors of a state dict: plain ones, and the shards of this rank.

    Args:
        state_dict: nested or flat.
        prefix: take only names that begin with it, and cut it off; None: find the subtree that holds the weights.
        like: names of the model's weights; they identify the subtree where nothing is quantized.
        as_gathered: weights with storage="high_precision" are the quantized ones that forwards gather, made when they
            are read; else the dense ones that they are at rest.

    Raises:
        ValueError: nothing has the prefix; the weights are in several subtrees; an entry is no tensor.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        prefix: str | None = None,
        like: Collection[str] | None = None,
        *,
        as_gathered: bool = False,
    ) -> None:
        self._values = live_tensors(state_dict, prefix, like, what="an export", as_gathered=as_gathered)
        self.entries = {name: entry_of(name, value) for name, value in self._values.items()}
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name, value in self._values.items():
            local = local_of(value)
            if isinstance(local, HighPrecisionWeight):
                self.entries[name] = replace(self.entries[name], recipe=local.recipe.stored)
            else:
                self._parts[name] = expand_leaf(name, value) or {"": value}

    def way(self, name: str) -> str:
        """Whether it is sharded, and gathered together with others."""
        value = self._values[name]
        return ("" if not _is_sharded(value) else "one by one") if cut_of(value) is None else "together"

    def begin(self, names: Sequence[str], keep: Keep) -> Group:
        """Gather what is sharded: one collective for all tensors that are cut over the same ranks."""
        return _LiveGroup({name: self._shard(name) for name in dict.fromkeys(names)}, keep)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Gathers what is sharded, part by part."""
        return {part: _whole_part(tensor).to("cpu").contiguous() for part, tensor in self._shard(name).items()}

    def scalar(self, name: str, part: str) -> float:
        """This rank's value; ranks whose shards do not agree have different ones."""
        local = local_of(self._values[name])
        if part and isinstance(local, HighPrecisionWeight):
            return float(local.tensor_wide_scale())
        return float(local_of(self._shard(name)[part]))

    def local(self, name: str) -> Tensor:
        """This rank's shard."""
        return local_of(self._shard(name)[""])

    def replicas(self, name: str) -> list[Tensor]:
        """Whatever is not sharded."""
        if self.way(name):
            return []
        return [local_of(part).detach().contiguous() for part in self._shard(name).values()]

    def _shard(self, name: str) -> dict[str, Tensor]:
        """The parts of this rank's shard: aliases, and of a dense shard what the gather of a forward makes of it."""
        return self._parts.get(name) or expand_leaf(name, gathered_leaf(self._values[name]))


class _LiveGroup(Group):
    """Shards that are gathered, together where they are cut alike, and tensors that every rank has."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], keep: Keep) -> None:
        self._tensors, self._keep = tensors, keep
        alike: dict[tuple[int, ...], dict[Any, Tensor]] = {}
        for name, parts in tensors.items():
            for part, tensor in parts.items():
                cut = cut_of(tensor)
                if cut is not None and len(cut.ranks) > 1:
                    alike.setdefault(cut.ranks, {})[name, part] = tensor
        self._of: dict[Any, Gathering] = {}
        for those in alike.values():
            self._of |= dict.fromkeys(those, Gathering(those, keep.rank))

    def parts(self, name: str) -> dict[str, Tensor] | None:
        """Those that are cut in several ways are gathered here, one by one."""
        found = {}
        for part, tensor in self._tensors[name].items():
            gathering = self._of.get((name, part))
            if gathering is not None:
                gathering.wait()
                if self._keep.here:
                    found[part] = self._placed(gathering.whole((name, part)))
            elif self._keep.here or _is_sharded(tensor):
                found[part] = self._placed(_whole_part(tensor), own=self._keep.own)
        return found if self._keep.here else None

    def close(self) -> None:
        """Also after an error: the other ranks are in the same collectives."""
        for gathering in dict.fromkeys(self._of.values()):
            gathering.free()
        self._of, self._tensors = {}, {}

    def _placed(self, tensor: Tensor, *, own: bool = False) -> Tensor:
        placed = tensor.to(self._keep.device or tensor.device).contiguous()
        return (
            placed.clone()
            if own and placed.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            else placed
        )


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

    def way(self, name: str) -> str:
        """As its source says."""
        return self._of[name].way(name)

    def begin(self, names: Sequence[str], keep: Keep) -> Group:
        """Of each source in turn."""
        return _JoinedGroup(self._of, names, keep)

    def parts(self, name: str) -> dict[str, Tensor]:
        """From its source."""
        return self._of[name].parts(name)

    def local(self, name: str) -> Tensor:
        """From its source."""
        return self._of[name].local(name)

    def scalar(self, name: str, part: str) -> float:
        """From its source."""
        return self._of[name].scalar(name, part)

    def replicas(self, name: str) -> list[Tensor]:
        """Of its source."""
        return self._of[name].replicas(name)


class _JoinedGroup(Group):
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


def live_tensors(
    state_dict: Mapping[str, Any],
    prefix: str | None,
    like: Collection[str] | None = None,
    *,
    what: str,
    as_gathered: bool = False,
) -> dict[str, Tensor]:
    """The tensors of a state dict, aliased, by the names that the plain model gives them.

    Args:
        state_dict: as of LiveSource.
        prefix: as of LiveSource.
        like: as of LiveSource.
        what: who asks, for errors: "an export".
        as_gathered: leave weights with storage="high_precision" as they are; else they become dense.

    Raises:
        ValueError: as of LiveSource.
    """
    flat, paths = flatten_state_dict(dict(state_dict))
    quantized = {name for name, value in flat.items() if quantized_local(value) is not None}
    if as_gathered:
        quantized |= {name for name, value in flat.items() if plain_leaf(value) is not value}
    prefix = weights_prefix(paths, quantized, like) if prefix is None else prefix
    values: dict[str, Tensor] = {}
    for name, value in under(prefix, flat, "the state dict").items():
        refuse_hidden(name, value)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; {what} holds tensors only: leave it out")
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no values; load the weights first")
        values[name] = (value if as_gathered else plain_leaf(value)).detach()
        if quantized_local(value) is None and not is_plain(local_of(plain_leaf(values[name]))):
            raise ValueError(
                f"{name} is a {type(local_of(value)).__name__}, of which {what} knows no bytes; expected dense "
                "tensors and those of this library: dequantize it first"
            )
    return values


def source_of(
    value: Any,
    prefix: str | None,
    like: Collection[str] | None = None,
    *,
    check: bool = True,
    as_gathered: bool = False,
) -> Source:
    """The source of what `export_hf` was given.

    Args:
        value: a module, a state dict, a calibration's result, the path of a checkpoint or of a dense directory.
        prefix: as of LiveSource.
        like: as of LiveSource.
        check: compare what is read of a checkpoint with its checksums, where it has some.
        as_gathered: as of LiveSource.

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
    return LiveSource(value, prefix, like, as_gathered=as_gathered)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(place.is_replicate() for place in tensor.placements)


def _whole_part(tensor: Tensor) -> Tensor:
    """All of a part, where it lives; a collective for shards. Float8 travels as bytes, which every backend knows."""
    if isinstance(tensor, DTensor):
        local = local_of(tensor)
        dtype = local.dtype
        if dtype.itemsize == 1:
            tensor = dtensor_around(local.view(torch.uint8), tensor.device_mesh, tensor.placements, tensor.shape)
        tensor = tensor.full_tensor().view(dtype)
    return tensor.detach()
