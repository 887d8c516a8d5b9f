"""QuantizedLoadPlanner: payloads and scales from a DCP checkpoint straight into the live shards, on any world size, mesh or shard dim.

    set_up_planner       every rank   compare target and checkpoint; all differences in one error, before anything is touched; then expand:
                                      the parts alias the live shards, so that stock resharding writes the weights in place
    create_local_plan    every rank   stock read items
    finish_plan          every rank   in front of them, one byte from the end of every file: a missing or truncated file stops the load before
                                      the first byte is written
    load / commit        every rank   stock

Where the storage drops planner data the manifest is read first, as a tensor, and compared when it arrives.
"""

import dataclasses
import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_adapters.differences import Target, differences, recipe_differences
from dcp_adapters.expand import expand_flat, quantized_local
from dcp_adapters.manifest import MANIFEST, Manifest, manifest_of
from fsdp_hooks.torch_private import flatten_state_dict

__all__ = ["QuantizedLoadPlanner"]

PROBE = "qtensor.probe"
# With at most this many stored chunks each rank probes every file, so that all ranks stop before writing; beyond, only the files it reads
# (opening every file of a checkpoint from every one of thousands of ranks would cost more than it protects).
PROBE_ALL_BELOW = 100_000


class QuantizedLoadPlanner(DefaultLoadPlanner):
    """Loads checkpoints written with QuantizedSavePlanner, bit for bit, into quantized targets of the same recipes.

    Use it with `dcp.load` on state dicts of plain or sharded models, nested or flat; the tensors in them are written in place.

    Args:
        on_mismatch: "raise", a target whose recipe is not the checkpoint's is an error.
        **kwargs: those of DefaultLoadPlanner. allow_partial_load=True permits tensors that only the target or only the checkpoint has.

    Raises:
        ValueError: an unknown on_mismatch. While loading, on all ranks and before anything is written: one error that lists every missing, extra,
            misshapen or differently quantized tensor. A tensor of the checkpoint is extra if the target has its container (the dict that held it)
            but not the tensor; so loading only {"model": ...} of a checkpoint with an optimizer in it is fine.
        EOFError, FileNotFoundError: a file of the checkpoint is truncated or missing.
    """

    def __init__(self, *, on_mismatch: str = "raise", **kwargs: Any) -> None:
        if on_mismatch != "raise":
            raise ValueError(f'QuantizedLoadPlanner: on_mismatch={on_mismatch!r} is not one of "raise"')
        super().__init__(**kwargs)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Compare, then flatten and expand."""
        assert metadata is not None
        flat, paths = flatten_state_dict(state_dict) if self.flatten_state_dict else (state_dict, {name: (name,) for name in state_dict})
        self.manifest = manifest_of(metadata)
        target = Target.of(flat, paths)
        problems = differences(target, metadata, self.manifest, partial=self.allow_partial_load)
        if problems:
            raise ValueError(
                "the checkpoint does not fit the target; nothing has been loaded:\n" + "\n".join(f"  {problem}" for problem in problems)
            )
        self.target = target
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.quantized = [q for value in self.state_dict.values() if (q := quantized_local(value)) is not None]
        self.state_dict, _ = expand_flat(self.state_dict)
        entry = metadata.state_dict_metadata.get(MANIFEST)
        self.awaits_manifest = self.manifest is None and bool(self.quantized) and isinstance(entry, TensorStorageMetadata)
        if self.awaits_manifest:
            buffer = torch.empty(entry.size, dtype=torch.uint8)  # type: ignore[union-attr]
            self.state_dict = {MANIFEST: buffer, **self.state_dict}

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Put the probes in front; forget preserved initial values, which the load makes stale."""
        plan = super().finish_plan(new_plan)
        for q in self.quantized:
            q.init_value = None
        assert self.metadata is not None
        return dataclasses.replace(plan, items=[*_probes(self.metadata, plan), *plan.items])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Check a probe, or load a bytes entry as stock does."""
        if read_item.storage_index.fqn != PROBE:
            return super().load_bytes(read_item, value)
        if len(value.read(1)) != 1:
            assert self.metadata is not None
            info = self.metadata.storage_data[read_item.storage_index]
            raise EOFError(
                f"{info.relative_path} of the checkpoint is truncated: it should hold at least {info.offset + 1} bytes. Nothing has been loaded; "
                "use another checkpoint"
            )
        return None

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Stock, except that the manifest is compared as soon as it is there (it is read first)."""
        super().commit_tensor(read_item, tensor)
        if self.awaits_manifest and read_item.dest_index.fqn == MANIFEST:
            problems = recipe_differences(self.target, Manifest.from_tensor(self.state_dict[MANIFEST]))
            if problems:
                raise ValueError("the checkpoint does not fit the target:\n" + "\n".join(f"  {problem}" for problem in problems))


class _ProbePath(str):
    """A path that is its own key in a dict: readers group items by file, and a probe must not wait behind another file's data."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _probes(metadata: Metadata, plan: LoadPlan) -> list[ReadItem]:
    """One-byte reads at the end of every file, for readers that keep (relative_path, offset, length) for each chunk; else none.

    DCP offers planners no hook on the reader, but a read item it would accept from anyone is enough.
    """
    stored = metadata.storage_data
    if not isinstance(stored, dict) or not all(hasattr(info, "relative_path") and hasattr(info, "length") for info in stored.values()):
        return []
    everything = len(stored) <= PROBE_ALL_BELOW
    ends: dict[str, Any] = {}
    for index in list(stored) if everything else {item.storage_index for item in plan.items}:
        info = stored[index]
        last = ends.get(info.relative_path)
        if info.length and (last is None or info.offset + info.length > last.offset + last.length):
            ends[info.relative_path] = info
    probes = []
    for number, (path, info) in enumerate(sorted(ends.items())):
        index = MetadataIndex(PROBE, index=number, offset=torch.Size([number]))
        changes: dict[str, Any] = {"relative_path": _ProbePath(path), "offset": info.offset + info.length - 1, "length": 1}
        if hasattr(info, "transform_descriptors"):
            changes["transform_descriptors"] = None
        stored[index] = dataclasses.replace(info, **changes)
        zero, one = torch.Size([0]), torch.Size([1])
        probes.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(PROBE), zero, index, zero, one))
    return probes
