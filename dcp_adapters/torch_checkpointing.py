"""Quantized tensors in checkpoints of the package torch_checkpointing, which torchtitan has beside DCP.

    save    to_save(state_dict)     every rank   the ranks compare recipes and shared scales, as they do for DCP; then
                                                 weights become their parts, plain DTensors under names of their own
                                                 (`w.payload`, `w.scale`), and the manifest one more tensor
            manager.save            every rank   the package's own: synchronous, or staged and written by its process
    load    to_load(state_dict)     every rank   parts that alias the live weights
            manager.load            every rank   QuantizedResharder: target and checkpoint are compared, as
                                                 QuantizedLoadPlanner does; all differences in one error, before a byte
                                                 is written; then the package reads into the parts

The package keeps one tensor under one name, so a weight costs two or three entries of its metadata.pkl where a dense
one costs one. It stores no checksums, and does not convert. Its files are pickles: load what you trust.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.distributed_metadata import DistributedItemMetadata, ShardingMetadata
from torch_checkpointing.dtensor_metadata import DTensorShardingMetadata

from dcp_adapters.load.compare import LoadTarget, differences, lacking, stored_names
from dcp_adapters.load.live_parts import not_writable, vectors_of
from dcp_adapters.load.together import RankShare, misfit, refuse_nothing
from dcp_adapters.plain.described import described_problem
from dcp_adapters.plain.plain_memory import plain_among
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.expand import Leaf, expand, leaves_of
from dcp_adapters.records.manifest import MANIFEST, Manifest
from dcp_adapters.save.refusals import refuse_taken_names
from dcp_adapters.save.steps.coordinator import RankRecord, merged_manifest
from dcp_adapters.save.write_items import SaveLeaves
from dcp_adapters.torch_private import flatten_state_dict
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.versions import count_writes
from fsdp_hooks.writable import meeting
from qtensor.tensor.contents import forget_initial_values

__all__ = ["QuantizedResharder", "to_load", "to_save"]

NestedPath = tuple[str | int, ...]
WAY = "wrap it: manager.save(path, {item: to_save(state_dict)}), manager.load(path, into={item: to_load(state_dict)})"
PLACE = (MANIFEST,)  # of the manifest in an item


def to_save(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return an item for `CheckpointManager.save`: the parts of all weights, aliased, and the manifest.

    Call it on all ranks, for every save: they exchange what they hold, as large as a plan of DCP, and an error of one
    is raised on all. Anything that is no tensor goes into an item of its own, which the package loads by itself.

    Args:
        state_dict: of tensors, nested or flat: a model's, or an optimizer's states by name.
        group: the ranks that save; None: all.

    Raises:
        ValueError: on all ranks: they hold different recipes, or different scales for what they share; an entry is no
            tensor, has no bytes, or says itself where it lies (a PlacedShard, say); a name is taken; a column cut does
            not fall on block boundaries.

    Example:
        ```python
        >>> from dcp_adapters.torch_checkpointing import to_save
        >>> list(to_save({"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}))
        ['weight.payload', 'weight.scale', 'qtensor.manifest']
        ```
    """
    item: dict[str, Any] = {}
    try:
        item, own = _expanded(state_dict), _Told.of(state_dict)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others would wait for this rank
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        own = _Told(SavePlan([]), frozenset(), f"{kind}{error}")
    told = [own]
    if dist.is_initialized() and (ranks := dist.get_world_size(group)) > 1:
        told = [own] * ranks
        dist.all_gather_object(told, own, group=group)
    _refuse_told(told)
    return {**item, MANIFEST: merged_manifest([one.plan for one in told]).to_tensor()}


class LoadItem(dict[str, Any]):
    """What `to_load` returns: parts that alias live weights, and what is known of these.

    Attributes:
        target: what is to be loaded. leaves: the live tensors.
    """

    target: LoadTarget
    leaves: dict[str, Leaf]


def to_load(state_dict: Mapping[str, Any]) -> LoadItem:
    """Return an item for `into=` of `CheckpointManager.load`: the parts of live weights, which are written in place.

    Raises:
        ValueError: a tensor cannot be loaded as it is: it is placed otherwise than its DTensor tells, a slice that is a
            copy, gathered by FSDP, read-only, or no tensor.

    Example:
        ```python
        >>> from dcp_adapters.torch_checkpointing import to_load
        >>> list(to_load({"weight": quantize(torch.zeros(64, 64), MXFP8BlockScaling())}))
        ['weight.payload', 'weight.scale']
        ```
    """
    item = LoadItem(_expanded(state_dict))
    flat, paths = flatten_state_dict(dict(state_dict))
    item.leaves = leaves = leaves_of(flat)
    item.target = LoadTarget.of(leaves, paths)
    problems = [f"{name}: {problem}" for name, problem in item.target.unfit.items()]
    problems += not_writable(leaves, list(leaves))
    wide = vectors_of({name: leaf.quantized for name, leaf in leaves.items() if leaf.quantized is not None})
    problems += [f"{part}: it is of a gathered weight; load into the sharded model" for part in wide]
    if problems:
        raise ValueError("to_load: the target can not be loaded into:" + in_lines(problems))
    return item


class QuantizedResharder(DefaultResharder):
    """Loads items of `to_save` into those of `to_load`, on any world size, mesh or shard dim, bit for bit.

    Give it to the items that hold quantized weights: `ItemSpec(resharder=QuantizedResharder())`, from the first save
    on. One manager saves one layout: the package describes it once, so changed shapes or formats need a new manager.

    Args:
        allow_partial_load: permits tensors that only the target or only the checkpoint has.
        **kwargs: those of DefaultResharder.

    Raises:
        TypeError: while saving or loading: an item was not made by `to_save`, or `to_load`.
        ValueError: while loading, before anything is written: one error that lists every missing, extra, misshapen or
            differently quantized tensor, on each rank whose target has some. In a load no rank waits for another.
        RuntimeError: the checkpoint lacks pieces of a tensor. Others are loaded already.

    Example:
        ```python
        >>> from torch_checkpointing import CheckpointManager, ItemSpec
        >>> from dcp_adapters.torch_checkpointing import QuantizedResharder
        >>> config = CheckpointManager.Config(items={"model": ItemSpec(resharder=QuantizedResharder())})
        ```
    """

    def __init__(self, *, allow_partial_load: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.allow_partial_load = allow_partial_load

    def extract_sharding_metadata(self, item_key: str, item_value: Any) -> dict[NestedPath, ShardingMetadata]:
        """Return how the parts are sharded; called by the package for saves and for loads."""
        if not isinstance(item_value, LoadItem) and not (isinstance(item_value, Mapping) and MANIFEST in item_value):
            raise TypeError(
                f"item {item_key!r} is a {type(item_value).__name__} that neither to_save nor to_load has made; {WAY}"
            )
        return super().extract_sharding_metadata(item_key, item_value)

    def should_reshard(
        self,
        source_metadata: DistributedItemMetadata | None,
        target_metadata: dict[NestedPath, ShardingMetadata] | None,
    ) -> bool:
        """Return True: what is read directly is compared with nothing."""
        if source_metadata is None:
            raise ValueError(
                "the checkpoint has no sharding metadata of this item: it was saved without a resharder, and nothing "
                "tells which bytes are whose; load it by what saved it"
            )
        return True

    def load(  # noqa: PLR0913, PLR0917 - the package's signature
        self,
        source_path: Path,
        item_key: str,
        target_metadata: dict[NestedPath, ShardingMetadata],
        source_metadata: DistributedItemMetadata,
        target: Any,
        storage: Any,
    ) -> list[NestedPath]:
        """Compare, then read into the live parts."""
        if not isinstance(target, LoadItem):
            raise TypeError(f"item {item_key!r} is a {type(target).__name__} that to_load has not made; {WAY}")
        metadata, stored = _metadata_of(source_metadata), source_metadata.nested_path_to_metadata
        manifest = Manifest()
        if PLACE in stored:
            buffer = {MANIFEST: torch.empty(_shape(stored[PLACE]), dtype=torch.uint8, device="cpu")}
            own = super().extract_sharding_metadata(item_key, buffer)
            super().load(source_path, item_key, own, source_metadata, buffer, storage)
            manifest = Manifest.from_tensor(buffer[MANIFEST])
        partial = self.allow_partial_load
        problems = differences(target.target, metadata, manifest, partial=partial)
        lacks = {} if partial else lacking(target.target, metadata, manifest)
        if problems or lacks:
            raise misfit(problems, lacks, 1)
        found = stored_names(target.target, metadata, manifest)
        refuse_nothing([RankShare(frozenset(), (), bool(found), () if found else tuple(target.target.entries))])
        there = {path: one for path, one in target_metadata.items() if path in stored}
        # the package reads one of the tensors that share memory, and takes the others to be the same
        paths = {".".join(map(str, path)): path for path in there}
        local = {
            name: leaf for path, leaf in _local_leaves(target, there).items() for name in [".".join(map(str, path))]
        }
        for tied in meeting(plain_among(local)):
            first, *more = (
                self._read_one(source_path, item_key, paths[name], there, source_metadata, target, storage)
                for name in tied
            )
            if any(not torch.equal(first, other) for other in more):
                raise ValueError(
                    f"{', '.join(sorted(tied))}: they share memory in the target, and the checkpoint has different "
                    "values for them; nothing has been loaded. Untie them in the target, or leave one out "
                    "(allow_partial_load=True)"
                )
        left = super().load(source_path, item_key, there, source_metadata, target, storage)
        written = [target.leaves[name] for name in found]
        forget_initial_values(leaf.quantized for leaf in written if leaf.quantized is not None)
        # the package writes into the parts, which torch does not count as writes of the weights
        count_writes([leaf.value for leaf in written if leaf.quantized is not None or leaf.plain is not leaf.value])
        if left:
            names = in_lines(sorted(".".join(map(str, path)) for path in left))
            raise RuntimeError(f"the checkpoint lacks pieces of these; the others are loaded:{names}")
        return []

    def _read_one(  # noqa: PLR0913, PLR0917 - those of `load`, and which
        self, source_path: Path, item_key: str, path: NestedPath, there: Any, source: Any, target: Any, storage: Any
    ) -> Tensor:
        """Return the bytes of one tensor of the checkpoint, read into memory of its own."""
        buffer = torch.empty_like(_local_leaves(target, {path})[path])
        item: Any = buffer
        for name in reversed(path):
            item = {name: item}
        super().load(source_path, item_key, {path: there[path]}, source, item, storage)
        return buffer.reshape(-1).view(torch.uint8)


def _local_leaves(value: Any, wanted: Collection[NestedPath], at: NestedPath = ()) -> dict[NestedPath, Tensor]:
    """Return the local tensors of an item that are among the wanted, by path."""
    if isinstance(value, Tensor):
        return {at: local_of(value)} if at in wanted else {}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {path: leaf for name, item in items for path, leaf in _local_leaves(item, wanted, (*at, name)).items()}


def _expanded(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the parts of its weights, without gradients; raises for what is no tensor."""
    flat, _ = flatten_state_dict(dict(state_dict))
    for name, value in flat.items():
        if (problem := described_problem(value)) is not None:
            raise ValueError(f"{name}: {problem}")
    others = [name for name, value in flat.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(
            f"{min(others)}: a {type(flat[min(others)]).__name__}, which the package does not restore where it "
            "reshards; put what is no tensor into an item of its own"
        )
    detached: dict[str, Any] = _detached(expand(state_dict))
    return detached


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _detached(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_detached(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


class _Told(NamedTuple):
    """What a rank tells the others.

    plan: of its weights' parts. whole: names of what is no DTensor, with shape and dtype. error: what went wrong.
    """

    plan: SavePlan
    whole: frozenset[tuple[str, tuple[int, ...], torch.dtype]]
    error: str | None = None

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> "_Told":
        flat, paths = flatten_state_dict(dict(state_dict))
        leaves = SaveLeaves.of(flat)
        refuse_taken_names(leaves.plain, leaves.entries)
        whole = {(name, tuple(leaf.shape), leaf.dtype) for name, leaf in flat.items() if not isinstance(leaf, DTensor)}
        plan = SavePlan(leaves.items, planner_data=RankRecord.of(leaves, leaves.items, paths))
        return _Told(plan, frozenset(whole))


def _refuse_told(told: Sequence[_Told]) -> None:
    """Raise ValueError for what went wrong on a rank, and for whole tensors that not all ranks have alike."""
    failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(told) if one.error is not None]
    if failed:
        raise ValueError("to_save: nothing can be saved:" + in_lines(failed))
    for rank, one in enumerate(told):
        other = one.whole ^ told[0].whole
        if other:
            name, shape, dtype = min(other, key=lambda each: each[0])
            raise ValueError(
                f"to_save: {name}: it is no DTensor, and rank 0 and rank {rank} do not hold it alike ({shape}, {dtype} "
                "on one of them); the package takes it for a replica that all ranks have, and keeps that of one. Make "
                "it a DTensor, or give it an item that this rank alone saves"
            )


def _metadata_of(source: DistributedItemMetadata) -> Metadata:
    """Return what the package says of an item, as DCP would: shapes, dtypes and paths."""
    entries, paths = {}, {}
    for path, groups in source.nested_path_to_metadata.items():
        first = groups[0].sharding_metadata
        if isinstance(first, DTensorShardingMetadata):
            name = ".".join(map(str, path))
            dtype: torch.dtype = getattr(torch, first.dtype.removeprefix("torch."))
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(first.global_shape), [])
            paths[name] = path
    return Metadata(entries, planner_data=paths)  # type: ignore[arg-type]


def _shape(groups: Any) -> tuple[int, ...]:
    return tuple(groups[0].sharding_metadata.global_shape)
