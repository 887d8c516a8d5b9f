"""How a tensor made of named parts travels through FSDP2's all-gather, exactly.

FSDP2 asks the local shard of every parameter for the tensors to gather (`fsdp_pre_all_gather`), gathers them rank
after rank, and hands the buffers back (`fsdp_post_all_gather`), once to build the gathered weight and later to refill
it in place. `AllGatherHooks` answers for any tensor that consists of parts; it knows parts, not formats:

    row part          [rows, ...]   gathered part = the shards' parts, one after the other
    tensor-wide part  []            gathered part = the shards' values as a vector, entry i // rows-per-shard for row i

So one rank's scale is never applied to another rank's bytes, whether the shards agree or not, and this takes no host
sync. Everything is handed over as uint8 views: gloo refuses float8, NCCL refuses E8M0, and a view costs no copy.

Two holes of FSDP2 (torch 2.11 - 2.13) are closed here:
  * uneven shards: FSDP does not pad the inputs of an extension, it only checks them. With the 5-argument signature the
    check fails on the short ranks alone, and the others wait forever; with `*args` the check is skipped and we pad. We
    note the number of padded rows when FSDP allocates the padded shard (`new_zeros`), because CPU offload and pinning
    drop the padding from the storage.
  * shard world size 1: only the first input comes back. The other parts are copied from the shard into buffers of
    their own, because with an alias a write to the gathered weight would change the shard's scale but not its payload.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import below_autograd, local_of, without_torch_function


@dataclass(frozen=True)
class ShardRows:
    """Which entry of a vector of tensor-wide values belongs to row i: entry (i + offset) // rows."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class Sharding:
    """What FSDP2 made of a tensor; the default describes a tensor that it has not touched.

    shards: set on a gathered weight, whose tensor-wide parts are vectors with one value a shard.
    padded_rows: set on a shard whose storage was allocated with this many rows.
    allocated: whether this is the padded tensor that FSDP allocates, whose first rows become the shard.
    """

    shards: ShardRows | None = None
    padded_rows: int | None = None
    allocated: bool = False


AT_REST = Sharding()


@dataclass(frozen=True)
class PartNames:
    """The names of a tensor's parts.

    every: all of them.
    along: those that extend along dim 0.
    sent: those that the all-gather sends, in order; the others are copied from the shard.
    """

    every: tuple[str, ...]
    along: frozenset[str]
    sent: tuple[str, ...]


class SignedMethod:
    """A method (self, *args) whose bound form has its signature at hand: FSDP2 asks for it before every gather."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., Any]:
        """Return the method of `owner`; of the class, the function."""
        return self.method if owner is None else _Bound((self.method, owner))


class _Bound(tuple[Any, ...]):
    """A method and its owner: a tuple, since FSDP2 asks for it three times a gather, and nothing is made faster."""

    __slots__ = ()
    __signature__ = inspect.signature(lambda *args: None)

    def __call__(self, *args: Any) -> Any:
        method, owner = self
        return method(owner, *args)


class AllGatherHooks:
    """Mixin: `fsdp_pre_all_gather` / `fsdp_post_all_gather` for a tensor subclass with parts.

    The class it is mixed into provides the methods that raise here.
    """

    _sharding: Sharding
    shape: torch.Size

    def parts(self) -> dict[str, Tensor]:
        """Return the inner tensors by name; they alias this tensor's bytes."""
        raise NotImplementedError

    def _part_names(self) -> PartNames:
        """Return the names of the parts; a gather asks several times, so they are better kept than made."""
        raise NotImplementedError

    def _build_gathered(self, parts: Mapping[str, Tensor], dtype: torch.dtype, sharding: Sharding) -> Tensor:
        """Return a tensor of the same kind around gathered parts."""
        raise NotImplementedError

    def _kept_beside(self, gathered: Tensor) -> tuple[Tensor, ...]:
        """Return what FSDP frees with a gathered tensor besides its parts, see until_reshard.py."""
        return ()

    @SignedMethod
    def fsdp_pre_all_gather(self, *args: Any) -> tuple[tuple[Tensor, ...], int]:
        """Return uint8 views of the shard's parts, padded to equal rows. FSDP2 calls it on every rank, on the shard.

        Returns the inputs (row parts [padded rows, bytes]; tensor-wide parts [1, 4]) and the padded row count as
        metadata. The inputs alias the shard wherever its storage holds the padding rows.
        """
        # each read of an attribute would go through __torch_function__
        with without_torch_function():
            # FSDP wants inputs of one size from all ranks, and does not pad those of an extension
            rows = self._sharding.padded_rows or self.shape[0]
            names, parts = self._part_names(), self.parts()
            inputs = []
            for name in names.sent:
                part = parts[name]
                if name not in names.along:
                    part = part.reshape(1)
                elif part.shape[0] != rows:
                    part = _pad(part, rows)
                inputs.append(_as_bytes(part))
            return tuple(inputs), rows

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[Tensor],
        metadata: int,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Build, or refill, the gathered weight from FSDP2's buffers (uint8, rank-major on dim 0).

        First call: returns the gathered weight, whose parts are views of the buffers (FSDP crops its padding rows with
        as_strided), and the buffers we allocated ourselves. Later calls (with `out`): FSDP's buffers hold fresh bytes
        already and only our own are refilled; returns None.
        """
        names = self._part_names()
        received = names.sent[: len(all_gather_outputs)]
        # backward gathers into the tensors of forward, which autograd saved: they stay the same objects
        if out is not None:
            if len(received) < len(names.every):
                _refill(local_of(out), self, [name for name in names.every if name not in received])
            return None
        shard, device = self.parts(), all_gather_outputs[0].device
        # the parts that are not sent; with world size 1, where this shard is the whole tensor, all but the first
        own = {
            name: _as_bytes(part if name in names.along else part.reshape(-1)).to(device, copy=True)
            for name, part in shard.items()
            if name not in received
        }
        buffers = {**dict(zip(received, all_gather_outputs, strict=True)), **own}
        parts = {name: _from_bytes(buffers[name], part.dtype) for name, part in shard.items()}
        parts |= {name: part.reshape(-1) for name, part in parts.items() if name not in names.along}
        # which shard a row comes from, and so which scale it has, is told by the number of rows a shard
        whole = self._build_gathered(parts, param_dtype, Sharding(shards=ShardRows(metadata)))
        return whole, (*own.values(), *self._kept_beside(whole))


def _refill(gathered: Any, shard: AllGatherHooks, names: list[str]) -> None:
    """Copy these parts of the shard into the gathered weight, which has buffers of its own for them."""
    theirs, ours = gathered.parts(), shard.parts()
    # where nobody counts versions: a refill is no write
    with below_autograd():
        for name in names:
            target, part = theirs[name], ours[name]
            target.copy_(part if part.shape == target.shape else part.reshape(target.shape))


def _as_bytes(part: Tensor) -> Tensor:
    """Return [n, ..] of any dtype as uint8 [n, .., bytes], a view of a contiguous part."""
    return (part if part.is_contiguous() else part.contiguous()).view(torch.uint8)


def _from_bytes(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_as_bytes`; always a view."""
    return buffer.view(dtype)


def _pad(part: Tensor, rows: int) -> Tensor:
    """Return `part` padded to `rows` with rows that nobody reads: a view if its storage is long enough, else a copy.

    Shards that were moved (CPU offload) have lost their padding and are copied; each byte is written once.
    """
    if part.shape[0] == rows:
        return part
    row_numel = part[0].numel() if part.shape[0] else torch.Size(part.shape[1:]).numel()
    room = part.untyped_storage().nbytes() // part.itemsize - part.storage_offset()
    if part.is_contiguous() and room >= rows * row_numel:
        stride = torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device="meta").stride()
        return part.as_strided((rows, *part.shape[1:]), stride)
    full = part.new_empty((rows, *part.shape[1:]))
    full[: part.shape[0]].copy_(part)
    # nobody reads these rows, but old memory contents should not be sent
    full[part.shape[0] :].zero_()
    return full
