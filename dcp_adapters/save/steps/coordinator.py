"""What ranks tell the coordinator beside their write items, and what it makes of that: agreement, and the manifest.

Records hold plain values and nothing of ours reaches the disk through them. Recipes travel as indices, one byte an
item: a manifest in every local plan would be most of what 4,096 ranks gather.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import MANIFEST_JSON, Manifest
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.save.write_items import SaveLeaves
from fsdp_hooks.kernels.digest import digests
from fsdp_hooks.torch_private import without_torch_function
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

PLAIN = 255  # the kind of an item that is not the payload of a quantized tensor


@dataclasses.dataclass(frozen=True)
class TellsNow:
    """The part of a record that may differ at every save while the plan stays the same.

    scales: bit patterns of the tensor-wide scales, one for each payload whose format has one, in item order.
    replicated: (part, offset, digest) of each part that several ranks hold; all holders must have equal bytes.
    options: option -> what its step tells.
    """

    scales: list[int]
    replicated: list[tuple[str, tuple[int, ...], int]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """What a rank tells the coordinator: planner data of its local plan.

    mappings: flat name -> path in the nested state dict, of the entries this rank lists. kinds: for each item an index
    into `recipes` if it is a payload, else PLAIN. options: option -> what its step tells.
    """

    mappings: Any
    recipes: list[tuple[dict[str, Any], torch.dtype]]
    kinds: bytes
    now: TellsNow
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(leaves: SaveLeaves, items: Sequence[WriteItem], paths: Mapping[str, Any]) -> "RankRecord":
        """Return the record of a rank that lists these items. Values are read from each device at once."""
        numbers: dict[tuple[Recipe, torch.dtype], int] = {}
        seen: dict[tuple[Recipe, torch.dtype], int] = {}  # recipes that are stored alike have one number
        kinds = bytearray([PLAIN]) * len(items)
        scales: list[Tensor] = []
        watched: list[MetadataIndex] = []
        with without_torch_function():
            for place, item in enumerate(items):
                name = item.index.fqn
                if name in leaves.watched:
                    watched.append(item.index)
                q = leaves.payloads.get(name)
                if q is None:
                    continue
                kind = q.recipe, q.dtype
                if kind not in seen:
                    seen[kind] = numbers.setdefault((q.recipe.stored, q.dtype), len(numbers))
                kinds[place] = seen[kind]
                if name in leaves.wide:
                    scales.append(leaves.wide[name])
        # one read for all scales: each `.item()` would wait for the device
        bits = torch.stack(scales).view(torch.int32).tolist() if scales else []
        held = [[data] for index in watched if (data := leaves.data_of(index)) is not None]
        values = digests(held).tolist() if held else []
        replicated = [
            (index.fqn, tuple(index.offset or ()), value) for index, value in zip(watched, values, strict=True)
        ]
        recipes = [(recipe.to_json(), dtype) for recipe, dtype in numbers]
        return RankRecord(paths, recipes, bytes(kinds), TellsNow(bits, replicated))


def tell(plan: SavePlan, option: str, *, fixed: Any = None, now: Any = None) -> SavePlan:
    """Return a plan that tells something of an option; `now` may change while the plan stays the same."""
    record: RankRecord = plan.planner_data
    if fixed is not None:
        record = dataclasses.replace(record, options={**record.options, option: fixed})
    if now is not None:
        record = dataclasses.replace(
            record, now=dataclasses.replace(record.now, options={**record.now.options, option: now})
        )
    return dataclasses.replace(plan, planner_data=record)


def told(plans: Sequence[SavePlan], option: str) -> list[Any]:
    """Return what the ranks tell of an option now; None for those without it."""
    return [plan.planner_data.now.options.get(option) for plan in plans]


def with_unlisted(all_plans: list[SavePlan], unlisted: list[WriteItem], mappings: Any) -> list[SavePlan]:
    """Add to the coordinator's plan the replicated scalars that it left to a rank which takes no part in this save.

    That happens if one replica group saves for all, and if each rank saves its own (use_collectives=False).
    """
    listed = {item.index.fqn for plan in all_plans for item in plan.items}
    missing = [item for item in unlisted if item.index.fqn not in listed]
    plan, record = all_plans[0], all_plans[0].planner_data
    paths = {name: mappings[name] for item in missing if (name := item.index.fqn) in mappings}
    record = dataclasses.replace(
        record,
        mappings={**record.mappings, **paths},
        kinds=record.kinds + bytes([PLAIN] * len(missing)),
    )
    return [dataclasses.replace(plan, items=[*plan.items, *missing], planner_data=record), *all_plans[1:]]


def merged_manifest(all_plans: list[SavePlan]) -> Manifest:
    """Return the manifest of all ranks. Raises ValueError if ranks disagree on a recipe or a tensor-wide scale."""
    entries: dict[str, tuple[Any, torch.Size]] = {}  # payload -> (kind, its global size)
    scales: dict[str, tuple[int, int]] = {}  # payload -> (bits, the rank they came from)
    replicated: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}  # (part, offset) -> (digest, the rank)
    for rank, plan in enumerate(all_plans):
        record: RankRecord = plan.planner_data
        kinds = [_PayloadKind.of(recipe, dtype) for recipe, dtype in record.recipes]
        bits = iter(record.now.scales)
        for number, item in zip(record.kinds, plan.items, strict=True):
            if number == PLAIN:
                continue
            kind, payload, size = kinds[number], item.index.fqn, item.tensor_data.size  # type: ignore[union-attr]
            first = entries.setdefault(payload, (kind, size))
            if first[1] != size or (first[0] is not kind and first[0] != kind):
                name = payload.removesuffix(".payload")
                raise ValueError(
                    f"{name}: rank {rank} holds {kind.words(size)}, an earlier rank {first[0].words(first[1])}; all "
                    "ranks must quantize it alike"
                )
            if kind.wide is not None:
                _check_agreed(payload, kind.wide, next(bits), rank, scales)
        for part, offset, value in record.now.replicated:
            # DCP writes one holder's copy and drops the others; unequal copies would be lost without a word
            first_value, holder = replicated.setdefault((part, offset), (value, rank))
            if first_value != value:
                raise ValueError(
                    f"{part}: rank {holder} and rank {rank} hold different scales for the same rows, whose columns "
                    "they share; call fsdp_hooks.sync_scales(model), or write the full weight "
                    "(param.copy_(distribute_tensor(quantize(full, recipe), ...)))"
                )
    _check_listed(all_plans, {_wide_part(payload, kind.wide) for payload, (kind, _) in entries.items() if kind.wide})
    names = {payload: payload.removesuffix(".payload") for payload in entries}
    return Manifest({names[payload]: kind.entry(names[payload], size) for payload, (kind, size) in entries.items()})


def refuse_other_options(plans: Sequence[SavePlan]) -> None:
    """Raise ValueError if ranks save with different options that all must have alike."""
    for option in ("checksums", "digest"):
        if len({option in plan.planner_data.options for plan in plans}) > 1:
            raise ValueError(
                f"QuantizedSavePlanner: some ranks save with {option}=True, some with False; choose one for all"
            )
    bases = told(plans, "delta_to")
    if len(set(bases)) > 1:
        rank = next(rank for rank, base in enumerate(bases) if base != bases[0])
        raise ValueError(
            f"QuantizedSavePlanner: rank 0 saves a delta to a checkpoint of digest {bases[0]}, rank {rank} one of "
            f"{bases[rank]} (None: in full); give all ranks the same delta_to"
        )


def with_manifest(metadata: Metadata, record: Mapping[str, Any]) -> Metadata:
    """Return the metadata, with the manifest's JSON object in the planner data."""
    return dataclasses.replace(metadata, planner_data={**(metadata.planner_data or {}), MANIFEST_JSON: record})


@dataclasses.dataclass(frozen=True)
class _PayloadKind:
    """One recipe and appearance dtype, with what the loop over all items needs of them."""

    recipe: Recipe
    dtype: torch.dtype
    payload: PartSpec
    wide: str | None

    @staticmethod
    def of(recipe_json: dict[str, Any], dtype: torch.dtype) -> "_PayloadKind":
        recipe = Recipe.from_json(recipe_json)
        specs = specs_of(recipe)
        return _PayloadKind(recipe, dtype, specs[0], next((spec.name for spec in specs if not spec.per_row), None))

    def entry(self, name: str, payload: torch.Size) -> Entry:
        """Return the manifest's entry of a tensor with a payload of this global size."""
        return Entry(name, self.recipe, (*payload[:-1], payload[-1] * self.payload.block), self.dtype)

    def words(self, payload: torch.Size) -> str:
        """Return shape, dtype and recipe in words, for messages."""
        return f"{list(self.entry('', payload).shape)} as {dtype_name(self.dtype)} under {self.recipe}"


def _wide_part(payload: str, wide: str) -> str:
    return f"{payload.removesuffix('payload')}{wide}"


def _check_listed(all_plans: list[SavePlan], wide_parts: set[str]) -> None:
    missing = set(wide_parts)
    for plan in all_plans:  # the first one lists most of them
        if not missing:
            return
        missing.difference_update([item.index.fqn for item in plan.items])
    if missing:
        raise ValueError(
            f"{min(missing)}: the rank that saves it, the first of the weight's mesh, takes no part; save on all ranks "
            "of the mesh"
        )


def _check_agreed(payload: str, wide: str, bits: int, rank: int, scales: dict[str, tuple[int, int]]) -> None:
    first, first_rank = scales.setdefault(payload, (bits, rank))
    if first != bits:
        values = torch.tensor([first, bits], dtype=torch.int32, device="cpu").view(torch.float32).tolist()
        raise ValueError(
            f"{_wide_part(payload, wide)}: rank {first_rank} holds {values[0]!r}, rank {rank} {values[1]!r}; a "
            "tensor-wide scale must be the same in all shards. Call fsdp_hooks.sync_scales(model) before saving; cut "
            "pieces that are placed by hand (PlacedShard) from one quantized tensor"
        )
