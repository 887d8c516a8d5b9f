"""`full_tensor()` and `distribute_tensor()`: the collectives that DTensor runs on local tensors, part by part.

    full_tensor        constant_pad_nd (uneven shards) -> all_gather_into_tensor -> wait_tensor -> slice, cat (columns)
    distribute_tensor  split -> constant_pad_nd -> scatter_ from rank 0 -> slice; broadcast_ if a mesh dim replicates

In a graph `redistribute` gathers a weight for a product, as SimpleFSDP asks: the same collectives, waited for where the
graph waits. The result of a gather has the bytes of the shards. Its tensor-wide scale is the agreed one, or, if the
shards hold different ones or a graph cannot ask, the vector of their values, one a shard (see fsdp_hooks.all_gather).
Gathering over more than one mesh dim, or putting columns together, needs agreed scales.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.all_gather import Sharding, ShardRows
from fsdp_hooks.torch_private import is_fake, is_tracing, make_wrapper
from qtensor.ops.joined import Joined, broadcast_flat
from qtensor.ops.table import implements
from qtensor.spec.registry import describe, specs_of, tensor_wide
from qtensor.tensor.contents import bytes_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

__all__: list[str] = []

aten = torch.ops.aten
c10d = torch.ops._c10d_functional  # noqa: SLF001 - the namespace of the ops that DTensor calls


@implements(aten.constant_pad_nd.default)
def pad_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append rows of zero bytes, which a slice drops again."""
    q, pad = args[0], args[1]
    if any(pad[:-1]) or len(pad) != 2 * q.ndim or pad[-1] < 0 or q._lens.described is not None:
        raise NotImplementedError(
            f"padding {describe(q.shape, q.recipe)} by {list(pad)}: only rows behind the last one are defined"
        )
    own = q.parts()
    parts = {
        spec.name: _pad(own[spec.name], pad[-1]) if spec.extends_along(0, q.ndim) else own[spec.name].clone()
        for spec in specs_of(q.recipe)
    }
    return q._like(parts, sharding=Sharding(padded_rows=q.shape[0] + pad[-1]))


@implements(aten.cat.default)
def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put pieces of one weight together: the last step of gathering columns, or of a cut along a strided dim.

    Flattened weights are joined for a broadcast, see joined.py.
    """
    if all(one.ndim == 1 for one in args[0]) and any(_is_flat(one) for one in args[0]):
        return Joined(args[0])
    pieces, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0][0].ndim
    first = next(piece for piece in pieces if isinstance(piece, QuantizedTensor))
    # equal bytes of different recipes, or under different shared scales, mean different values
    alike = all(
        isinstance(q, QuantizedTensor)
        and q.recipe.stored == first.recipe.stored
        and q._lens.described is None
        and q._sharding.shards is None
        for q in pieces
    )
    shared = [spec.name for spec in specs_of(first.recipe) if not spec.extends_along(dim, first.ndim)] if alike else []
    if shared and is_fake(getattr(first, shared[0])):
        raise NotImplementedError(
            f"cat of {[tuple(q.shape) for q in pieces]} along dim {dim} in a graph: the pieces of "
            f"{describe(first.shape, first.recipe)} share {shared}, and a graph cannot ask whether these are equal; "
            "shard the weight along dim 0, or use fully_shard"
        )
    if not alike or any(not torch.equal(getattr(q, name), getattr(first, name)) for q in pieces for name in shared):
        raise NotImplementedError(
            f"cat of {[tuple(q.shape) for q in pieces]}: only quantized tensors of one recipe whose shared scales are "
            "equal (fsdp_hooks.sync_scales) can be joined"
        )
    parts = {
        name: part.clone() if name in shared else _join([getattr(q, name) for q in pieces], dim)
        for name, part in first.parts().items()
    }
    return first._like(parts)


def _join(pieces: list[Tensor], dim: int) -> Tensor:
    """Do torch.cat on bytes, since it does not support float8."""
    return torch.cat([piece.contiguous().view(torch.uint8) for piece in pieces], dim).view(pieces[0].dtype)


@implements(c10d.all_gather_into_tensor.default)
def all_gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather every part as bytes, rank after rank, and wait for them: in a graph, where the graph waits."""
    q, ranks, group = args
    if q._sharding.shards is not None or q._lens.described is not None:
        raise NotImplementedError(
            f"gathering {describe(q.shape, q.recipe)} over a second mesh dim is not defined; use "
            "fsdp_hooks.unsharded(module) for the weights of a module, or dcp_adapters.expand(state_dict) for its "
            "parts as plain DTensors"
        )
    sent = {}
    for spec in specs_of(q.recipe):
        # products do not need the others
        if spec.gathered:
            part = q.parts()[spec.name]
            data = part if spec.extends_along(0, q.ndim) else part.reshape(1)
            sent[spec.name] = func(data.contiguous().view(torch.uint8), ranks, group)
    return Gathering(q, sent, ranks) if is_tracing() else _arrived(q, sent, ranks)


def _arrived(q: QuantizedTensor, sent: Mapping[str, Tensor], ranks: int) -> QuantizedTensor:
    """Wait for the bytes that were gathered of a shard and its likes, and return the whole of them."""
    parts = {
        # of what is not gathered, this shard's own will do
        spec.name: c10d.wait_tensor(sent[spec.name]).view(spec.dtype) if spec.name in sent else part.clone()
        for spec, part in zip(specs_of(q.recipe), q.parts().values(), strict=True)
    }
    wide, shards, padded = tensor_wide(q.recipe), ShardRows(q.shape[0]), q._sharding.padded_rows
    # the shards agree: one value serves all rows, as in a weight that was never cut; a graph cannot ask
    if wide and not is_tracing() and not is_fake(parts[wide]) and bool((parts[wide] == parts[wide][0]).all()):
        parts[wide] = parts[wide][0].clone()
    sharding = Sharding(
        shards=shards if wide and parts[wide].ndim else None,
        padded_rows=None if padded is None else ranks * q.shape[0],
        allocated=padded is not None,  # its first rows are the whole tensor
    )
    return q._like(parts, sharding=sharding)


# newer torch hands results through a second op on the way to autograd
_WAITS = [getattr(c10d, name).default for name in ("wait_tensor", "_wrap_tensor_autograd") if hasattr(c10d, name)]


@implements(*_WAITS)
def wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do nothing: the parts have been waited for already."""
    return args[0]


class Gathering(Tensor):
    """A weight that a graph gathers and has not waited for: nothing is computed with it.

    The passes of compilers, and the policies of activation checkpointing, look for a wait directly behind a gather.

    Attributes:
        shard: what this rank has sent.
        sent: the bytes of the parts, of all ranks.
        ranks: how many these are.
    """

    shard: QuantizedTensor
    sent: Mapping[str, Tensor]
    ranks: int

    def __new__(cls, shard: QuantizedTensor, sent: Mapping[str, Tensor], ranks: int) -> Self:
        """Wrap what is under way; internal."""
        self: Any = make_wrapper(cls, (ranks * shard.shape[0], *shard.shape[1:]), shard.dtype, shard.device)
        self.shard, self.sent, self.ranks = shard, sent, ranks
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all is done in __new__."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is that of the C function it has by default
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        under_way = args[0]
        if func is c10d.wait_tensor.default:
            return _arrived(under_way.shard, under_way.sent, under_way.ranks)
        # what activation checkpointing keeps of an operation
        if func in (aten.detach.default, aten.alias.default):
            return Gathering(under_way.shard, under_way.sent, under_way.ranks)
        if func in _WAITS:
            return under_way
        raise NotImplementedError(f"{func} is not defined for a gather that is under way; call wait_tensor on it first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch's own has no types
        return f"Gathering({self.shard!r})"


@implements(torch.ops.c10d.scatter_.default)
def scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scatter every part as bytes, and a preserved initial value with them, and wait for them."""
    (out,), pieces, *rest = args
    # one collective for each part, as bytes: a backend need not know float8
    columns = zip(*(bytes_of(q) for q in (out, *(pieces[0] if pieces else ()))), strict=True)
    for own, *given in columns:
        sent = [[piece.contiguous() for piece in given]] if pieces else []
        _, work = func([own], sent, *rest, **kwargs)
        work.wait()
    return args[0], work


@implements(torch.ops.c10d.broadcast_.default)
def broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcast a weight part by part, as DistributedDataParallel (flattened, see joined.py) and DTensor ask for.

    In the default group the others may be receivers of `broadcast_from_rank0=True`, which expect a dense tensor and
    would take parts for values, so that raises. In a group of a mesh dim all ranks hold the weight that is placed.
    """
    q = next(arg for arg in args[0] if isinstance(arg, QuantizedTensor))
    # in the default group receivers may hold dense tensors, which would take codes for values
    if _is_flat(q) or dist.ProcessGroup.unbox(args[1]) is not dist.group.WORLD:
        return args[0], broadcast_flat(func, args[0], args[1:], kwargs)
    raise NotImplementedError(
        f"broadcasting {describe(q.shape, q.recipe)} to all ranks is not defined, for they may expect dense values. "
        "With broadcast_from_rank0=True: give every rank the full state dict and leave that option off. With "
        "full_state_dict=True, or distribute_tensor, and a mesh dim that replicates over all ranks: call "
        "distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None) on every rank, and load "
        "what it returns by model.load_state_dict. Or load a checkpoint by dcp.load"
    )


def _is_flat(tensor: Tensor) -> bool:
    return isinstance(tensor, QuantizedTensor) and tensor.ndim == 1 and tensor._lens.described is not None


def _pad(part: Tensor, rows: int) -> Tensor:
    """Return `part` with `rows` more rows of zero bytes."""
    data = part.view(torch.uint8)
    more = rows if part.ndim > 1 else rows * part.itemsize
    return F.pad(data, [0] * (2 * part.ndim - 1) + [more]).view(part.dtype)
