"""QuantizedStager: the blocking part of an asynchronous save, one copy of the payload bytes.

    survey   walk the state dict: which parts there are, at which offset each will be, and how everything is rebuilt
             from copies; whatever can be refused is refused here, before a byte is copied
    copy     one slab of host memory for the snapshot (see host_memory.py), one tensor over it for each part, one copy
             for each tensor; device copies run on their own until all of them are waited for at once
    rebuild  the same containers with CPU tensors of the same kind as leaves: quantized tensors around CPU parts,
             DTensors with the mesh and the placements they had

Only memory is kept from one save to the next, so no layout can go stale; walking costs a few microseconds a part. The
real cost is touching memory for the first time, which the first `max_snapshots` saves do.
"""

import copy
import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.described import place_of, with_place
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.placed_shard import PlacedShard
from dcp_adapters.plain.plain_memory import is_plain, why_no_bytes
from dcp_adapters.save.staging.host_memory import PageLockError, SnapshotMemory
from fsdp_hooks.all_gather import Sharding
from fsdp_hooks.torch_private import dtensor_like, local_of, without_torch_function
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import describe
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)
ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element size


class QuantizedStager(AsyncStager):
    """Copies a state dict to host memory for `dcp.async_save`, exactly and at the price of one copy of its bytes.

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
        pin_memory: page-lock the host memory, so that CUDA copies into it at full speed. None: if there are CUDA
            tensors to copy, and the system allows it; if it does not, one warning.
        wait_timeout: seconds to wait for an upload to end.

    Raises:
        ValueError: max_snapshots < 1, wait_timeout < 0, or pin_memory=True without CUDA.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> group = torch.distributed.new_group(backend="gloo")  # for the thread that uploads
        >>> stager = QuantizedStager()  # once; keep it for all saves
        >>> future = dcp.async_save(state, checkpoint_id="step-1000", planner=QuantizedSavePlanner(),
        ...                         async_stager=stager, process_group=group)  # any number of times
        >>> future.result()  # raises what went wrong
        ```
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
        """Return a copy in host memory: the same containers, names, shapes, dtypes, recipes and placements.

        Raises:
            TypeError: a leaf is a kind of tensor that is not known, or cannot be copied.
            ValueError: a leaf has no data (meta device, storage freed), or is a transposed or reshaped view of a
                quantized weight.
            TimeoutError: max_snapshots snapshots are still in use after wait_timeout seconds.
            RuntimeError: the stager is closed.
        """
        if self._memory.closed:
            raise RuntimeError("QuantizedStager.stage: the stager is closed; make a new one")
        # `SnapshotMemory.lease` is not for several threads at once
        with self._turn, torch.no_grad():
            survey = Survey()
            rebuild = survey.walk("", state_dict)
            with log_work(LOG, "QuantizedStager: copying %d tensors", len(survey.parts), nbytes=survey.nbytes):
                return rebuild(self._copied(survey))  # type: ignore[no-any-return]

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns when all is copied."""

    def close(self) -> None:
        """Give the memory back; that of unfinished uploads when they end. The stager cannot be used afterwards."""
        self._memory.close()

    def _copied(self, survey: "Survey") -> list[Tensor]:
        """Return a CPU tensor for each part, contiguous, with a storage of exactly its bytes."""
        devices = {part.device for part in survey.parts if part.is_cuda}
        pinned = bool(devices) if self.pin_memory is None else self.pin_memory
        lease = self._lease(survey.nbytes, pinned=pinned) if survey.nbytes else None
        try:
            with without_torch_function():
                return [_copy_into(lease, *place) for place in zip(survey.offsets, survey.parts, strict=True)]
        # after a failure, too: a device may still be writing into memory that goes back to the pool
        finally:
            for device in devices:
                torch.cuda.current_stream(device).synchronize()

    def _lease(self, nbytes: int, *, pinned: bool) -> memoryview:
        """Return host memory, page-locked if that was asked for, or if it is worth while and can be had."""
        try:
            return self._memory.lease(nbytes, pinned=pinned)
        except PageLockError as error:
            if self.pin_memory:
                raise
            self.pin_memory = False
            warnings.warn(f"QuantizedStager: {error}. Snapshots go to pageable memory from here on", stacklevel=5)
            return self._memory.lease(nbytes, pinned=False)


def _copy_into(lease: memoryview | None, offset: int, part: Tensor) -> Tensor:
    """Copy `part` to `offset` of the lease; a copy from a device may still be on its way."""
    count = part.numel()
    # torch.frombuffer refuses to make an empty tensor
    if lease is None or not count:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu")
    copied = torch.frombuffer(lease, dtype=part.dtype, count=count, offset=offset).view(part.shape)
    return copied.copy_(part, non_blocking=part.is_cuda)


Rebuild = Callable[[Sequence[Tensor]], Any]  # the copies of all parts -> the value, rebuilt


@dataclass
class Survey:
    """The parts of one snapshot in the order they are met, each once, and where they will be.

    nbytes: bytes of all parts, with the gaps that align them.
    """

    parts: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0
    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def walk(self, name: str, value: Any) -> Rebuild:
        """Return how to rebuild a value: its containers, tensors around copies, and copies of all other leaves."""
        if isinstance(value, Tensor):
            return self._walk_leaf(name, value)
        if isinstance(value, PlacedShard):
            rebuild_local = self._walk_local(name, value.local)
            return lambda copies: PlacedShard(rebuild_local(copies), value.global_shape, value.offsets)
        prefix, kind = f"{name}." if name else "", type(value)
        if isinstance(value, Mapping):
            entries = {key: self.walk(f"{prefix}{key}", item) for key, item in value.items()}
            mapping = OrderedDict if isinstance(value, OrderedDict) else dict
            return lambda copies: mapping((key, rebuild(copies)) for key, rebuild in entries.items())
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        # no torch.Size, say, which cannot hold tensors
        if isinstance(value, list) or kind is tuple or named:
            items = [self.walk(f"{prefix}{i}", item) for i, item in enumerate(value)]
            if named:
                return lambda copies: kind(*(rebuild(copies) for rebuild in items))
            sequence = tuple if kind is tuple else list
            return lambda copies: sequence(rebuild(copies) for rebuild in items)
        # a counter or a scheduler's state must not change under the thread that writes it
        try:
            copied = copy.deepcopy(value)
        except Exception as error:
            raise TypeError(
                f"{name}: a {type(value).__name__} can not be copied ({type(error).__name__}: {error}); leave it out "
                "of the state dict, or give it a __deepcopy__"
            ) from error
        return lambda copies: copied

    def _walk_leaf(self, name: str, value: Tensor) -> Rebuild:
        if (place := place_of(name, value)) is not None:
            rebuild = self._walk_local(name, local_of(value))
            return lambda copies: with_place(rebuild(copies), place)
        if isinstance(value, DTensor):
            rebuild = self._walk_local(name, value.to_local())
            return lambda copies: dtensor_like(rebuild(copies), value)
        return self._walk_local(name, value)

    def _walk_local(self, name: str, local: Tensor) -> Rebuild:
        """Return how to rebuild a tensor that is no DTensor, as the same kind of tensor."""
        if isinstance(local, HighPrecisionWeight):
            return self._walk_local(name, local.dense)
        if isinstance(local, QuantizedTensor):
            return self._walk_quantized(name, local)
        if is_plain(local) or not hasattr(local, "__tensor_flatten__") or why_no_bytes(local) is not None:
            index = self._add(name, "", local)
            return lambda copies: copies[index]
        # of another library's class: taken apart by the protocol that torch.compile uses for such
        names, context = local.__tensor_flatten__()
        inner = {one: self._walk_leaf(f"{name}.{one}", getattr(local, one)) for one in names}
        unflatten = type(local).__tensor_unflatten__  # type: ignore[attr-defined]
        size, stride = local.size(), local.stride()
        return lambda copies: unflatten({one: rebuild(copies) for one, rebuild in inner.items()}, context, size, stride)

    def _walk_quantized(self, name: str, q: QuantizedTensor) -> Rebuild:
        lens = q._lens
        if lens.described is not None:
            raise ValueError(
                f"{name}: a {'transposed' if lens.transposed else 'reshaped'} view, {tuple(q.shape)}, of "
                f"{describe(lens.described, q.recipe)}, which would be saved as the weight itself; put the weight "
                "into the state dict"
            )
        indices = {part: self._add(name, part, tensor) for part, tensor in q.parts().items()}
        # a snapshot has no padding, and is no part of another
        sharding = Sharding(shards=q._sharding.shards)
        return lambda copies: q._like({part: copies[index] for part, index in indices.items()}, sharding=sharding)

    def _add(self, name: str, suffix: str, part: Tensor) -> int:
        """Return the index of a part, shared with an earlier part that views the same bytes in the same way."""
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
    """Raise if a tensor is not plain, or has no bytes."""
    reason = why_no_bytes(part)
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
