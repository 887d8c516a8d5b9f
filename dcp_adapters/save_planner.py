"""QuantizedSavePlanner: raw payloads and scales into a DCP checkpoint, with stock DCP doing the rest.

    set_up_planner       every rank         flatten as DCP does; quantized leaves become local parts and their items
    create_local_plan    every rank         stock write items for the rest; beside all items, one byte an item for the
                                            recipe and the values of the tensor-wide scales
    create_global_plan   the coordinator    recipes and scales must agree over all ranks; the manifest and the checksum
                                            table become two more entries; what is overwritten is removed
    finish_plan          every rank         stock; or the plan of an earlier save, see plan_cache.py
    resolve_data         every rank         stock, digested on the way out; the checksum table when it is asked for

All checks run before the first byte is written, and an error raised on one rank reaches all of them through DCP's plan
exchange. A chunk that a writer lost fails the save, too: see `_Committed`.
"""

import dataclasses
import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_adapters import plan_cache
from dcp_adapters.checksums import CHECKSUMS, ROW, Checksums
from dcp_adapters.coordinator import PLAIN, Now, Record, merged_manifest, with_unlisted
from dcp_adapters.expand import plain_leaf, quantized_local, refuse_hidden
from dcp_adapters.manifest import MANIFEST, MANIFEST_JSON, Manifest
from dcp_adapters.overwrite import clear, own_names
from dcp_adapters.write_items import plain_item, quantized_items
from fsdp_hooks.digest import digest
from qtensor.tensor import QuantizedTensor

__all__ = ["QuantizedSavePlanner"]


class QuantizedSavePlanner(DefaultSavePlanner):
    """Saves quantized tensors as their parts plus a manifest (checkpoint format version 1), the rest as stock DCP does.

    Use it with `dcp.save` and `dcp.async_save` on state dicts of plain or sharded models, nested or flat. Give
    `async_save` a process group of its own (`dist.new_group(backend="gloo")`): its upload thread exchanges plans while
    training uses the default one.

    Args:
        checksums: store an xxh3 digest of every chunk, made from the bytes as they are written.
        **kwargs: those of DefaultSavePlanner. enable_plan_caching=True spares the exchange of plans while the state
            dict keeps its names, shapes, placements and formats.

    Raises:
        ValueError: while saving, on all ranks and before anything is written: ranks disagree on a recipe or a
            tensor-wide scale; a name is taken; a column cut does not fall on block boundaries.
        RuntimeError: the storage writer lost a chunk (a writing thread that failed, say); no `.metadata` is written.
    """

    def __init__(self, *, checksums: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.with_checksums = checksums

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        """Flatten; keep the local parts of quantized leaves, and what stock DCP saves, apart."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.checkpoint_id = getattr(storage_meta, "checkpoint_id", None)
        flat, owner = self.state_dict, dict[str, str]()
        self.state_dict, self.parts, self.part_items = {}, dict[str, Tensor](), list[WriteItem]()
        self.payloads: dict[str, QuantizedTensor] = {}
        self.on_first_rank_only: dict[str, Any] = {}  # scalars that all ranks of a mesh hold: name -> DTensor
        for name, value in flat.items():
            refuse_hidden(name, value)
            q = quantized_local(value)
            if q is None:
                self.state_dict[name] = leaf = plain_leaf(value)
                if isinstance(leaf, DTensor) and not leaf.ndim:
                    self.on_first_rank_only[name] = leaf
                continue
            owner |= {f"{name}.{spec.name}": name for spec in q.specs()}
            for item, part in quantized_items(name, value, q):
                self.parts[item.index.fqn] = part
                self.part_items.append(item)
                if isinstance(value, DTensor) and not part.ndim:
                    self.on_first_rank_only[item.index.fqn] = value
            if f"{name}.payload" in self.parts:
                self.payloads[f"{name}.payload"] = q
        self._refuse_taken_names(owner)
        self.watched = _watched(flat, self.payloads)
        if self.flatten_state_dict:
            self.mappings = _part_paths(self.mappings, owner)
        self.checksums = Checksums()

    def create_local_plan(self) -> SavePlan:
        """This rank's items, with its record as planner data; or the token of an earlier plan that is the same."""
        caching, self._enable_plan_caching = self._enable_plan_caching, False  # stock's compares no formats
        try:
            stock = super().create_local_plan()
        finally:
            self._enable_plan_caching = caching
        items = [*stock.items, *self.part_items]
        self.unlisted = [item for item in items if not self._lists(item)]
        if self.unlisted:
            items = [item for item in items if self._lists(item)]
        recipes: list[tuple[Any, torch.dtype]] = []
        kinds = bytearray(PLAIN for _ in items)
        listed: list[QuantizedTensor] = []
        for number, item in enumerate(items):
            q = self.payloads.get(item.index.fqn)
            if q is None:
                continue
            kind = (q.recipe.stored, q.dtype)
            if kind not in recipes:
                recipes.append(kind)
            kinds[number] = recipes.index(kind)
            listed.append(q)
        now = Now(_scale_bits(listed), self._replicated(items))
        record = Record(self.mappings, [(recipe.to_json(), dtype) for recipe, dtype in recipes], bytes(kinds), now)
        self.plan = dataclasses.replace(stock, items=items, planner_data=record)
        self.cached = plan_cache.lookup_local(self.plan) if self._enable_plan_caching else None
        if self.cached is None:
            return self.plan
        unchanged = plan_cache.Unchanged(self.cached.token, self.cached.place, now)
        return SavePlan([], planner_data=unchanged, usable=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Coordinator only: check that ranks agree, plan as stock DCP does, add the manifest and the checksums."""
        alone = (
            all_plans[0].storage_data is not None
        )  # so writers mark the plans of ranks that save without collectives
        all_plans, token = plan_cache.restored(all_plans)
        all_plans = with_unlisted(all_plans, self.unlisted)
        manifest = merged_manifest(all_plans)
        known = plan_cache.lookup_global(token) if token else None
        if known is not None:
            self.parts[MANIFEST] = known.manifest_data
            self.metadata = _fresh(known.metadata)
            cleared = clear(self.checkpoint_id, alone=alone)
            return [SavePlan([], planner_data=(cleared, None), usable=False) for _ in all_plans], self.metadata
        plans, metadata, data = self._planned(all_plans, manifest)
        if self._enable_plan_caching:
            token = plan_cache.remember_global(plan_cache.Global(all_plans, plans, metadata, manifest, data))
        cleared = clear(self.checkpoint_id, alone=alone)
        plans = [dataclasses.replace(plan, planner_data=(cleared, (token, place))) for place, plan in enumerate(plans)]
        self.global_plan, self.metadata = plans, _fresh(metadata)
        return plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan to write: the coordinator's, or the one kept from an earlier save."""
        cleared, kept = new_plan.planner_data
        if not new_plan.usable:
            assert self.cached is not None
            plan_cache.remember_local(self.cached)
            new_plan = dataclasses.replace(self.cached.final, storage_data=new_plan.storage_data)
        elif self._enable_plan_caching:
            token, place = kept
            plan_cache.remember_local(plan_cache.Local(token, place, self.plan, new_plan))
        if new_plan.items:
            names = own_names(self.checkpoint_id, new_plan.storage_data, cleared=cleared)
            new_plan = dataclasses.replace(new_plan, storage_data=names)
        self.plan = new_plan
        return new_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The local part, or what stock finds."""
        part = self.parts.get(index.fqn)
        return super().lookup_object(index) if part is None else part

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What the writer stores for an item; digested, if checksums are on."""
        if write_item.index.fqn == CHECKSUMS:
            return self.checksums.table(self.plan.items, self.resolve_data)
        data: Tensor | io.BytesIO = self.checksums.pickled.get(write_item.index) or super().resolve_data(write_item)
        return self.checksums.seen(write_item.index, data) if self.with_checksums else data

    def _planned(self, all_plans: list[SavePlan], manifest: Manifest) -> tuple[list[SavePlan], Metadata, Tensor]:
        """Stock's global plan with our two entries, and the manifest as a tensor."""
        self.parts[MANIFEST] = data = manifest.to_tensor()
        plans = [dataclasses.replace(plan, planner_data=plan.planner_data.mappings) for plan in all_plans]
        plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, plain_item(MANIFEST, data)])
        caching, self._enable_plan_caching = self._enable_plan_caching, False
        try:
            plans, metadata = super().create_global_plan(plans)
        finally:
            self._enable_plan_caching = caching
        planner_data = {**(metadata.planner_data or {}), MANIFEST: (MANIFEST,), MANIFEST_JSON: manifest.to_json()}
        if self.with_checksums:
            plans, entry = _with_checksums(plans)
            metadata.state_dict_metadata[CHECKSUMS] = entry
            planner_data[CHECKSUMS] = (CHECKSUMS,)
        plans = [dataclasses.replace(plan, planner_data=None) for plan in plans]
        return plans, dataclasses.replace(metadata, planner_data=planner_data), data

    def _lists(self, item: WriteItem) -> bool:
        """Whether this rank lists the item: a scalar that every rank of a mesh holds is listed by the mesh's first."""
        value = self.on_first_rank_only.get(item.index.fqn)
        return value is None or not any(value.device_mesh.get_coordinate() or ())

    def _replicated(self, items: list[WriteItem]) -> list[tuple[str, tuple[int, ...], int]]:
        """Digests of what several ranks hold."""
        return [
            (item.index.fqn, tuple(item.index.offset or ()), int(digest([self.parts[item.index.fqn]])))
            for item in items
            if item.index.fqn in self.watched
        ]

    def _refuse_taken_names(self, owner: dict[str, str]) -> None:
        for name in (MANIFEST, CHECKSUMS):
            if name in self.state_dict:
                raise ValueError(
                    f"the state dict holds an entry {name!r}, which is the name of the checkpoint's own; rename it"
                )
        taken = owner.keys() & self.state_dict.keys()
        if taken:
            raise ValueError(
                f"the state dict holds {min(taken)!r} twice: as an entry and as a part of a quantized weight; rename "
                "the entry"
            )


class _Committed(Metadata):
    """Metadata that refuses to be written while a chunk of it has no place in the storage.

    A writer hands the metadata its results and pickles it as the very last step of a save. Stock FileSystemWriter
    loses the exception of a writing thread (thread_count >= 2) and with it the chunks of that thread: pickling is where
    that can still fail the save. What reaches the disk is a plain Metadata.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.storage_data, dict):
            self._check_complete(self.storage_data)
        return Metadata, (self.state_dict_metadata,), dict(vars(self))

    def _check_complete(self, stored: dict[Any, Any]) -> None:
        for name, entry in self.state_dict_metadata.items():
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
            for chunk in chunks:
                index = MetadataIndex(name, None if chunk is None else chunk.offsets)
                if index not in stored:
                    where = "" if chunk is None else f" at {tuple(chunk.offsets)}"
                    raise RuntimeError(
                        f"{name}{where}: the storage writer did not write it, although no error was reported; a "
                        "writing thread may have failed (disk full?). The checkpoint is incomplete and gets no "
                        ".metadata"
                    )


def _fresh(metadata: Metadata) -> Metadata:
    """A record of its own for each save: writers fill in where things are stored."""
    return _Committed(metadata.state_dict_metadata, metadata.planner_data)


def _with_checksums(plans: list[SavePlan]) -> tuple[list[SavePlan], TensorStorageMetadata]:
    """Each plan with an item for its rows of the table, and the table's metadata."""
    total, first = sum(len(plan.items) for plan in plans), 0
    out: list[SavePlan] = []
    chunks: list[ChunkStorageMetadata] = []
    entry = None
    for plan in plans:
        rows = torch.empty(len(plan.items), ROW, dtype=torch.uint8, device="meta")
        if not plan.items:
            out.append(plan)
            continue
        item = plain_item(CHECKSUMS, rows, rows=(first, total))
        first += len(plan.items)
        assert item.tensor_data is not None
        item = dataclasses.replace(item, index=dataclasses.replace(item.index, index=len(chunks)))
        chunks.append(item.tensor_data.chunk)  # type: ignore[union-attr]
        entry = TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, chunks)  # type: ignore[union-attr]
        out.append(dataclasses.replace(plan, items=[*plan.items, item]))
    assert entry is not None  # the manifest is always an item
    return out, entry


def _watched(flat: Any, payloads: dict[str, QuantizedTensor]) -> set[str]:
    """Parts that several ranks hold: `[N, 1]` scales of weights cut along columns, and amax histories."""
    return {
        f"{name}.{spec.name}"
        for payload, q in payloads.items()
        for name in [payload.removesuffix(".payload")]
        for spec in q.specs()
        if (spec.per_row and not spec.block and _cuts_columns(flat[name])) or spec.length is not None
    }


def _cuts_columns(value: Any) -> bool:
    return isinstance(value, DTensor) and any(p.is_shard(value.ndim - 1) for p in value.placements)


def _part_paths(mappings: Any, owner: dict[str, str]) -> Any:
    """Flat name -> path in the nested dict, with the paths of parts in place of the paths of their weights."""
    weights = set(owner.values())
    paths = {name: path for name, path in mappings.items() if name not in weights}
    for part, weight in owner.items():
        path, suffix = mappings[weight], part[len(weight) :]
        paths[part] = (*path, suffix[1:]) if isinstance(path[-1], int) else (*path[:-1], f"{path[-1]}{suffix}")
    return paths


def _scale_bits(tensors: list[QuantizedTensor]) -> list[int]:
    """Bit patterns of the tensor-wide scales, read back from the device at once."""
    values = [getattr(q, wide).reshape(-1)[:1] for q in tensors if (wide := q.tensor_wide())]
    return torch.cat(values).view(torch.int32).tolist() if values else []
