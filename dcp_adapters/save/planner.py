"""QuantizedSavePlanner: raw payloads and scales into a DCP checkpoint, with stock DCP doing the rest.

    set_up_planner       every rank         flatten as DCP does; quantized leaves become local parts and their items
    create_local_plan    every rank         stock write items for the rest; beside all items, one byte an item for the
                                            recipe and the values of the tensor-wide scales
    create_global_plan   the coordinator    recipes and scales must agree over all ranks; the manifest becomes one more
                                            entry
    finish_plan          every rank         stock
    resolve_data         every rank         stock

What an option adds to a stage is in the step of the option (steps/); the planner runs through those that are on. All
checks run before the first byte is written, and an error raised on one rank reaches all of them through DCP's plan
exchange. A chunk that a writer lost fails the save, too: see torch_private.Committed.
"""

import dataclasses
import io
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_adapters.records.manifest import MANIFEST, MANIFEST_JSON, tensor_of
from dcp_adapters.save.global_plan import global_plan
from dcp_adapters.save.pieces import DESCRIBED, refuse_unfitting, tell_described
from dcp_adapters.save.refusals import refuse_bytes_in_safetensors, refuse_taken_names
from dcp_adapters.save.save_log import LOG, SaveLog
from dcp_adapters.save.steps.checksum_table import ChecksumTable
from dcp_adapters.save.steps.coordinator import RankRecord, merged_manifest, refuse_other_options, told, with_unlisted
from dcp_adapters.save.steps.item_sums import ItemDigests
from dcp_adapters.save.steps.overwrite import Overwrite
from dcp_adapters.save.steps.plan_cache import PlanCache
from dcp_adapters.save.steps.since_base import SinceBase, refuse_without_checksums
from dcp_adapters.save.steps.step import GlobalSave, SaveStep, Saving, Source
from dcp_adapters.save.steps.unsound import DeepVerify, refuse_told_mixtures
from dcp_adapters.save.write_items import SaveLeaves, plain_item
from dcp_adapters.torch_private import Committed, prefix_of
from fsdp_hooks.torch_private import cpu_by_default


class QuantizedSavePlanner(DefaultSavePlanner):
    """Saves quantized tensors as their parts plus a manifest (checkpoint format version 1), the rest as stock DCP does.

    Use it with `dcp.save` and `dcp.async_save` on state dicts of plain or sharded models, nested or flat. Give
    `async_save` a process group of its own (`dist.new_group(backend="gloo")`): its upload thread exchanges plans while
    training uses the default one.

    Args:
        checksums: store an xxh3 digest of every chunk, made from the bytes as they are written. With them zip's own
            CRC32 can be off: torch.serialization.set_crc32_options, called in the thread that builds the planner, also
            holds in the other threads that write.
        overwrite: what becomes of a checkpoint in the local directory that is saved into. "keep": it loads until the
            new one is complete, and its files stay until the next save into the directory (or `remove_replaced`).
            "delete_first": it is removed before anything is written, so the disk needs no room for two; an interrupted
            save then leaves none.
        digest: record the digest of each tensor in the manifest, as `tensor_digests` gives them of the model.
            The plans of the ranks carry the sums. Ranks that hold the same chunk must then hold the same bytes.
        verify: "deep" refuses to save weights that are not what their masters requantize to, or whose amax history
            cannot have led to their scale: each rank reads what it holds once more. "own_scales" also refuses scales
            that no value asks for, which only weights that were never calibrated, converted or imported have to pass.
        delta_to: the directory of a full save. Tensors that it has in the same dtype and shape are stored as what
            changed since then, compressed, or whole if that is not smaller; the sharding may be another one. The
            checkpoint loads as any other, from both directories: keep the base (see `remove_checkpoints`), move both
            together. Each rank reads its part of the base while it writes. Needs the extra `delta` (zstd).
        **kwargs: those of DefaultSavePlanner. enable_plan_caching=True spares the exchange of plans while the state
            dict keeps its names, shapes, placements and formats.

    Raises:
        ValueError: while saving, on all ranks and before anything is written: ranks disagree on a recipe or a
            tensor-wide scale, with digest=True on any bytes that several hold; a name is taken; pieces that say
            themselves where they lie (PlacedShard) leave gaps or overlap; a local tensor is not what its placement
            tells; a column cut does not fall on block boundaries; digest=True or delta_to without collectives; what
            `verify` finds; delta_to is damaged, is itself a delta, is not local, is the directory to save into, or is
            not the same on all ranks. While building: an unknown option; delta_to with checksums=False.
        FileNotFoundError: delta_to holds no complete checkpoint; also when all is written and the base has gone
            meanwhile (ValueError if it was replaced): then no `.metadata` is written.
        ImportError: delta_to without zstd.
        RuntimeError: the storage writer lost a chunk (a writing thread that failed, say); no `.metadata` is written.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> list(read_manifest("step-1000").tensors)
        ['weight']
        ```
    """

    def __init__(
        self,
        *,
        checksums: bool = True,
        overwrite: Literal["keep", "delete_first"] = "keep",
        digest: bool = False,
        verify: Literal["deep", "own_scales"] | None = None,
        delta_to: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if verify not in (None, "deep", "own_scales"):
            raise ValueError(f'QuantizedSavePlanner: verify={verify!r} is not one of None, "deep", "own_scales"')
        if overwrite not in ("keep", "delete_first"):
            raise ValueError(f'QuantizedSavePlanner: overwrite={overwrite!r} is not one of "keep", "delete_first"')
        # stock's caching compares no formats, so a step of our own does it
        caches_plans = kwargs.pop("enable_plan_caching", False)
        super().__init__(**kwargs)
        if delta_to is not None:
            refuse_without_checksums(checksums=checksums)
        self.overwrite, self.verify, self.delta_to = overwrite, verify, delta_to
        # what makes the steps of a save, in their order. Data are resolved from the last to the first: checksums are
        # made of a tensor before a delta codes it, so that they are those of a full save
        self.options: list[Callable[[Saving], SaveStep]] = []
        if digest:
            self.options.append(ItemDigests)
        if delta_to is not None:
            self.options.append(partial(SinceBase, delta_to))
        if verify is not None:
            self.options.append(partial(DeepVerify, verify))
        if checksums:
            self.options.append(ChecksumTable)
        self.options.append(partial(Overwrite, overwrite))
        if caches_plans:
            self.options.append(PlanCache)
        # an option of the calling thread, which the threads that write do not inherit: `resolve_data` sets it there
        self.crc32, self.built_by = torch.serialization.get_crc32_options(), threading.get_ident()
        # what belongs to one save
        self.steps: list[SaveStep] = []
        self.leaves = SaveLeaves()
        self.saving = Saving(None, {})
        self.current: frozenset[int] = frozenset()  # ids of its items; those of an earlier one do not count

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        """Flatten, and separate the local parts of quantized leaves from what stock DCP saves."""
        # an earlier save that is still being written resolves nothing from here on
        self.current = frozenset()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.saving = Saving(getattr(storage_meta, "checkpoint_id", None), self.state_dict)
        self.leaves = SaveLeaves.of(self.state_dict)
        self.state_dict = self.leaves.plain
        entries = self.leaves.entries
        refuse_taken_names(self.state_dict.keys() | self.leaves.described - entries.keys(), entries)
        if self.flatten_state_dict:
            self.mappings = self.leaves.paths(self.mappings)
        # new ones: an asynchronous save that is still being written keeps its own
        self.steps = [make(self.saving) for make in self.options]
        if LOG.isEnabledFor(logging.INFO):
            self.steps.insert(0, SaveLog(self.saving))

    def create_local_plan(self) -> SavePlan:
        """Return this rank's items, with its record as planner data; or the token of an equal earlier plan."""
        # stock makes tensors without naming a device, and all that is planned is on the CPU
        with cpu_by_default():
            stock = super().create_local_plan()
        items, withheld = [*stock.items, *self.leaves.items], self.leaves.withheld
        # stock lists a replicated scalar on every rank; here only the mesh's first rank does, and the coordinator adds
        # it in `create_global_plan` if that rank takes no part
        if withheld:
            self.saving.unlisted = [item for item in items if item.index.fqn in withheld]
            items = [item for item in items if item.index.fqn not in withheld]
        paths = {name: path for name, path in self.mappings.items() if name not in withheld}
        plan = dataclasses.replace(stock, items=items, planner_data=RankRecord.of(self.leaves, items, paths))
        if self.leaves.described:
            plan = tell_described(plan, self.leaves)
        for step in self._steps_at("local_plan"):
            plan = step.local_plan(plan, super().resolve_data)
        self.plan = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: check that ranks agree, plan as stock DCP does, add the manifest and the checksums."""
        # writers mark the plans of ranks that save without collectives in this way; no file's name has a slash
        marked = all_plans[0].storage_data
        apart = None if marked is None else prefix_of(marked) or "/"
        # the cache is the last step: what it sent in place of a plan is undone first
        for step in reversed(self._steps_at("receive")):
            all_plans = step.receive(all_plans)
        if self.saving.unlisted:
            all_plans = with_unlisted(all_plans, self.saving.unlisted, self.mappings)
        refuse_other_options(all_plans)
        if apart is None and any(DESCRIBED in plan.planner_data.options for plan in all_plans):
            refuse_unfitting(all_plans)
        save = GlobalSave(all_plans, merged_manifest(all_plans), apart)
        # a rank that verifies counts even if the coordinator does not: its pieces may be half of a mixture
        if any(verified := told(all_plans, "verify")):
            refuse_told_mixtures(verified)
        for step in self._steps_at("agree"):
            step.agree(save)
        if save.metadata is None:
            self._plan(save)
        assert save.metadata is not None
        assert save.stored is not None
        # the coordinator writes the manifest as one of its parts
        self.leaves.parts[MANIFEST] = save.stored
        for step in self._steps_at("planned"):
            step.planned(save)
        self.global_plan = [
            dataclasses.replace(plan, planner_data={**save.answers, "place": place})
            for place, plan in enumerate(save.plans)
        ]
        # a record of its own for each save: writers fill in where things are stored
        before = partial(_run_last_checks, self._steps_at("commit"))
        entries, data = save.metadata.state_dict_metadata, save.metadata.planner_data
        self.metadata = Committed(entries, data, before=before, coded=save.coded)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan to write: the coordinator's, or the one kept from an earlier save."""
        plan, answers = new_plan, new_plan.planner_data
        for step in reversed(self._steps_at("finish_plan")):
            plan = step.finish_plan(plan, answers)
        refuse_bytes_in_safetensors(plan)
        # items of cached plans are copied, too: `current` tells a save by its items' ids
        if plan.items:
            plan = dataclasses.replace(plan, items=[dataclasses.replace(item) for item in plan.items])
        self.plan, self.current = plan, frozenset(map(id, plan.items))
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the local part, or what stock finds."""
        leaves = self.leaves
        part = leaves.data_of(index) if leaves.pieces else leaves.parts.get(index.fqn)
        return super().lookup_object(index) if part is None else part

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's name
        """Return what stock makes of it; but a tensor whose item is one of bytes stays one until its step codes it."""
        return object if isinstance(object, Tensor) else super().transform_object(write_item, object)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return what the writer stores for an item.

        Raises:
            RuntimeError: the planner has been given another save before this one was written.
        """
        if threading.get_ident() != self.built_by and torch.serialization.get_crc32_options() != self.crc32:
            torch.serialization.set_crc32_options(self.crc32)
        # read before `current`, which another save changes first: steps of one save never meet items of another
        steps = self._steps_at("resolve")
        current = self.current
        self._refuse_overlap(write_item, ours=id(write_item) in current)
        source: Source = partial(self._stock_data, current)
        for step in reversed(steps):
            source = partial(step.resolve, source=source)
        return source(write_item)

    def _steps_at(self, stage: str) -> list[SaveStep]:
        """Return the steps that have a part in a stage."""
        return [step for step in self.steps if stage in step.stages]

    def _stock_data(self, current: frozenset[int], write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the data of an item as stock DCP has it; `current`: the items of the save that asks."""
        data = super().resolve_data(write_item)
        # asked again now that the data is here: another save may have exchanged the state dict meanwhile
        self._refuse_overlap(write_item, ours=current is self.current)
        return data

    def _refuse_overlap(self, write_item: WriteItem, *, ours: bool) -> None:
        if not ours:
            raise RuntimeError(
                f"{write_item.index.fqn}: its planner has been given to another save while this one was being written; "
                "give each save that may overlap another a QuantizedSavePlanner of its own"
            )

    def _plan(self, save: GlobalSave) -> None:
        """Make stock's global plan, with the manifest as an entry in it."""
        record = save.manifest.to_json()
        save.stored = data = tensor_of(record)
        plans = [dataclasses.replace(plan, planner_data=plan.planner_data.mappings) for plan in save.plans]
        # the first rank is the coordinator, which alone has the manifest's bytes
        plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, plain_item(MANIFEST, data)])
        found = global_plan(plans, to_lowest_rank=self.dedup_save_to_lowest_rank, flattened=self.flatten_state_dict)
        plans, metadata = found or super().create_global_plan(plans)  # which raises, mostly
        planner_data = {**(metadata.planner_data or {}), MANIFEST_JSON: record, MANIFEST: (MANIFEST,)}
        save.metadata = dataclasses.replace(metadata, planner_data=planner_data)
        save.plans = [dataclasses.replace(plan, planner_data=None) for plan in plans]


def _run_last_checks(steps: Sequence[SaveStep], files: set[str]) -> None:
    """Run the checks of the commit: all ranks have written these files, and the new metadata are not there yet."""
    for step in steps:
        step.commit(files)
