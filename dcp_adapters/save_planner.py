"""QuantizedSavePlanner: raw payloads and scales into a DCP checkpoint, with stock DCP doing the rest.

    set_up_planner       every rank         flatten as DCP does, then expand quantized leaves into parts
    create_local_plan    every rank         stock write items; beside them, one byte an item for the recipe and the
                                            values of the tensor-wide scales
    create_global_plan   the coordinator    recipes and scales must agree over all ranks; merge the manifest; add it as
                                            one more entry; retire the checkpoint that is overwritten, if there is one
    finish_plan ...      every rank         stock

All checks run before the first byte is written, and an error raised on one rank reaches all of them through DCP's plan
exchange.
"""

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_adapters.expand import expand_flat, quantized_local
from dcp_adapters.manifest import MANIFEST, MANIFEST_JSON, Manifest, TensorEntry
from dcp_adapters.overwrite import retire
from fsdp_hooks.digest import digest
from fsdp_hooks.scale_sync import local_of
from qtensor.formats import specs_of
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor

__all__ = ["QuantizedSavePlanner"]

PLAIN = 255  # the kind of an item that is not the payload of a quantized tensor


@dataclasses.dataclass(frozen=True)
class _Record:
    """What a rank tells the coordinator beside its items (plain values; nothing of ours reaches the disk).

    kinds: for each item an index into `recipes` where it is a payload, else PLAIN.
    replicated: (part, offset, digest) of each part that several ranks hold; all holders must have equal bytes.
    scales: bit patterns of the tensor-wide scales, one for each payload whose format has one, in item order.
    """

    mappings: Any
    recipes: list[tuple[dict[str, Any], torch.dtype]]
    kinds: bytes
    scales: list[int]
    replicated: list[tuple[str, tuple[int, ...], int]]


class QuantizedSavePlanner(DefaultSavePlanner):
    """Saves quantized tensors as their parts plus a manifest (checkpoint format version 1), the rest as stock DCP does.

    Use it with `dcp.save` and `dcp.async_save` on state dicts of plain or sharded models, nested or flat. Give
    `async_save` a process group of its own (`dist.new_group(backend="gloo")`): its upload thread exchanges plans while
    training uses the default one.

    Args:
        **kwargs: those of DefaultSavePlanner, except enable_plan_caching=True.

    Raises:
        ValueError: with enable_plan_caching=True (DCP's cache compares neither dtypes nor formats, so a second save
            could be described by the first one's metadata). While saving, on all ranks and before anything is written:
            ranks disagree on a recipe or a tensor-wide scale; a name is taken; a column cut does not fall on block
            boundaries.
    """

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("enable_plan_caching"):
            raise ValueError(
                "QuantizedSavePlanner: enable_plan_caching=True is not supported: DCP's plan cache compares neither "
                "dtypes nor formats"
            )
        super().__init__(**kwargs)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        """Flatten, then expand every quantized leaf."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.checkpoint_id = getattr(storage_meta, "checkpoint_id", None)
        if MANIFEST in self.state_dict:
            raise ValueError(
                f"the state dict holds an entry {MANIFEST!r}, which is the name of the checkpoint's own manifest; "
                "rename it"
            )
        self.quantized = {
            name: q for name, value in self.state_dict.items() if (q := quantized_local(value)) is not None
        }
        self.state_dict, owner = expand_flat(self.state_dict)
        if self.flatten_state_dict:
            self.mappings = _part_paths(self.mappings, owner)

    def create_local_plan(self) -> SavePlan:
        """Stock items (a replicated scalar only on one rank), and this rank's record as planner data."""
        plan = super().create_local_plan()
        items = [item for item in plan.items if self._lists(item)]
        self.unlisted = [item for item in plan.items if not self._lists(item)]
        payloads = {f"{name}.payload": q for name, q in self.quantized.items()}
        recipes: list[tuple[Recipe, torch.dtype]] = []
        kinds = bytearray()
        listed: list[QuantizedTensor] = []
        for item in items:
            q = payloads.get(item.index.fqn)
            if q is None:
                kinds.append(PLAIN)
                continue
            kind = (q.recipe.stored, q.dtype)
            if kind not in recipes:
                recipes.append(kind)
            kinds.append(recipes.index(kind))
            listed.append(q)
        record = _Record(
            mappings=self.mappings,
            recipes=[(recipe.to_json(), dtype) for recipe, dtype in recipes],
            kinds=bytes(kinds),
            scales=_scale_bits(listed),
            replicated=self._replicated(items),
        )
        self.plan = dataclasses.replace(plan, items=items, planner_data=record)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Coordinator only: check that ranks agree, add the manifest, then plan as stock DCP does."""
        all_plans = [_with_unlisted(all_plans, self.unlisted), *all_plans[1:]]
        manifest = _merge(all_plans)
        data = manifest.to_tensor()
        self.state_dict[MANIFEST] = data
        plans = [dataclasses.replace(plan, planner_data=plan.planner_data.mappings) for plan in all_plans]
        plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, _manifest_item(data)])
        plans, metadata = super().create_global_plan(plans)
        planner_data = {**(metadata.planner_data or {}), MANIFEST: (MANIFEST,), MANIFEST_JSON: manifest.to_json()}
        self.metadata = dataclasses.replace(metadata, planner_data=planner_data)
        retire(self.checkpoint_id, ranks=len(all_plans))
        return plans, self.metadata

    def _replicated(self, items: list[WriteItem]) -> list[tuple[str, tuple[int, ...], int]]:
        """Digests of what several ranks hold: `[N, 1]` scales of weights cut along columns, and amax histories."""
        watched = {
            f"{name}.{spec.name}"
            for name, q in self.quantized.items()
            for spec in q.specs()
            if (spec.per_row and not spec.block and self._cuts_columns(f"{name}.payload")) or spec.length is not None
        }
        return [
            (item.index.fqn, tuple(item.index.offset or ()), int(digest([local_of(self.state_dict[item.index.fqn])])))
            for item in items
            if item.index.fqn in watched
        ]

    def _cuts_columns(self, payload: str) -> bool:
        value = self.state_dict[payload]
        return isinstance(value, DTensor) and any(p.is_shard(value.ndim - 1) for p in value.placements)

    def _lists(self, item: WriteItem) -> bool:
        """Whether this rank lists the item: a scalar that every rank of a mesh holds is listed by the mesh's first."""
        value = self.state_dict[item.index.fqn]
        if not isinstance(value, DTensor) or value.ndim:
            return True
        return not any(value.device_mesh.get_coordinate() or ())


def _with_unlisted(all_plans: list[SavePlan], unlisted: list[WriteItem]) -> SavePlan:
    """The coordinator's plan, with the replicated scalars that it left to a rank which takes no part in this save.

    That is so where one replica group saves for all, and where each rank saves its own (use_collectives=False).
    """
    listed = {item.index.fqn for plan in all_plans for item in plan.items}
    missing = [item for item in unlisted if item.index.fqn not in listed]
    plan, record = all_plans[0], all_plans[0].planner_data
    record = dataclasses.replace(record, kinds=record.kinds + bytes([PLAIN] * len(missing)))
    return dataclasses.replace(plan, items=[*plan.items, *missing], planner_data=record)


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


def _merge(all_plans: list[SavePlan]) -> Manifest:
    """The manifest of all ranks. Raises ValueError where ranks disagree on a weight's recipe or tensor-wide scale."""
    entries: dict[str, TensorEntry] = {}
    scales: dict[str, tuple[int, int]] = {}  # name -> (bits, the rank they came from)
    digests: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}  # (part, offset) -> (digest, the rank)
    listed = {item.index.fqn for plan in all_plans for item in plan.items}
    for rank, plan in enumerate(all_plans):
        record: _Record = plan.planner_data
        recipes = [(Recipe.from_json(recipe), dtype) for recipe, dtype in record.recipes]
        bits = iter(record.scales)
        for kind, item in zip(record.kinds, plan.items, strict=True):
            if kind == PLAIN:
                continue
            recipe, dtype = recipes[kind]
            specs = specs_of(recipe)
            name, size = item.index.fqn.removesuffix(".payload"), item.tensor_data.size  # type: ignore[union-attr]
            entry = TensorEntry(recipe, (*size[:-1], size[-1] * specs[0].block), dtype)
            if entries.setdefault(name, entry) != entry:
                raise ValueError(
                    f"{name}: rank {rank} holds {entry}, an earlier rank {entries[name]}; all ranks must quantize it "
                    "alike"
                )
            wide = next((spec.name for spec in specs if not spec.per_row), None)
            if wide is not None:
                _check_agreed(f"{name}.{wide}", next(bits), rank, scales)
                if f"{name}.{wide}" not in listed:
                    raise ValueError(
                        f"{name}.{wide}: the rank that saves it, the first of the weight's mesh, takes no part; save "
                        "on all ranks of the mesh"
                    )
        for part, offset, value in record.replicated:
            first, holder = digests.setdefault((part, offset), (value, rank))
            if first != value:
                raise ValueError(
                    f"{part}: rank {holder} and rank {rank} hold different scales for the same rows, whose columns "
                    "they share; write the full weight (param.copy_(distribute_tensor(quantize(full, recipe), ...))) "
                    "or use a recipe whose scales belong to blocks"
                )
    return Manifest(entries)


def _check_agreed(name: str, bits: int, rank: int, scales: dict[str, tuple[int, int]]) -> None:
    first, first_rank = scales.setdefault(name, (bits, rank))
    if first != bits:
        values = torch.tensor([first, bits], dtype=torch.int32).view(torch.float32).tolist()
        raise ValueError(
            f"{name}: rank {first_rank} holds {values[0]!r}, rank {rank} {values[1]!r}; a tensor-wide scale must be "
            "the same in all shards. Call fsdp_hooks.sync_scales(model) before saving"
        )


def _manifest_item(data: torch.Tensor) -> WriteItem:
    offsets = torch.Size([0])
    return WriteItem(
        index=MetadataIndex(MANIFEST, offsets),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=data.size()),
            properties=TensorProperties.create_from_tensor(data),
            size=data.size(),
        ),
    )
