"""The tensors of a running job as the source of an export: plain ones, shards, weights that are dense at rest.

Names and formats are those of the state dict. Reading shards is a collective: those that are cut over the same ranks
travel together (fsdp_hooks/ranks/gathering.py), those that are cut in several ways one by one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.hf.models.adapters import own_tensors
from dcp_adapters.hf.models.prefixes import under, weights_prefix
from dcp_adapters.plain.described import described_problem
from dcp_adapters.plain.plain_memory import is_plain
from dcp_adapters.records.expand import entry_of, expand_leaf, gathered_leaf, plain_leaf, quantized_local, refuse_hidden
from dcp_adapters.records.placements import placement_kind, unevenness
from dcp_adapters.records.source import Keep, Source, TensorGroup
from dcp_adapters.torch_private import flatten_state_dict
from fsdp_hooks.lazy_bits import resolve
from fsdp_hooks.ranks.across_ranks import Ranks, check_spanned
from fsdp_hooks.ranks.gathering import Gathering, cut_of
from fsdp_hooks.scale_sync import cuts_of
from fsdp_hooks.torch_private import dtensor_around, local_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import shares_scale_along, tensor_wide


class LiveSource(Source):
    """The tensors of a state dict: plain ones, and the shards of this rank.

    Args:
        state_dict: nested or flat.
        prefix: take only names that begin with it, and cut it off; None: find the subtree that holds the weights.
        like: names of the model's weights; they identify the subtree if nothing is quantized.
        adapters: what becomes of adapters that names show ("raise", "base"); None: they have been looked at already.

    Attributes:
        prefix: that was cut off.

    Weights with storage="high_precision" are the quantized ones that forwards gather, made when they are read.

    Raises:
        ValueError: nothing has the prefix; the weights are in several subtrees; an entry is no tensor.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        prefix: str | None = None,
        like: Collection[str] | None = None,
        *,
        adapters: str | None = None,
    ) -> None:
        flat, self.prefix = flat_state(state_dict, prefix, like, as_gathered=True)
        named = under(self.prefix, flat, "the state dict")
        named = named if adapters is None else own_tensors(named, adapters)
        self._values = live_tensors(named, what="an export", as_gathered=True)
        self.entries = {name: entry_of(name, value) for name, value in self._values.items()}
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name, value in self._values.items():
            local = local_of(value)
            # Its shard is dense at rest. Parts are made from it when they are asked for, a group at a time.
            if isinstance(local, HighPrecisionWeight):
                self.entries[name] = replace(self.entries[name], recipe=local.recipe.stored)
            else:
                self._parts[name] = expand_leaf(name, value) or {"": value}

    def check_spanned(self, group: Ranks) -> None:
        """Raise ValueError if ranks outside of the group hold shards, which are gathered from there."""
        check_spanned(self._values.values(), group)

    def way(self, name: str) -> str:
        """Say whether it is sharded, and gathered together with others."""
        value = self._values[name]
        return ("" if not _is_sharded(value) else "one by one") if cut_of(value) is None else "together"

    def begin(self, names: Sequence[str], keep: Keep) -> TensorGroup:
        """Gather what is sharded: one collective for all tensors that are cut over the same ranks."""
        return _LiveGroup({name: self._shard(name) for name in dict.fromkeys(names)}, keep)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Gather what is sharded, part by part."""
        return {part: _whole_part(tensor).to("cpu").contiguous() for part, tensor in self._shard(name).items()}

    def scalar(self, name: str, part: str) -> float:
        """Return this rank's value; ranks whose shards do not agree have different ones."""
        local = local_of(self._values[name])
        if part and isinstance(local, HighPrecisionWeight):
            return float(local.shared_scale())
        return float(local_of(self._shard(name)[part]))

    def local(self, name: str) -> Tensor:
        """Return this rank's shard."""
        return local_of(self._shard(name)[""])

    def replicas(self, name: str) -> list[Tensor]:
        """Return the parts of what is not sharded."""
        if self.way(name):
            return []
        return [local_of(part).detach().contiguous() for part in self._shard(name).values()]

    def shared(self, name: str) -> tuple[str, Tensor] | None:
        """Return the scales of rows that are cut along K: each rank with a piece of a row has one, all alike."""
        value, recipe = self._values[name], self.entries[name].recipe
        last = value.ndim - 1
        if recipe is None or tensor_wide(recipe) is not None or not shares_scale_along(recipe, last, value.ndim):
            return None
        place = value.device_mesh.get_coordinate() if isinstance(value, DTensor) else None
        # Rows that are cut along N alone have their scales on one rank each.
        if place is None or all(dim != last for dim, _ in cuts_of([value])[0]):
            return None
        assert isinstance(value, DTensor)
        local = local_of(value)
        scale = local.shared_scale() if isinstance(local, HighPrecisionWeight) else self._parts[name]["scale"]
        rows = [
            # Ranks that differ only in the mesh dims which cut K have pieces of the same rows.
            None if getattr(placement, "dim", 0) % value.ndim == last else own
            for placement, own in zip(value.placements, place, strict=True)
        ]
        return f"{value.device_mesh.mesh.tolist()} {rows}", local_of(scale)

    def _shard(self, name: str) -> dict[str, Tensor]:
        """Return the parts of this rank's shard: aliases, or what a forward's gather makes of a dense shard."""
        return self._parts.get(name) or expand_leaf(name, gathered_leaf(self._values[name]))


class _LiveGroup(TensorGroup):
    """Shards that are gathered, together if they are cut alike, and tensors that every rank has."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], keep: Keep) -> None:
        self._tensors, self._keep = tensors, keep
        alike: dict[tuple[int, ...], dict[Any, Tensor]] = {}
        for name, parts in tensors.items():
            for part, tensor in parts.items():
                cut = cut_of(tensor)
                # A cut over a single rank needs no collective.
                if cut is not None and len(cut.ranks) > 1:
                    alike.setdefault(cut.ranks, {})[name, part] = tensor
        self._of: dict[Any, Gathering] = {}
        for those in alike.values():
            self._of |= dict.fromkeys(those, Gathering(those, keep.rank))

    def parts(self, name: str) -> dict[str, Tensor] | None:
        """Return a tensor's whole parts; those that are cut in several ways are gathered here, one by one."""
        found = {}
        for part, tensor in self._tensors[name].items():
            gathering = self._of.get((name, part))
            if gathering is not None:
                gathering.wait()
                if self._keep.is_here:
                    found[part] = self._place(gathering.whole((name, part)))
            # `full_tensor` is a collective, so ranks that drop the result call it, too.
            elif self._keep.is_here or _is_sharded(tensor):
                found[part] = self._place(_whole_part(tensor), own=self._keep.own)
        return found if self._keep.is_here else None

    def close(self) -> None:
        """Wait for all gathers, also after an error: the other ranks are in the same collectives."""
        for gathering in dict.fromkeys(self._of.values()):
            gathering.free()
        self._of, self._tensors = {}, {}

    def _place(self, tensor: Tensor, *, own: bool = False) -> Tensor:
        # Both return the tensor itself if there is nothing to do, and the source may be written meanwhile.
        placed = tensor.to(self._keep.device or tensor.device).contiguous()
        return (
            placed.clone()
            if own and placed.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            else placed
        )


def flat_state(
    state_dict: Mapping[str, Any],
    prefix: str | None,
    like: Collection[str] | None = None,
    *,
    as_gathered: bool = False,
) -> tuple[dict[str, Any], str]:
    """Return all leaves of a state dict, and the prefix of those that are the weights.

    Args:
        state_dict: as of LiveSource.
        prefix: as of LiveSource.
        like: as of LiveSource.
        as_gathered: as of `live_tensors`.

    Raises:
        ValueError: as of LiveSource.
    """
    flat, paths = flatten_state_dict(dict(state_dict))
    quantized = {name for name, value in flat.items() if quantized_local(value) is not None}
    if as_gathered:
        # Weights that are dense at rest are exported as quantized ones, so they tell where the weights are, too.
        quantized |= {name for name, value in flat.items() if plain_leaf(value) is not value}
    return flat, weights_prefix(paths, quantized, like) if prefix is None else prefix


def live_tensors(named: Mapping[str, Any], *, what: str, as_gathered: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a state dict, aliased.

    Args:
        named: its leaves, by the names that the plain model gives them.
        what: who asks, for errors: "an export".
        as_gathered: leave weights with storage="high_precision" as they are; else they become dense.

    Raises:
        ValueError: as of LiveSource.
    """
    values: dict[str, Tensor] = {}
    placed: dict[object, str | None] = {}  # kind of placement -> what is wrong with it
    for name, value in named.items():
        refuse_hidden(name, value)
        problem = described_problem(value)
        if problem is None and isinstance(value, DTensor):
            key = placement_kind(value)
            problem = placed[key] if key in placed else placed.setdefault(key, unevenness(value))
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; {what} holds tensors only: leave it out")
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no values; load the weights first")
        values[name] = (value if as_gathered else plain_leaf(value)).detach()
        if quantized_local(value) is None and not is_plain(local_of(plain_leaf(values[name]))):
            raise ValueError(
                f"{name} is a {type(local_of(value)).__name__}, of which {what} knows no bytes; expected dense "
                "tensors and those of this library: dequantize it first"
            )
    return values


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(place.is_replicate() for place in tensor.placements)


def _whole_part(tensor: Tensor) -> Tensor:
    """Return all of a part on the device where it is; a collective for shards."""
    if isinstance(tensor, DTensor):
        local = local_of(tensor)
        dtype = local.dtype
        # As bytes, which every backend can send; not all of them know float8.
        if dtype.itemsize == 1:
            raw = resolve(local).view(torch.uint8)
            tensor = dtensor_around(raw, tensor.device_mesh, tensor.placements, tensor.shape)
        tensor = tensor.full_tensor().view(dtype)
    return tensor.detach()
