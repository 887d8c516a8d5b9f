"""QuantizedSavePlanner: raw payloads and scales into a DCP checkpoint, with stock DCP doing the rest.

    set_up_planner       every rank         flatten as DCP does; quantized leaves become local parts and their items
    create_local_plan    every rank         stock write items for the rest; beside all items, one byte an item for the
                                            recipe and the values of the tensor-wide scales
    create_global_plan   the coordinator    recipes and scales must agree over all ranks; the manifest and the checksum
                                            table become two more entries; what is not needed any more is removed
    finish_plan          every rank         stock; or the plan of an earlier save, see plan_cache.py
    resolve_data         every rank         stock, digested on the way out; the checksum table when it is asked for

All checks run before the first byte is written, and an error raised on one rank reaches all of them through DCP's plan
exchange. A chunk that a writer lost fails the save, too: see torch_private.Committed.
"""

import dataclasses
import io
import os
import threading
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_adapters.format.checksums import CHECKSUMS, Checksums
from dcp_adapters.format.expand import plain_leaf, quantized_local, refuse_hidden, settled_parts
from dcp_adapters.format.manifest import MANIFEST, Manifest, with_base
from dcp_adapters.save import plan_cache
from dcp_adapters.save.coordinator import (
    PLAIN,
    Now,
    Record,
    coded_names,
    merged_manifest,
    with_manifest,
    with_unlisted,
)
from dcp_adapters.save.global_plan import global_plan
from dcp_adapters.save.item_sums import Sums, item_sums, refuse_ranks_apart, with_digests
from dcp_adapters.save.overwrite import Directory, clear, commit, make_room, own_names
from dcp_adapters.save.refusals import refuse_bytes_in_safetensors, refuse_taken_names, refuse_without_bytes
from dcp_adapters.save.since_base import SinceBase, refuse_without_checksums
from dcp_adapters.save.unsound import Fits, refuse_mixtures, refuse_unsound
from dcp_adapters.save.write_items import Layouts, PartLayout, lists_scalars, plain_item, with_checksum_items
from dcp_adapters.stored.reading.base import Base
from dcp_adapters.torch_private import Committed, prefix_of
from fsdp_hooks.kernels.digest import digests
from fsdp_hooks.torch_private import cpu_by_default, local_of, without_torch_function
from qtensor.spec.registry import specs_of, tensor_wide
from qtensor.tensor.quantized_tensor import QuantizedTensor


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
            changed since then, compressed, or whole where that is not smaller; the sharding may be another one. The
            checkpoint loads as any other, from both directories: keep the base (see `remove_checkpoints`), move both
            together. Each rank reads its part of the base while it writes. Needs the extra `delta` (zstd).
        **kwargs: those of DefaultSavePlanner. enable_plan_caching=True spares the exchange of plans while the state
            dict keeps its names, shapes, placements and formats.

    Raises:
        ValueError: while saving, on all ranks and before anything is written: ranks disagree on a recipe or a
            tensor-wide scale, with digest=True on any bytes that several hold; a name is taken; a column cut does not
            fall on block boundaries; digest=True or delta_to without collectives; what `verify` finds; delta_to is
            damaged, is itself a delta, is not local, is the directory to save into, or is not the same on all ranks.
            While building: an unknown option; delta_to with checksums=False.
        FileNotFoundError: delta_to holds no complete checkpoint; also when all is written and the base has gone
            meanwhile (ValueError where it was replaced): then no `.metadata` is written.
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
        self.caches_plans = kwargs.pop("enable_plan_caching", False)  # our own: stock's compares no formats
        super().__init__(**kwargs)
        if delta_to is not None:
            refuse_without_checksums(checksums=checksums)
        self.overwrite, self.verify, self.delta_to = overwrite, verify, delta_to
        self.with_checksums, self.with_digest = checksums, digest
        # an option of the calling thread, which the threads that write do not inherit
        self.crc32, self.built_by = torch.serialization.get_crc32_options(), threading.get_ident()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        """Flatten, and separate the local parts of quantized leaves from what stock DCP saves."""
        # ids of this save's items, none yet; those of an earlier save, still being written, do not count
        self.current: frozenset[int] = frozenset()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.checkpoint_id = getattr(storage_meta, "checkpoint_id", None)
        self.since = None if self.delta_to is None else SinceBase(self.delta_to, self.checkpoint_id)
        flat, layouts = self.state_dict, Layouts()
        self.state_dict, self.parts, self.part_items = {}, dict[str, Tensor](), list[WriteItem]()
        self.payloads: dict[str, QuantizedTensor] = {}
        self.wide: dict[str, Tensor] = {}  # the tensor-wide scale of each payload that has one
        self.watched: set[str] = set()  # parts that several ranks hold: [N, 1] scales cut along columns, histories
        self.withheld: set[str] = set()  # scalars that another rank lists, the first of their mesh
        entries: dict[str, dict[str, str]] = {}  # quantized leaf -> part -> its entry
        with without_torch_function():  # attributes of a subclass go through it, thousands of times
            for name, value in flat.items():
                q = quantized_local(value)
                if q is None:
                    self._keep_plain(name, value)
                    continue
                entries[name] = {spec.name: f"{name}.{spec.name}" for spec in specs_of(q.recipe)}
                self._keep_parts(entries[name], q, layouts.of(name, value, q), name)
        refuse_taken_names(self.state_dict, entries)
        self.fits: Fits = {} if self.verify is None else refuse_unsound(flat, self.verify)
        if self.flatten_state_dict:
            self.mappings = _part_paths(self.mappings, entries)
        self.checksums = Checksums()

    def create_local_plan(self) -> SavePlan:
        """This rank's items, with its record as planner data; or the token of an earlier plan that is the same."""
        with cpu_by_default():
            stock = super().create_local_plan()
        items = [*stock.items, *self.part_items]
        self.unlisted = [item for item in items if item.index.fqn in self.withheld] if self.withheld else []
        if self.unlisted:
            items = [item for item in items if item.index.fqn not in self.withheld]
        numbers: dict[tuple[Any, torch.dtype], int] = {}
        kinds = bytearray([PLAIN]) * len(items)
        scales: list[Tensor] = []
        with without_torch_function():
            for place, item in enumerate(items):
                q = self.payloads.get(item.index.fqn)
                if q is None:
                    continue
                kinds[place] = numbers.setdefault((q.recipe.stored, q.dtype), len(numbers))
                if item.index.fqn in self.wide:
                    scales.append(self.wide[item.index.fqn])
        bits = torch.stack(scales).view(torch.int32).tolist() if scales else []  # read from the device at once
        sums, own = (self._sums(of) if self.with_digest else [] for of in (items, self.unlisted))
        self.unlisted_sums = {item.index: total for item, total in zip(self.unlisted, own, strict=False)}  # or none
        coded = b"" if self.since is None else self.since.chosen(items, self.lookup_object)
        base = None if self.since is None else self.since.base.link.digest
        now = Now(bits, self._replicated(items), sums, base, self.fits)
        paths = {name: path for name, path in self.mappings.items() if name not in self.withheld}
        recipes = [(recipe.to_json(), dtype) for recipe, dtype in numbers]
        record = Record(paths, recipes, bytes(kinds), now, self.with_checksums, self.with_digest, coded)
        self.plan = dataclasses.replace(stock, items=items, planner_data=record)
        self.cached = plan_cache.lookup_local(self.plan) if self.caches_plans else None
        if self.cached is None:
            return self.plan
        unchanged = plan_cache.Unchanged(self.cached.token, self.cached.place, now)
        return SavePlan([], planner_data=unchanged, usable=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Coordinator only: check that ranks agree, plan as stock DCP does, add the manifest and the checksums."""
        # writers mark the plans of ranks that save without collectives in this way; no file's name has a slash
        marked = all_plans[0].storage_data
        own = None if marked is None else prefix_of(marked) or "/"
        all_plans, token = plan_cache.restored(all_plans)
        all_plans = with_unlisted(all_plans, self.unlisted, self.mappings)
        manifest = merged_manifest(all_plans)
        refuse_mixtures([plan.planner_data.now.fits for plan in all_plans], self.verify or "deep")
        if self.with_digest:
            refuse_ranks_apart("digest=True adds up the sums of all ranks", apart=own is not None)
            manifest = with_digests(manifest, all_plans, self.unlisted_sums)
        coded = coded_names(all_plans)
        if self.since is not None:
            refuse_ranks_apart("delta_to is agreed on by all ranks", apart=own is not None)
            manifest = with_base(manifest, self.since.base.link)
        renewed = self.with_digest or self.since is not None  # a manifest that may be another one at every save
        known = plan_cache.lookup_global(token) if token else None
        data = known.manifest if known is not None and not renewed else manifest.to_tensor()
        if known is not None and data.shape == known.manifest.shape:  # other unless a leaf changed its class
            plans, metadata = [SavePlan([], usable=False) for _ in all_plans], known.metadata
            if renewed:
                metadata = with_manifest(metadata, manifest)
            self.parts[MANIFEST] = data
        else:
            plans, metadata = self._planned(all_plans, manifest, data)
            if self.caches_plans:
                token = plan_cache.remember_global(plan_cache.Global(all_plans, metadata, data))
        taken = (make_room if self.overwrite == "keep" else clear)(self.checkpoint_id, own=own)
        self.global_plan = [
            dataclasses.replace(plan, planner_data=(taken, (token, place))) for place, plan in enumerate(plans)
        ]
        # a record of its own for each save: writers fill in where things are stored
        base = None if self.since is None else self.since.base
        before = partial(_last_checks, self.checkpoint_id, base, alone=own is not None)
        self.metadata = Committed(metadata.state_dict_metadata, metadata.planner_data, before=before, coded=coded)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan to write: the coordinator's, or the one kept from an earlier save."""
        taken, (token, place) = new_plan.planner_data
        if not new_plan.usable:
            assert self.cached is not None
            plan_cache.remember_local(self.cached)
            new_plan = dataclasses.replace(self.cached.final, storage_data=new_plan.storage_data)
        elif self.caches_plans:
            plan_cache.remember_local(plan_cache.Local(token, place, self.plan, new_plan))
        refuse_bytes_in_safetensors(new_plan)
        if self.since is not None:
            new_plan = self.since.as_bytes(new_plan)
        if new_plan.items:
            names = own_names(self.checkpoint_id, new_plan.storage_data, taken=taken)
            items = [dataclasses.replace(item) for item in new_plan.items]  # this save's own, in cached plans, too
            new_plan = dataclasses.replace(new_plan, items=items, storage_data=names)
        self.plan = new_plan
        self.current = frozenset(map(id, new_plan.items))
        return new_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The local part, or what stock finds."""
        part = self.parts.get(index.fqn)
        return super().lookup_object(index) if part is None else part

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What the writer stores for an item; digested, if checksums are on.

        Raises:
            RuntimeError: the planner has been given another save before this one was written.
        """
        if threading.get_ident() != self.built_by and torch.serialization.get_crc32_options() != self.crc32:
            torch.serialization.set_crc32_options(self.crc32)
        if write_item.index.fqn == CHECKSUMS:
            self._refuse_overlap(write_item)
            return self.checksums.table(self.plan.items, partial(self._digested, early=True))
        since = self.since
        data = self._digested(write_item)  # refuses, where `since` is another save's
        if since is None or not since.has(write_item):
            return data
        assert isinstance(data, Tensor)
        return since.coded(write_item, data)

    def _digested(self, write_item: WriteItem, *, early: bool = False) -> Tensor | io.BytesIO:
        """The data of an item, digested, if checksums are on; `early`: for their table, before it is written."""
        checksums = self.checksums
        self._refuse_overlap(write_item)
        if not early and (copied := checksums.take_copy(write_item.index)) is not None:
            return copied
        if self.since is not None and self.since.has(write_item):
            data: Tensor | io.BytesIO = self.lookup_object(write_item.index)
        else:
            data = checksums.pickled.get(write_item.index) or super().resolve_data(write_item)
        self._refuse_overlap(write_item)  # again, now that the data is here: so it is this save's
        return checksums.digest(write_item.index, data, early=early) if self.with_checksums else data

    def _refuse_overlap(self, write_item: WriteItem) -> None:
        if id(write_item) not in self.current:
            raise RuntimeError(
                f"{write_item.index.fqn}: its planner has been given to another save while this one was being written; "
                "give each save that may overlap another a QuantizedSavePlanner of its own"
            )

    def _planned(self, all_plans: list[SavePlan], manifest: Manifest, data: Tensor) -> tuple[list[SavePlan], Metadata]:
        """Stock's global plan with our two entries; `data` is the manifest as a tensor."""
        self.parts[MANIFEST] = data
        plans = [dataclasses.replace(plan, planner_data=plan.planner_data.mappings) for plan in all_plans]
        plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, plain_item(MANIFEST, data)])
        found = global_plan(plans, to_lowest_rank=self.dedup_save_to_lowest_rank, flattened=self.flatten_state_dict)
        plans, metadata = found or super().create_global_plan(plans)  # which raises, mostly
        metadata = with_manifest(metadata, manifest)
        planner_data = {**metadata.planner_data, MANIFEST: (MANIFEST,)}
        if self.with_checksums:
            plans, entry = with_checksum_items(plans)
            metadata.state_dict_metadata[CHECKSUMS] = entry
            planner_data[CHECKSUMS] = (CHECKSUMS,)
        plans = [dataclasses.replace(plan, planner_data=None) for plan in plans]
        return plans, dataclasses.replace(metadata, planner_data=planner_data)

    def _keep_plain(self, name: str, value: Any) -> None:
        """A leaf that stock DCP saves."""
        if not isinstance(value, Tensor):
            refuse_hidden(name, value)
        self.state_dict[name] = leaf = plain_leaf(value)
        if isinstance(leaf, Tensor):
            refuse_without_bytes(name, local_of(leaf))
        if isinstance(leaf, DTensor) and not leaf.ndim and not lists_scalars(leaf):
            self.withheld.add(name)

    def _keep_parts(
        self, entries: dict[str, str], q: QuantizedTensor, layouts: tuple[PartLayout, ...], name: str
    ) -> None:
        """The parts of a quantized leaf and their items; nothing where this rank is outside of its mesh."""
        if not layouts:
            return
        parts, wide = settled_parts(name, q), tensor_wide(q.recipe)
        for part in parts.values():
            refuse_without_bytes(name, part)
        for layout in layouts:
            entry = entries[layout.part]
            self.parts[entry] = parts[layout.part]
            self.part_items.append(layout.item(entry))
            if layout.several:
                self.watched.add(entry)
            if layout.withheld:
                self.withheld.add(entry)
        self.payloads[entries["payload"]] = q
        if wide is not None:
            self.wide[entries["payload"]] = parts[wide]

    def _replicated(self, items: list[WriteItem]) -> list[tuple[str, tuple[int, ...], int]]:
        """Digests of what several ranks hold, read from the device at once."""
        indices = [item.index for item in items if item.index.fqn in self.watched]
        found = digests([[self.parts[index.fqn]] for index in indices]).tolist() if indices else []
        return [(index.fqn, tuple(index.offset or ()), value) for index, value in zip(indices, found, strict=True)]

    def _sums(self, items: list[WriteItem]) -> Sums:
        """What items add to the digests, from the very data that is about to be written."""
        resolve = super().resolve_data
        return item_sums(items, lambda item: cast("Tensor", resolve(item)))


def _last_checks(checkpoint_id: Directory, base: Base | None, files: set[str], *, alone: bool) -> None:
    """All ranks have written, and the metadata have not been."""
    if base is not None:
        base.check_unchanged()
    commit(checkpoint_id, files, alone=alone)


def _part_paths(mappings: Any, entries: dict[str, dict[str, str]]) -> Any:
    """Flat name -> path in the nested dict, with the paths of parts in place of the paths of their weights."""
    paths = {name: path for name, path in mappings.items() if name not in entries}
    for weight, parts in entries.items():
        *container, last = mappings[weight]
        for part, entry in parts.items():
            paths[entry] = (*container, last, part) if isinstance(last, int) else (*container, f"{last}.{part}")
    return paths
