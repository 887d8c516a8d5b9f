"""All conversions of one load, and their agreement on shared scales: one fused all-reduce for each distinct group.

    local plan     every rank   names what it converts, and the ranks that hold pieces of it
    global plan    coordinator  compares: all ranks of a weight convert it, to one recipe, or none does
    finish_plan    every rank   opens a group of this load for each group that has to agree
    resolve        reader       the buffers of a conversion are made with its first item
    commit         reader       with its last item a conversion is written; those with shared scales (between ranks, or
                                with other weights) are kept until all of them have arrived, then claims are agreed on
                                and they are written

A rank whose reads fail has no claims to send, and the others would wait for it. So the reduction has a slot for
failure: `failed` takes part in the agreement with nothing but the slot set, and all ranks that share a scale with
this one raise. The planner calls it for every error it sees; errors that only the reader sees reach it through
the readers of this package, and with another reader the others give up after `timeout`. No group of the training is
left in the middle of a collective: the reduction has a gloo group of its own, whose ranks meet in the store of the
weights' group under a name that belongs to this load. (dist.new_group names a group after how many there are, which is
not the same on all ranks of a job with experts or pipelines.)

Conversions are ordered by name, since the order of state dicts may differ between ranks; the agreement also checks that
all ranks of a group convert the same tensors (see fsdp_hooks.ranks.exchange).
"""

import contextlib
import datetime as dt
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_adapters.load.conversion import Conversion
from dcp_adapters.torch_private import ProcessGroupGloo, all_reduce_max, gloo_group
from fsdp_hooks.ranks.across_ranks import rank_of
from fsdp_hooks.ranks.exchange import Channel, RanksDifferError, in_order, reduce_max, tell_failure
from fsdp_hooks.ranks.scale_partners import pool

LOG = logging.getLogger(__name__)
Writing = Callable[[str], contextlib.AbstractContextManager[None]]


class Listed(NamedTuple):
    """What a rank converts: for each group of ranks that hold pieces, the labels of its conversions."""

    rank: int
    by_group: dict[tuple[int, ...], list[str]]


def unequal(listed: Sequence[Listed]) -> list[str]:
    """Return in words why the conversions of these ranks do not fit: each would wait for others, or write alone."""
    by_rank = {one.rank: one.by_group for one in listed}
    problems = []
    for group in sorted({group for one in listed for group in one.by_group}):
        first, *others = (rank for rank in group if rank in by_rank)
        for rank in others:
            for holds, lacks in ((first, rank), (rank, first)):
                found = set(by_rank[holds].get(group, ())).difference(by_rank[lacks].get(group, ()))
                problems += [f"{label}: rank {holds} converts to this, rank {lacks} does not" for label in found]
    return sorted(set(problems))


class Conversions:
    """The conversions of one rank."""

    def __init__(self, conversions: Iterable[Conversion], timeout: dt.timedelta) -> None:
        self.timeout = timeout
        self.all = sorted(conversions, key=lambda one: one.name)
        self.agreed = [one for one in self.all if one.waits]  # those of a group are the same on its ranks
        self.by_entry: dict[str, Conversion] = {}  # entry of the checkpoint -> what is converted from it
        self.lock = threading.Lock()  # readers commit from several threads
        self.groups: dict[dist.ProcessGroup, ProcessGroupGloo] = {}  # of the weights -> of this load
        self.settled = not self.agreed  # whether this rank has taken part in the agreement
        self.writing: Mapping[str, Writing] = {}
        self.awaited = 0  # of `agreed`, those with something to read that is not there yet

    def read_items(self, metadata: Metadata) -> list[ReadItem]:
        """Return the read items of all of them."""
        items: list[ReadItem] = []
        for one in self.all:
            own = one.read_items(metadata)
            self.by_entry |= {item.dest_index.fqn: one for item in own}
            items += own
        self.awaited = sum(bool(one.outstanding) for one in self.agreed)
        return items

    @property
    def targets(self) -> dict[str, Tensor]:
        """What they write, the local tensor by name."""
        return {one.name: one.target for one in self.all}

    def listed(self) -> Listed:
        """Return what the coordinator compares."""
        by_group: dict[tuple[int, ...], list[str]] = {}
        for one in self.all:
            for ranks in one.cutting:
                by_group.setdefault(ranks, []).append(one.label)
        return Listed(rank_of(None), by_group)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Return entry -> the shape of what is read of it."""
        return {key: sizes for one in self.all for key, (_, (_, sizes)) in one.pieces.items()}

    def grouped(self, items: Iterable[ReadItem]) -> list[list[ReadItem]]:
        """Return a plan's items by conversion; conversions that have to wait for other ranks come last."""
        groups: dict[str, list[ReadItem]] = {one.name: [] for one in self.all}
        for item in items if groups else ():
            one = self.by_entry.get(item.dest_index.fqn)
            if one is not None:
                groups[one.name].append(item)
        # those that wait keep their buffers until all have arrived; the others have freed theirs by then
        return [groups[one.name] for one in sorted(self.all, key=lambda one: one.waits)]

    def begin(self, load_id: str, writing: Mapping[str, Writing]) -> None:
        """Open the groups, under a name that all ranks of this load know; write what needs no reading.

        `writing`: name of a conversion -> what is entered with that while it is written; nothing for most.
        """
        self.writing = writing
        if not self.all:
            return
        # groups overlap: every rank must open them in the same order, or two ranks wait for each other
        for group in in_order([(one.label,) for one in self.agreed], [one.groups for one in self.agreed]):
            self.groups[group] = gloo_group(group, f"qtensor.conversion.{load_id}", self.timeout)
        # an empty piece has no read item whose arrival would write it
        for one in self.all:
            if not one.outstanding and not one.waits:
                self._write(one)
        self._agree_if_complete()

    def buffer(self, entry: str) -> Tensor:
        """Return where one of the entries in `by_entry` is read into."""
        with self.lock:
            return self.by_entry[entry].buffer(entry)

    def arrived(self, entry: str) -> None:
        """Count a read item of an entry in `by_entry` that has arrived; the last one converts."""
        one = self.by_entry[entry]
        with self.lock:
            one.outstanding -= 1
            if one.outstanding:
                return
            self.awaited -= one.waits
        # outside of the lock: other threads read on while this one converts
        if one.waits:
            self._agree_if_complete()
        else:
            self._write(one)

    def failed(self) -> None:
        """Tell the ranks that wait for this one's claims that none will come. Never raises."""
        with self.lock:
            if self.settled or not self.groups:
                return
            self.settled = True
        self._tell_failure()

    def _tell_failure(self) -> None:
        # the error that led here is the one to report
        with contextlib.suppress(Exception):
            for group, own in self.groups.items():
                tell_failure(_channel(group, own), torch.device("cpu"))
        self.groups.clear()  # closes them

    def _agree_if_complete(self) -> None:
        with self.lock:
            if self.settled or self.awaited:
                return
            self.settled = True
        LOG.debug("load: %d conversions agree on shared scales, over %d groups", len(self.agreed), len(self.groups))
        try:
            own = [one.claim() for one in self.agreed]
        # `settled` is set already, so the planner's call of `failed` would tell nobody
        except BaseException:
            self._tell_failure()
            raise
        reduced = pool([one.partners for one in self.agreed], [1] * len(own), self._reduce_claims(own))
        for one, agreed in zip(self.agreed, reduced, strict=True):
            self._write(one, agreed)

    def _write(self, one: Conversion, agreed: Tensor | None = None) -> None:
        if one.name not in self.writing:
            one.write_target(agreed)
            return
        with self.writing[one.name](one.name):
            one.write_target(agreed)

    def _reduce_claims(self, claims: list[Tensor]) -> list[Tensor]:
        """Return the maxima over each conversion's groups. All groups take part, even after one told of a failure."""
        what = f"conversion of {len(self.agreed)} tensors with shared scales, {self.agreed[0].name} first"
        # the groups of a load are gloo's, whatever device the weights are on
        maxima, trouble = [claim.cpu() for claim in claims], None
        try:
            for group, own in self.groups.items():
                channel = _channel(group, own)
                # ranks of the groups that follow wait, too
                if trouble is not None:
                    tell_failure(channel, torch.device("cpu"))
                    continue
                # the same tensors on all ranks of a group, in the order of their names
                members = [number for number, one in enumerate(self.agreed) if group in one.groups]
                labels = [(self.agreed[number].label,) for number in members]
                try:
                    pieces, _ = reduce_max(what, labels, [maxima[number] for number in members], channel)
                except RanksDifferError as error:
                    trouble = error
                    continue
                for number, piece in zip(members, pieces, strict=True):
                    maxima[number] = piece
        except RuntimeError as error:
            raise RuntimeError(
                f"{what}: the other ranks' amaxes did not come within {self.timeout}; one of them may have failed to "
                "read its part, see its error. These tensors were left as they were"
            ) from error
        finally:
            self.groups.clear()  # closes them
        if trouble is not None and trouble.failed is None:
            raise trouble
        if trouble is not None:
            raise RuntimeError(
                f"{what}: another rank failed to read its part, see the error of rank {trouble.failed}; these tensors "
                "were left as they were"
            )
        return [value.to(claim.device) for value, claim in zip(maxima, claims, strict=True)]


def _channel(group: dist.ProcessGroup, own: ProcessGroupGloo) -> Channel:
    """Return a channel over this load's group, with the ranks of the weights' group."""
    return Channel(dist.get_rank(group), dist.get_process_group_ranks(group), functools.partial(all_reduce_max, own))
