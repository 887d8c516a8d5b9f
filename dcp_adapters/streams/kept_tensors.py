"""What changed in exported tensors since the version that a stream handed out last, which it keeps on the host.

    a pass     each tensor, as it comes, is compared with the kept one; its changes are staged
    complete   the staged changes move the kept tensors to the new version; a pass that was left, or failed, is dropped

Staged are positions and steps, or the whole tensor where those would take more bytes. So a pass takes, beside the kept
copy, at most one more, and next to nothing where little changes. Changes are encoded when all tensors have come: a
delta has them by dtype and name, a stream in the order of its groups.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dcp_adapters.delta.coding.changes import Changes, changes_between, units
from dcp_adapters.delta.make import sum_of
from dcp_adapters.delta.patches.encoder import Encoder
from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.state_digest import state_digest
from dcp_adapters.records.entry import Entry
from dcp_adapters.streams.buckets import TensorRecord
from fsdp_hooks.ranks.across_ranks import Ranks, on_all


class KeptTensors:
    """The tensors of the last complete pass.

    version: of that pass; 0 before the first. tensors, sums: by name, on ranks that receive; empty elsewhere.
    """

    def __init__(self, records: Iterable[TensorRecord]) -> None:
        self.layout = StateLayout.of(Entry(each.name, None, each.shape, each.dtype) for each in records)
        self.version = 0
        self.tensors: dict[str, Tensor] = {}
        self.sums: dict[str, int] = {}


def refuse_other_version(held: KeptTensors | None, version: int, ranks: Ranks, *, useless: bool) -> None:
    """Refuse a delta since another version than the one that is kept, with the same text on all ranks.

    Args:
        held: the tensors that are kept; None if the stream keeps none.
        version: that this rank was asked to begin at.
        ranks: of the stream.
        useless: whether this rank has a sender and receives nothing.

    Raises:
        ValueError: on all ranks, if it is so on one of them.
    """
    kept = 0 if held is None else held.version
    told = on_all(ranks, lambda: (version, useless))
    asked = next((each for each, _ in told if each != kept), version)
    if not kept or asked != kept:
        why = f"the stream keeps version {kept}" if kept else "no version is complete yet"
        if held is None:
            why = "the stream keeps none: make it with keep_last=True"
        raise ValueError(
            f"WeightStream: a delta since version {asked!r} was asked for, and {why}; send the full version, by "
            "send() or iteration"
        )
    wrong = next((rank for rank, (_, each) in enumerate(told) if each), None)
    if wrong is not None:
        raise ValueError(
            f"WeightStream: rank {wrong} has a sender, and receives nothing; give it to rank 0, or make the "
            'stream with to="all"'
        )


class Pass:
    """One pass over a stream."""

    def __init__(self, kept: KeptTensors) -> None:
        self._kept, self._base = kept, kept.version
        self._staged: dict[str, Sequence[Changes] | Tensor] = {}
        self._sums: dict[str, int] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        """Stage what the pass has for a name; the tensor itself is not kept."""
        host = tensor.to("cpu")
        self._sums[name] = sum_of(host)
        staged = _sparse_changes(self._kept.tensors[name], host) if name in self._kept.tensors else None
        if staged is None:
            # contiguous, or later changes would be added to a copy
            self._staged[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        else:
            self._staged[name] = staged

    def delta(self) -> Delta:
        """What leads from the kept version to this one, once everything has been taken.

        Raises:
            ImportError: there is no zstd.
        """
        layout = self._kept.layout
        encoder = Encoder(layout)
        for run in layout.runs:
            for name in run.keys:
                for changes in self._changes(name):
                    encoder.add(name, changes)
        states = state_digest(layout, self._kept.sums, {}), state_digest(layout, self._sums, {})
        return Delta.made(layout, states, encoder.frames(), {}, (self._base, self._base + 1))

    def complete(self) -> None:
        """Make this the kept version.

        Raises:
            RuntimeError: another pass has been completed since this one began.
        """
        if self._kept.version != self._base:
            raise RuntimeError(
                f"WeightStream: a pass that began after version {self._base} ended after version "
                f"{self._kept.version} was complete; with keep_last=True, end or leave one pass before the next one"
            )
        for name, staged in self._staged.items():
            if isinstance(staged, Tensor):
                self._kept.tensors[name] = staged
                continue
            flat = units(self._kept.tensors[name])
            for changes in staged:
                flat[changes.positions] += changes.steps
        self._kept.sums = self._sums
        self._kept.version += 1

    def _changes(self, name: str) -> Iterable[Changes]:
        staged = self._staged[name]
        return changes_between(self._kept.tensors[name], staged) if isinstance(staged, Tensor) else staged


def _sparse_changes(old: Tensor, new: Tensor) -> list[Changes] | None:
    """What changed, in pieces; None where these have as many bytes as the tensor."""
    found, nbytes = [], 0
    for changes in changes_between(old, new):
        nbytes += changes.positions.nbytes + changes.steps.nbytes
        if nbytes >= new.nbytes:
            return None
        found.append(changes)
    return found
