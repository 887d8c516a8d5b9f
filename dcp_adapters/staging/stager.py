"""QuantizedStager: the blocking part of an asynchronous save, one copy of the payload bytes.

    survey   walk the state dict: which parts there are, and at which offset each will stand; everything that can be
             refused is refused here, before a byte is copied
    copy     one slab of host memory for the snapshot (see snapshot_memory.py), one tensor over it for each part, one
             copy for each tensor; device copies run on their own until all of them are waited for at once
    rebuild  the same containers with CPU tensors of the same kind as leaves: quantized tensors around CPU parts,
             DTensors with the mesh and the placements they had

Nothing is remembered from one save to the next but memory, so there is no layout to go stale: walking costs a few
microseconds a part. What costs is touching memory for the first time, which the first `max_snapshots` saves do.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from dcp_adapters.plain_memory import is_plain, without_bytes
from dcp_adapters.staging.host_memory import SnapshotMemory
from fsdp_hooks.all_gather import Sharding, sharding_of
from fsdp_hooks.torch_private import dtensor_like, local_of, without_torch_function
from qtensor.contents import lens_of, like
from qtensor.formats import describe
from qtensor.high_precision import HighPrecisionWeight
from qtensor.tensor import QuantizedTensor

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element size


class QuantizedStager(AsyncStager):
    """Copies a state dict to host memory for `dcp.async_save`, exactly and at the price of one copy of its bytes.

        stager = QuantizedStager()                                    # once; keep it for all saves
        future = dcp.async_save(state_dict, checkpoint_id=path, planner=QuantizedSavePlanner(), async_stager=stager,
                                process_group=upload_group)           # any number of times

    Every save gets memory that no unfinished one uses; when an upload has ended and nothing refers to its snapshot any
    more, the memory serves the next save: up to max_snapshots times the bytes of the state dict. Uploads that overlap
    need a process group each, since all of them exchange plans. Threads that share a stager take turns.

    The snapshot holds quantized tensors as their parts, never dequantized; preserved initial values stay behind,
    weights with storage="high_precision" become the dense tensors they are, tensors of other libraries' classes are
    made anew around copies of their tensors (by `__tensor_flatten__`), parameters become tensors without
    gradients, and names that share one tensor share one copy.

    Args:
        max_snapshots: how many snapshots may exist at a time; with all in use, `stage` waits for an upload to end. 2
            lets one save overlap the upload of the one before.
        pin_memory: page-lock the host memory, so that CUDA copies into it at full speed. None: where there are CUDA
            tensors to copy.
        wait_timeout: seconds to wait for an upload to end.

    Raises:
        ValueError: max_snapshots < 1, wait_timeout < 0, or pin_memory=True without CUDA.
    """

    def __init__(self, *, max_snapshots: int = 2, pin_memory: bool | None = None, wait_timeout: float = 1800.0) -> None:
        if max_snapshots < 1:
            raise ValueError(f"QuantizedStager: max_snapshots={max_snapshots}, expected at least 1")
        if wait_timeout < 0:
            raise ValueError(f"QuantizedStager: wait_timeout={wait_timeout}, expected seconds, at least 0")
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("QuantizedStager: pin_memory=True needs CUDA, and there is none; leave it at None")
        self.pin_memory = pin_memory
        self._memory = SnapshotMemory(max_snapshots, wait_timeout)
        self._turn = threading.Lock()

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `state_dict` in host memory: the same containers, names, shapes, dtypes, recipes and placements.

        Raises:
            TypeError: a leaf is a kind of tensor that is not known, or can not be copied.
            ValueError: a leaf has no data (meta device, storage freed), or is a transposed or reshaped view of a
                quantized weight.
            TimeoutError: max_snapshots snapshots are still in use after wait_timeout seconds.
            RuntimeError: the stager is closed.
        """
        if self._memory.closed:
            raise RuntimeError("QuantizedStager.stage: the stager is closed; make a new one")
        with self._turn, torch.no_grad():
            survey = Survey()
            tree = survey.walk("", state_dict)
            copies = self._copied(survey)
            return _rebuilt(tree, copies)  # type: ignore[no-any-return]

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when all is copied."""

    def close(self) -> None:
        """Give the memory back; that of unfinished uploads when they end. The stager can not be used afterwards."""
        self._memory.close()

    def _copied(self, survey: "Survey") -> list[Tensor]:
        """A CPU tensor for each part, contiguous, with a storage of exactly its bytes."""
        devices = {part.device for part in survey.parts if part.is_cuda}
        pinned = bool(devices) if self.pin_memory is None else self.pin_memory
        lease = self._memory.lease(survey.nbytes, pinned=pinned) if survey.nbytes else None
        try:
            with without_torch_function():
                return [
                    _copied_into(lease, offset, part) for part, offset in zip(survey.parts, survey.offsets, strict=True)
                ]
        finally:  # after a failure too: a device may still be writing into memory that goes back to the pool
            for device in devices:
                torch.cuda.current_stream(device).synchronize()


def _copied_into(lease: memoryview | None, offset: int, part: Tensor) -> Tensor:
    """A copy of `part` that stands at `offset` of the lease; one from a device may still be on its way."""
    count = part.numel()
    if lease is None or not count:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu")
    copied = torch.frombuffer(lease, dtype=part.dtype, count=count, offset=offset).view(part.shape)
    return copied.copy_(part, non_blocking=part.is_cuda)


@dataclass(slots=True)
class Leaf:
    """A tensor of the state dict, the tensor behind it that holds the bytes, and the indices of its parts.

    made: where it is of another library's class, its own tensors; it has no parts then.
    """

    value: Tensor
    local: Tensor
    parts: list[int]
    made: "Made | None" = None


@dataclass(slots=True)
class Made:
    """A tensor of another library's class, by the protocol through which torch.compile takes such apart.

    inner: its tensors by the name of the attribute, as leaves or of such a class in turn. context: what else it is.
    """

    value: Tensor
    inner: dict[str, Any]
    context: Any

    def staged(self, copies: list[Tensor]) -> Tensor:
        """The tensor again, around copies."""
        inner = {name: _staged(leaf, copies) for name, leaf in self.inner.items()}
        kind: Any = type(self.value)
        made: Tensor = kind.__tensor_unflatten__(inner, self.context, self.value.size(), self.value.stride())
        return made


@dataclass
class Survey:
    """The parts of one snapshot in the order they are met, each once, and where they will stand.

    nbytes: of all of them, with the gaps that align them.
    """

    parts: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0
    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def walk(self, name: str, value: Any) -> Any:
        """The containers of a state dict with a Leaf for each tensor, and copies of all other leaves."""
        if isinstance(value, Tensor):
            return self._leaf(name, value)
        prefix = f"{name}." if name else ""
        if isinstance(value, Mapping):
            items = ((key, self.walk(f"{prefix}{key}", item)) for key, item in value.items())
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        if isinstance(value, list) or _is_tuple(value):
            walked = [self.walk(f"{prefix}{i}", item) for i, item in enumerate(value)]
            return walked if isinstance(value, list) else _tuple_like(value, walked)
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise TypeError(
                f"{name}: a {type(value).__name__} can not be copied ({type(error).__name__}: {error}); leave it out "
                "of the state dict, or give it a __deepcopy__"
            ) from error

    def _made(self, name: str, local: Tensor) -> Made | None:
        """How a tensor of another library's class is made of its tensors; None for any that does not say."""
        if is_plain(local) or not hasattr(local, "__tensor_flatten__") or without_bytes(local) is not None:
            return None
        names, context = local.__tensor_flatten__()
        return Made(local, {inner: self._leaf(f"{name}.{inner}", getattr(local, inner)) for inner in names}, context)

    def _leaf(self, name: str, value: Tensor) -> Leaf:
        local = local_of(value)
        if isinstance(local, HighPrecisionWeight):
            local = local.dense
        if not isinstance(local, QuantizedTensor):
            made = self._made(name, local)
            return Leaf(value, local, [self._add(name, "", local)] if made is None else [], made)
        lens = lens_of(local)
        if lens.described is not None:
            raise ValueError(
                f"{name}: a {'transposed' if lens.transposed else 'reshaped'} view, "
                f"{tuple(local.shape)}, of {describe(lens.described, local.recipe)}, which would be saved as "
                "the weight itself; put the weight into the state dict"
            )
        return Leaf(value, local, [self._add(name, part, tensor) for part, tensor in local.parts().items()])

    def _add(self, name: str, suffix: str, part: Tensor) -> int:
        """The index of a part, which is that of an earlier one where the two are the same bytes seen alike."""
        # an empty shard is refused like those of the other ranks, which would wait for this one otherwise
        _check_copyable(f"{name}.{suffix}" if suffix else name, part)
        index = len(self.parts)
        if part.numel():
            key = (part.data_ptr(), part.shape, part.stride(), part.dtype, part.device, part.is_conj(), part.is_neg())
            known = self.seen.setdefault(key, index)
            if known != index:
                return known
        self.parts.append(part)
        self.offsets.append(self.nbytes)
        self.nbytes += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return index


def _check_copyable(name: str, part: Tensor) -> None:
    """Raise where a tensor is not plain, or has no bytes."""
    reason = without_bytes(part)
    if reason is None and is_plain(part):
        return
    if part.layout is torch.strided and reason is not None:
        raise ValueError(f"{name}: {reason}")
    # tensors with a dispatch of their own, of quantized or of sparse elements, keep bytes elsewhere
    what = type(part).__name__ if part.layout is torch.strided else f"{part.layout} tensor"
    raise TypeError(
        f"{name}: a {what} can not be staged as bytes; expected a plain, quantized or DTensor leaf. Leave it out "
        "of the state dict, or save without QuantizedStager"
    )


def _is_tuple(value: Any) -> bool:
    """Whether value is a tuple that can be built again from its items (a torch.Size, say, can not hold tensors)."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _tuple_like(value: Any, items: list[Any]) -> Any:
    return tuple(items) if type(value) is tuple else type(value)(*items)


def _rebuilt(tree: Any, copies: list[Tensor]) -> Any:
    """What `Survey.walk` returned, with the staged tensor in place of each Leaf."""
    if isinstance(tree, Leaf):
        return _staged(tree, copies)
    if isinstance(tree, dict):
        for key, item in tree.items():
            tree[key] = _rebuilt(item, copies)
        return tree
    if isinstance(tree, list):
        return [_rebuilt(item, copies) for item in tree]
    if _is_tuple(tree):
        return _tuple_like(tree, [_rebuilt(item, copies) for item in tree])
    return tree


def _staged(leaf: Leaf, copies: list[Tensor]) -> Tensor:
    """The tensor that a leaf becomes: of its kind, around copies."""
    local = leaf.local
    if isinstance(local, QuantizedTensor):
        parts = {name: copies[index] for name, index in zip(local.parts(), leaf.parts, strict=True)}
        # a snapshot has no padding rows and is no part of a larger tensor
        staged: Tensor = like(local, parts, sharding=Sharding(shards=sharding_of(local).shards))
    elif leaf.made is not None:
        staged = leaf.made.staged(copies)
    else:
        staged = copies[leaf.parts[0]]
    return dtensor_like(staged, leaf.value) if isinstance(leaf.value, DTensor) else staged
