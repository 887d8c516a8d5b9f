"""See the shards that a rank has of a state dict as plain boxes of plain global tensors.

Of ranks that hold a copy of the same, one counts it: the first along each mesh dim on which a part is replicated, on
the mesh that has rank 0, and rank 0 for what is no DTensor. So each unit of the state is counted once, by exactly one
rank. All copies are summed, and copies that differ are refused.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.delta.patches.layout import StateLayout, layout_differences
from dcp_adapters.hf.models.adapters import renamed
from dcp_adapters.plain.plain_memory import is_plain, why_no_bytes
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.expand import entry_of, expand_leaf, plain_leaf, refuse_hidden
from dcp_adapters.records.placements import placement_problem
from dcp_adapters.torch_private import flatten_state_dict
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums
from fsdp_hooks.ranks.across_ranks import ALONE, Alone, chosen_ranks, device_of, is_counted, is_first, on_all
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of
from fsdp_hooks.wrappers import plain_name


@dataclass(frozen=True)
class Shard:
    """This rank's box of one part; it aliases the live bytes.

    counts: no other rank counts it.
    """

    key: str
    piece: TensorPiece
    counts: bool


@dataclass(frozen=True)
class Shards:
    """All shards of a rank, in the same order on all ranks; `layout` is the same on all ranks, too."""

    layout: StateLayout
    held: Mapping[str, Shard]

    @staticmethod
    def of(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None) -> "Shards":
        """Find the shards of a state dict of tensors, nested or flat.

        Raises:
            ValueError: a leaf is no tensor, has no bytes, or is placed so that a rank's local tensor is no box.
        """
        flat, _ = flatten_state_dict(dict(state_dict))
        flat = renamed(flat, ((name, plain_name(name)) for name in flat), "wrappers") if flat else flat
        held: dict[str, Shard] = {}
        entries = []
        for name, value in flat.items():
            refuse_hidden(name, value)
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} is a {type(value).__name__}; a delta of live weights holds tensors only")
            problem = placement_problem(value)
            if problem is not None:
                raise ValueError(f"{name}: {problem}")
            entries.append(entry_of(name, value))
            parts = expand_leaf(name, value) or {"": plain_leaf(value)}
            for part, tensor in parts.items():
                key = entries[-1].key(part)
                held[key] = _shard(key, tensor.detach(), group)
        layout = StateLayout.of(entries)
        return Shards(layout, {key: held[key] for run in layout.runs for key in run.keys})

    @property
    def data(self) -> dict[str, Tensor]:
        """Return the live bytes of each key."""
        return {key: shard.piece.data for key, shard in self.held.items()}

    def sums(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Sum the bytes of each part, int64 [3, keys]: what this rank counts of it; all that it has; its elements.

        tensors: the local bytes of each key; keys that are missing add nothing.
        """
        sums = torch.zeros(3, len(self.held), dtype=torch.int64, device="cpu")
        by_device: dict[torch.device, list[tuple[int, TensorPiece]]] = {}
        for number, (key, shard) in enumerate(self.held.items()):
            data = tensors.get(key)
            if data is not None and data.numel():
                by_device.setdefault(data.device, []).append((number, shard.piece._replace(data=data)))
                sums[2, number] = data.numel()
        # One copy to the host for each device, and not for each tensor: the host waits for every copy.
        for pieces in by_device.values():
            sums[1, [number for number, _ in pieces]] = byte_sums([piece for _, piece in pieces]).to("cpu")
        counts = torch.tensor([shard.counts for shard in self.held.values()], dtype=torch.bool, device="cpu")
        sums[0] = sums[1] * counts
        return sums

    def refuse_other_replicas(self, sums: Tensor) -> None:
        """Raise ValueError if copies of a part differ, or are not whole. sums: of all ranks, int64 [3, keys]."""
        # Byte sums add up over shards: n equal copies have n times the sum of the one that counts.
        sizes = [math.prod(shard.piece.shape) for shard in self.held.values()]
        whole = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        copies = sums[2] // whole.clamp(min=1)
        partial = (copies * whole != sums[2]).nonzero().flatten().tolist()
        if partial:
            raise ValueError(
                f"{list(self.held)[partial[0]]}: the ranks hold {int(sums[2, partial[0]])} elements of it, which has "
                f"{sizes[partial[0]]}; pass the group of all ranks that hold the weights, and of none else"
            )
        wrong = (sums[0] * copies != sums[1]).nonzero().flatten().tolist()
        if wrong:
            key = list(self.held)[wrong[0]]
            raise ValueError(
                f"{key}: ranks hold {int(copies[wrong[0]])} copies of it that differ; give all replicas the same bytes "
                "(a broadcast, or fsdp_hooks.sync_scales for scales)"
            )

    def named(self, sums: Tensor) -> dict[str, int]:
        """Return key -> the sum of the whole part, from the sums of all ranks, int64 [keys]."""
        return dict(zip(self.held, sums.tolist(), strict=True))


def refuse_other_ranks(layout: StateLayout, deltas: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Compare what ranks are about to add up, and what leads there; a collective.

    Raises:
        ValueError: on all ranks, with one text: tensors or deltas of some differ from those of rank 0.
    """
    own = [f"{entry}" for _, entry in sorted(layout.entries.items())], list(deltas)
    # Digests first: layouts of thousands of tensors travel only if they differ.
    told = on_all(group or ALONE, lambda: tuple(hashlib.sha256(repr(each).encode()).hexdigest() for each in own))
    other = next((rank for rank, each in enumerate(told) if each != told[0]), None)
    if other is None:
        return
    if told[other][0] == told[0][0]:
        raise ValueError(f"ranks 0 and {other} have different deltas; give all ranks of the group the same")
    held = on_all(group or ALONE, lambda: layout)
    problems = layout_differences(held[0], held[other], ("rank 0", f"rank {other}"))
    raise ValueError(
        "the ranks do not hold the same tensors; give all ranks of the group the state dict of one model:"
        f"{in_lines(problems)}"
    )


def add_up(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum int64 CPU values over the ranks of a group; without one they stay as they are."""
    if group is None:
        return values
    there = values.to(device_of(group))
    dist.all_reduce(there, group=group)
    return there.to("cpu")


def whole_group(caller: str, group: dist.ProcessGroup | None, *, no_dist: bool) -> dist.ProcessGroup | None:
    """Return the group, or all ranks; None if there is no process group, or it is not to be used."""
    if isinstance(chosen_ranks(caller, group, no_dist=no_dist), Alone):
        return None
    return dist.group.WORLD if group is None and dist.is_available() and dist.is_initialized() else group


def _shard(key: str, tensor: Tensor, group: dist.ProcessGroup | None) -> Shard:
    local = local_of(tensor)
    shape = tuple(tensor.shape)
    offsets: Sequence[int] = (0,) * len(shape)
    counts = group is None or is_first(group)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        coordinate = mesh.get_coordinate()
        # A rank outside of the mesh has none of it, and its local tensor is empty.
        if coordinate is None:
            counts = False
        else:
            _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
            along = zip(coordinate, placements, strict=True)
            counts = is_counted(mesh, group) and all(
                place == 0 or not placement.is_replicate() for place, placement in along
            )
    problem = why_no_bytes(local)
    if problem is not None:
        raise ValueError(f"{key}: {problem}")
    if not is_plain(local):
        raise ValueError(f"{key} is a {type(local).__name__}, of which no bytes are known here; dequantize it first")
    return Shard(key, TensorPiece(local, shape, tuple(offsets)), counts and local.numel() > 0)
