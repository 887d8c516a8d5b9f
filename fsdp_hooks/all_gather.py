"""How a tensor made of named parts travels through FSDP2's all-gather, exactly.

FSDP2 asks the local shard of every parameter for the tensors to gather (`fsdp_pre_all_gather`), gathers them rank
after rank, and hands the buffers back (`fsdp_post_all_gather`), once to build the gathered weight and later to refill
it in place. `AllGatherHooks` answers for any tensor that consists of parts; it knows parts, not formats:

    row part          [rows, ...]   gathered part = the shards' parts, one after the other
    tensor-wide part  []            gathered part = the shards' values as a vector, entry i // rows-per-shard for row i

So one rank's scale is never applied to another rank's bytes, whether the shards agree or not, and this takes no host
sync. Everything is handed over as uint8 views: gloo refuses float8, NCCL refuses E8M0, and a view costs no copy. Stacks
[E, N, K] of which each shard has some rows of every matrix (`Shard(1)`) travel as one input, see row_pieces.py.

Two holes of FSDP2 (torch 2.11 - 2.13) are closed here:
  * uneven shards: FSDP does not pad the inputs of an extension, it only checks them. With the 5-argument signature the
    check fails on the short ranks alone, and the others wait forever; with one argument the check is skipped and we
    pad. So short shards have that signature, and all others the one that tells them how FSDP cut them. We note the
    number of padded rows when FSDP allocates the padded shard (`new_zeros`), because CPU offload and pinning drop the
    padding from the storage.
  * shard world size 1: only the first input comes back. The other parts are copied from the shard into buffers of
    their own, because with an alias a write to the gathered weight would change the shard's scale but not its payload.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fsdp_hooks.torch_private import below_autograd, local_of, without_torch_function

if TYPE_CHECKING:
    from fsdp_hooks.row_pieces import RowPieces


@dataclass(frozen=True)
class ShardRows:
    """Which entry of a vector of tensor-wide values belongs to index i along `dim`: entry (i + offset) // rows."""

    rows: int
    offset: int = 0
    dim: int = 0


@dataclass(frozen=True)
class Sharding:
    """What FSDP2 made of a tensor; the default describes a tensor that it has not touched.

    shards: set on a gathered weight, whose tensor-wide parts are vectors with one value a shard.
    padded_rows: set on a shard whose storage was allocated with this many rows.
    allocated: whether this is the padded tensor that FSDP allocates, whose first rows become the shard.
    short: set on a shard that has fewer rows than that.
    """

    shards: ShardRows | None = None
    padded_rows: int | None = None
    allocated: bool = False
    short: bool = False


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
    """`fsdp_pre_all_gather`, whose bound form has its signature at hand: FSDP2 asks for it before every gather.

    Args:
        method: called with the owner and whatever FSDP2 gives.
        short: returns whether the owner has fewer rows than FSDP2 pads it to.
    """

    def __init__(self, method: Callable[..., Any], short: Callable[[Any], bool]) -> None:
        self.method, self.short = method, short

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., Any]:
        """Return the method of `owner`; of the class, the function."""
        return self.method if owner is None else _Bound((self, owner))


class _Bound(tuple[Any, ...]):
    """A method and its owner: a tuple, since FSDP2 asks for it three times a gather, and nothing is made faster."""

    __slots__ = ()

    @property
    def __signature__(self) -> inspect.Signature:
        """What FSDP2 calls it with: the mesh; and, unless the shard is shorter than others, the size of the whole."""
        signed, owner = self
        return _MESH if signed.short(owner) else _ALL

    def __call__(self, *args: Any) -> Any:
        signed, owner = self
        return signed.method(owner, *args)


_MESH = inspect.signature(lambda mesh: None)
_ALL = inspect.signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)


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

    @partial(SignedMethod, short=lambda self: self._sharding.short)
    def fsdp_pre_all_gather(self, *args: Any) -> "tuple[tuple[Tensor, ...], int | RowPieces]":
        """Return uint8 views of the shard's parts, padded to equal rows. FSDP2 calls it on every rank, on the shard.

        Returns the inputs (row parts [padded rows, bytes]; tensor-wide parts [1, 4]) and the padded row count as
        metadata. The inputs alias the shard wherever its storage holds the padding rows. Of a shard with some rows of
        every matrix, see row_pieces.py.
        """
        # each read of an attribute would go through __torch_function__
        with without_torch_function():
            # all but the shards that are shorter than others are told the shape of the whole
            if args[1:] and args[1][1:] != self.shape[1:]:
                from fsdp_hooks.row_pieces import give

                own = self.parts()
                flat, pieces = give([own[name] for name in self._part_names().sent], self.shape, args[1])
                return (flat,), pieces
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
        metadata: "int | RowPieces",
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Build, or refill, the gathered weight from FSDP2's buffers (uint8, rank-major on dim 0).

        First call: returns the gathered weight, whose parts are views of the buffers (FSDP crops its padding rows with
        as_strided), and the buffers we allocated ourselves. Later calls (with `out`): FSDP's buffers hold fresh bytes
        already and only our own are refilled; returns None.
        """
        if metadata.__class__ is not int:
            return self._join_pieces(all_gather_outputs[0], cast("RowPieces", metadata), param_dtype, out)
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

    def _join_pieces(
        self, gathered: Tensor, pieces: "RowPieces", param_dtype: torch.dtype, out: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Do `fsdp_post_all_gather` of shards that hold some rows of every matrix: uint8 [ranks, bytes]."""
        from fsdp_hooks.row_pieces import restore, take

        restore(pieces)
        names, shard, dim = self._part_names(), self.parts(), pieces.dim
        if out is not None:
            theirs = local_of(out).parts()  # type: ignore[attr-defined]
            with below_autograd():
                take(gathered, {name: theirs[name] for name in names.sent}, shard, pieces)
            _refill(local_of(out), self, [name for name in names.every if name not in names.sent])
            return None
        ranks, parts = gathered.shape[0], {}
        for name, part in shard.items():
            if name not in names.sent:
                parts[name] = part.reshape(-1).to(gathered.device, copy=True)
                continue
            shape = (*part.shape[:dim], ranks * part.shape[dim], *part.shape[dim + 1 :]) if part.ndim else (ranks,)
            parts[name] = torch.empty(shape, dtype=part.dtype, device=gathered.device)
        take(gathered, {name: parts[name] for name in names.sent}, shard, pieces)
        rows = ShardRows(pieces.shape[dim], dim=dim)
        whole = self._build_gathered(parts, param_dtype, Sharding(shards=rows))
        return whole, (*parts.values(), *self._kept_beside(whole))


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
