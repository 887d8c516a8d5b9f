"""All conversions of one load, and their agreement on shared scales: one fused all-reduce for each distinct group.

    finish_plan    every rank   a group of its own for each group that has to agree
    resolve        reader       the buffers of a conversion appear with its first item
    commit         reader       with its last item it is written, or, if its scale is shared, kept until all of those
                                have arrived; then amaxes are agreed on and the kept ones are written

A rank whose reads fail can not bring its amaxes, and the others would wait for it. So the reduction has a slot which
says that: `failed` takes part in the agreement with nothing but the slot set, and all ranks raise. The planner calls
it for every error it sees; errors that only the reader sees reach it through SafeFileSystemReader, and with another
reader the others give up after `timeout`. For this the groups are new ones: no group of the training is left in the
middle of a collective. They stay open: torch names a group after the number of groups, and a name that comes again
finds the store's old addresses. A job converts once or twice.
"""

import datetime as dt
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_adapters.convert import Conversion
from fsdp_hooks.scale_sync import max_over_groups

__all__ = ["Conversions"]


class Conversions:
    """The conversions of one rank, in the order of the state dict, which is the same on all ranks of a mesh."""

    def __init__(self, conversions: Iterable[Conversion], metadata: Metadata, timeout: dt.timedelta) -> None:
        self.metadata, self.timeout = metadata, timeout
        self.all = list(conversions)
        self.agreed = [one for one in self.all if one.groups]  # the same on all ranks of a group
        self.by_entry: dict[str, Conversion] = {}
        self.lock = threading.Lock()  # readers commit from several threads
        self.groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self.settled = not self.agreed  # whether this rank has taken part in the agreement

    def read_items(self) -> list[ReadItem]:
        """What all of them need read."""
        items: list[ReadItem] = []
        for one in self.all:
            own = one.read_items(self.metadata)
            self.by_entry |= {item.dest_index.fqn: one for item in own}
            items += own
        return items

    def grouped(self, items: Iterable[ReadItem]) -> list[list[ReadItem]]:
        """The items of each conversion among those of a plan; those that have to wait for other ranks last."""
        groups: dict[str, list[ReadItem]] = {one.name: [] for one in self.all}
        for item in items:
            one = self.by_entry.get(item.dest_index.fqn)
            if one is not None:
                groups[one.name].append(item)
        return [groups[one.name] for one in sorted(self.all, key=lambda one: bool(one.groups))]

    def begin(self) -> None:
        """Open the groups; write what needs no reading, such as empty shards."""
        for one in self.agreed:
            for group in one.groups:
                if group not in self.groups:
                    self.groups[group] = dist.new_group(
                        dist.get_process_group_ranks(group),
                        timeout=self.timeout,
                        backend="gloo",
                        use_local_synchronization=True,
                    )
        for one in self.all:
            if not one.outstanding and not one.groups:
                one.finish()
        self._agree_if_complete()

    def buffer(self, entry: str) -> Tensor | None:
        """Where an entry that is to be converted is read into; None for any other entry."""
        one = self.by_entry.get(entry)
        if one is None:
            return None
        with self.lock:
            return one.buffer(entry, self.metadata)

    def arrived(self, entry: str) -> None:
        """One read item of an entry is there."""
        one = self.by_entry.get(entry)
        if one is None:
            return
        with self.lock:
            one.outstanding -= 1
            if one.outstanding:
                return
        if one.groups:
            self._agree_if_complete()
        else:
            one.finish()

    def failed(self) -> None:
        """Tell the ranks that wait for this one's amaxes that they will not come. Never raises."""
        with self.lock:
            if self.settled or not self.groups:
                return
            self.settled = True
        try:
            self._reduced([torch.zeros(one.shared_scales) for one in self.agreed], failed=True)
        except Exception:  # noqa: BLE001 - the error that led here is the one to report
            return

    def _agree_if_complete(self) -> None:
        with self.lock:
            if self.settled or any(one.outstanding for one in self.agreed):
                return
            self.settled = True
        amaxes, failures = self._reduced([one.amax() for one in self.agreed], failed=False)
        if failures:
            raise RuntimeError(
                f"conversion of {len(self.agreed)} tensors with shared scales, {self.agreed[0].name} first: another "
                "rank failed to read its part, see its error; these tensors were left as they were"
            )
        for one, amax in zip(self.agreed, amaxes, strict=True):
            one.finish(amax)

    def _reduced(self, amaxes: list[Tensor], *, failed: bool) -> tuple[list[Tensor], bool]:
        """Maxima over the groups of each conversion, and whether any rank has failed."""
        claims = [amax.cpu() for amax in amaxes]
        flag = torch.tensor([float(failed)])
        members = [[self.groups[group] for group in one.groups] for one in self.agreed]
        try:
            reduced, _ = max_over_groups([*claims, flag], [*members, list(self.groups.values())])
        except RuntimeError as error:
            raise RuntimeError(
                f"conversion of {len(self.agreed)} tensors with shared scales, {self.agreed[0].name} first: the other "
                f"ranks' amaxes did not come within {self.timeout}; one of them may have failed to read its part, see "
                "its error. These tensors were left as they were"
            ) from error
        maxima = [value.to(amax.device) for value, amax in zip(reduced, amaxes, strict=False)]
        return maxima, bool(reduced[-1])
