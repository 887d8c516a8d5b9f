"""QuantizedLoadPlanner: payloads and scales from a DCP checkpoint straight into the live shards.

On any world size, mesh or shard dim, in the steps of every load planner:

    set_up_planner       every rank   compare target and checkpoint; all differences in one error, before anything is
                                      touched; then expand: the parts alias the live shards, so that stock resharding
                                      writes the weights in place
    create_local_plan    every rank   stock read items
    finish_plan          every rank   in front of them, one byte from the end of every file: a missing or truncated file
                                      stops the load before the first byte is written
    load / commit        every rank   stock

Where the storage drops planner data the manifest is read first, as a tensor, and compared when it arrives.
"""

import dataclasses
import io
from collections.abc import Mapping
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
from qtensor.tensor import QuantizedTensor

__all__ = ["QuantizedLoadPlanner"]

PROBE = "qtensor.probe"
# With at most this many stored chunks each rank probes every file, so that all ranks stop before writing; beyond, only
# the files it reads (opening every file from every one of thousands of ranks would cost more than it protects).
PROBE_ALL_BELOW = 100_000


class QuantizedLoadPlanner(DefaultLoadPlanner):
    """Loads checkpoints written with QuantizedSavePlanner, bit for bit, into quantized targets of the same recipes.

    Use it with `dcp.load` on state dicts of plain or sharded models, nested or flat; the tensors in them are written in
    place.

    Args:
        on_mismatch: "raise", a target whose recipe is not the checkpoint's is an error.
        **kwargs: those of DefaultLoadPlanner. allow_partial_load=True permits tensors that only the target or only the
            checkpoint has.

    Raises:
        ValueError: an unknown on_mismatch. While loading, on all ranks and before anything is written: one error that
            lists every missing, extra, misshapen or differently quantized tensor. A tensor of the checkpoint is extra
            if the target has its container (the dict that held it) but not the tensor; so loading only {"model": ...}
            of a checkpoint with an optimizer in it is fine.
        EOFError, FileNotFoundError: a file of the checkpoint is truncated or missing.
    """

    def __init__(self, *, on_mismatch: str = "raise", **kwargs: Any) -> None:
        if on_mismatch != "raise":
            raise ValueError(f'QuantizedLoadPlanner: on_mismatch={on_mismatch!r} is not one of "raise"')
        super().__init__(**kwargs)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        """Compare, then flatten and expand."""
        assert metadata is not None
        flat, paths = state_dict, dict[str, Any]({name: (name,) for name in state_dict})
        if self.flatten_state_dict:
            flat, paths = flatten_state_dict(state_dict)
        self.manifest = manifest_of(metadata)
        target = Target.of(flat, paths)
        problems = differences(target, metadata, self.manifest, partial=self.allow_partial_load)
        if problems:
            raise ValueError(
                "the checkpoint does not fit the target; nothing has been loaded:\n"
                + "\n".join(f"  {problem}" for problem in problems)
            )
        self.target = target
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.quantized = {
            name: q
            for name, value in self.state_dict.items()
            if (q := quantized_local(value)) is not None and f"{name}.payload" in metadata.state_dict_metadata
        }
        self.vectors = _vectors(self.quantized)
        self.state_dict = expand_flat(self.state_dict)
        entry = metadata.state_dict_metadata.get(MANIFEST)
        self.awaits_manifest = (
            self.manifest is None and bool(self.quantized) and isinstance(entry, TensorStorageMetadata)
        )
        if self.awaits_manifest:
            buffer = torch.empty(entry.size, dtype=torch.uint8)  # type: ignore[union-attr]
            self.state_dict = {MANIFEST: buffer, **self.state_dict}

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Put the probes in front."""
        plan = super().finish_plan(new_plan)
        assert self.metadata is not None
        probes = _probes(self.metadata, plan)
        self.checks = len(probes) + self.awaits_manifest  # what must pass before anything is written
        self._passed(0)
        return dataclasses.replace(plan, items=[*probes, *plan.items])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Check a probe, or load a bytes entry as stock does."""
        if read_item.storage_index.fqn != PROBE:
            return super().load_bytes(read_item, value)
        if len(value.read(1)) != 1:
            assert self.metadata is not None
            info = self.metadata.storage_data[read_item.storage_index]
            raise EOFError(
                f"{info.relative_path} of the checkpoint is truncated: it should hold at least {info.offset + 1} "
                "bytes. Nothing has been loaded; use another checkpoint"
            )
        return self._passed(1)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Compare the manifest as soon as it is there (it is read first); spread a tensor-wide scale over a vector."""
        super().commit_tensor(read_item, tensor)
        name = read_item.dest_index.fqn
        if self.awaits_manifest and name == MANIFEST:
            problems = recipe_differences(self.target, Manifest.from_tensor(self.state_dict[MANIFEST]))
            if problems:
                raise ValueError(
                    "the checkpoint does not fit the target:\n" + "\n".join(f"  {problem}" for problem in problems)
                )
            self._passed(1)
        elif name in self.vectors:
            self.vectors[name].copy_(tensor.clone())

    def _passed(self, checks: int) -> None:
        """Behind the last check preserved initial values are forgotten: the load makes them stale."""
        self.checks -= checks
        if not self.checks:
            for q in self.quantized.values():
                q.init_value = None


def _vectors(quantized: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
    """Part name -> the vector of a gathered weight's tensor-wide values, which the checkpoint's one value replaces."""
    vectors = {}
    for name, q in quantized.items():
        wide = q.tensor_wide()
        if wide and q.arrangement.partial:
            raise ValueError(
                f"{name}: the target is some rows of a larger tensor and shares its {wide} with the others; load all "
                "of it at once"
            )
        if wide and q.arrangement.shards is not None:
            vectors[f"{name}.{wide}"] = q.parts()[wide]
    return vectors


class _ProbePath(str):
    """A path that is its own key in a dict.

    Readers group items by file, and a probe must not wait behind another file's data.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _probes(metadata: Metadata, plan: LoadPlan) -> list[ReadItem]:
    """One-byte reads at the end of every file.

    None for readers that do not keep (relative_path, offset, length) for each chunk.

    DCP offers planners no hook on the reader, but a read item it would accept from anyone is enough.
    """
    stored = metadata.storage_data
    if not isinstance(stored, dict) or not all(
        hasattr(info, "relative_path") and hasattr(info, "length") for info in stored.values()
    ):
        return []
    everything = len(stored) <= PROBE_ALL_BELOW
    ends: dict[str, Any] = {}
    indices = stored if everything else {item.storage_index for item in plan.items}
    for index in indices:
        if index.fqn == PROBE:
            continue  # metadata that a reader kept has the probes of an earlier load
        info = stored[index]
        last = ends.get(info.relative_path)
        if info.length and (last is None or info.offset + info.length > last.offset + last.length):
            ends[info.relative_path] = info
    probes = []
    for number, (path, info) in enumerate(sorted(ends.items())):
        index = MetadataIndex(PROBE, index=number, offset=torch.Size([number]))
        changes: dict[str, Any] = {
            "relative_path": _ProbePath(path),
            "offset": info.offset + info.length - 1,
            "length": 1,
        }
        if hasattr(info, "transform_descriptors"):
            changes["transform_descriptors"] = None
        stored[index] = dataclasses.replace(info, **changes)
        zero, one = torch.Size([0]), torch.Size([1])
        probes.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(PROBE), zero, index, zero, one))
    return probes
