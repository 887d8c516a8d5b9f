"""digest=True: the digest of each tensor in the manifest, from sums of what the ranks are about to save.

    a rank          the byte sum of each of its items, in its plan        8 bytes an item
    coordinator     each chunk once, whichever ranks hold it; the sums of a part's chunks add up to the part's

So the plan exchange that a save needs in any case carries them, and there is no collective besides.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_adapters.plain.plain_memory import is_plain
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import Manifest
from dcp_adapters.records.weight_sums import PartSum, digested_parts, tensor_digest
from dcp_adapters.save.steps.coordinator import tell
from dcp_adapters.save.steps.step import GlobalSave, SaveStep, Saving, Source
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums

Sums = list[int | None]  # of items, in their order; None for bytes, and for tensors of another library's class


def item_sums(items: Sequence[WriteItem], data_of: Source) -> Sums:
    """Return what each item adds to the byte sum of its entry, modulo 2^64."""
    sums: Sums = [None] * len(items)
    by_device: dict[torch.device, list[tuple[int, TensorPiece]]] = {}
    for number, item in enumerate(items):
        if item.type == WriteItemType.BYTE_IO:
            continue
        data, placed = data_of(item), item.tensor_data
        if placed is not None and isinstance(data, Tensor) and is_plain(data):
            piece = TensorPiece(data.detach(), tuple(placed.size), tuple(placed.chunk.offsets))
            by_device.setdefault(data.device, []).append((number, piece))
    # one read for each device: a read for each item would wait for the device as often
    for pieces in by_device.values():
        totals = byte_sums([piece for _, piece in pieces]).tolist()
        for (number, _), total in zip(pieces, totals, strict=True):
            sums[number] = total
    return sums


class ItemDigests(SaveStep):
    """The digests of one save."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving
        self.unlisted: dict[MetadataIndex, int | None] = {}  # sums of what this rank lists as the coordinator, perhaps

    def local_plan(self, plan: SavePlan, data: Source) -> SavePlan:
        """Let the sums travel with the plan."""
        sums, own = (item_sums(items, data) for items in (plan.items, self.saving.unlisted))
        self.unlisted = {item.index: total for item, total in zip(self.saving.unlisted, own, strict=True)}
        return tell(plan, "digest", fixed=True, now=sums)

    def agree(self, save: GlobalSave) -> None:
        """Put the digest of each tensor whose bytes are known into the manifest."""
        save.refuse_apart("digest=True adds up the sums of all ranks")
        save.manifest = with_digests(save.manifest, save.plans, self.unlisted)


def with_digests(
    manifest: Manifest, all_plans: Sequence[SavePlan], own: Mapping[MetadataIndex, int | None]
) -> Manifest:
    """Return the manifest with the digest of each tensor whose bytes are known.

    Args:
        manifest: of all ranks.
        all_plans: with the sums of their items in their records.
        own: the sums of the items that the coordinator added to its plan.

    Raises:
        ValueError: ranks hold different bytes of the same chunk.
    """
    chunks = _sum_chunks(all_plans, own)
    totals: dict[str, int | None] = {}
    like: dict[str, WriteItem] = {}
    for index, (total, _, item) in chunks.items():
        before = totals.get(index.fqn, 0)
        totals[index.fqn] = None if total is None or before is None else before + total
        like[index.fqn] = item
    parts = {key for entry in manifest.tensors.values() for key in entry.part_keys()}
    entries = {**manifest.tensors, **{key: _dense_entry(key, item) for key, item in like.items() if key not in parts}}
    digests = {}
    for name, entry in sorted(entries.items()):
        sums = [
            PartSum(part, dtype, shape, total)
            for part, (dtype, shape) in digested_parts(entry).items()
            if (total := totals.get(entry.key(part))) is not None
        ]
        # a digest of some parts alone would be compared with one of all of them
        if len(sums) == len(digested_parts(entry)):
            digests[name] = tensor_digest(sums)
    return Manifest(manifest.tensors, digests=digests)


def _sum_chunks(
    all_plans: Sequence[SavePlan], own: Mapping[MetadataIndex, int | None]
) -> dict[MetadataIndex, tuple[int | None, int, WriteItem]]:
    """Return each chunk of a tensor -> its sum, the first rank that holds it, and the item there."""
    chunks: dict[MetadataIndex, tuple[int | None, int, WriteItem]] = {}
    for rank, plan in enumerate(all_plans):
        # the coordinator's plan may have got more items at its end (`with_unlisted`), for which no sum was sent
        for item, sent in zip_longest(plan.items, plan.planner_data.now.options["digest"]):
            if item.type == WriteItemType.BYTE_IO:
                continue
            total = own.get(item.index) if sent is None else sent
            first, holder, _ = chunks.setdefault(item.index, (total, rank, item))
            if first != total:
                where = f" at {tuple(item.index.offset)}" if item.index.offset else ""
                raise ValueError(
                    f"{item.index.fqn}{where}: rank {holder} and rank {rank} hold other bytes, and one of them would "
                    "be saved for both; give replicas the same bytes (a broadcast, or fsdp_hooks.sync_scales for "
                    "scales), values of one rank a name of their own, or save with digest=False"
                )
    return chunks


def _dense_entry(key: str, item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    return Entry(key, None, tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
