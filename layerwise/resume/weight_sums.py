"""64-bit digests of weights that do not depend on how weights are cut over ranks.

Every rank sums mix(global index, bits) over the elements it holds (`box_sum`); `weights_digest` adds up the sums of all
ranks, in one all-reduce for all weights. If m ranks hold each piece, the sum counts it m times, and must be divided by
m, which the number of counted elements tells on any mesh. A sum modulo 2^64 cannot be divided: so the upper and the
lower halves of the ranks' sums are added separately, which is exact.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.records.expand import expand_leaf, plain_leaf, quantized_local
from dcp_adapters.records.placements import placement_problem
from fsdp_hooks.kernels.digest import GOLDEN, LOW, MIX, MIX_FIRST
from fsdp_hooks.ranks.across_ranks import device_of, is_first, ranks_of
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at a time: a few int64 tensors of that size stay in a core's cache, or keep a GPU busy.
_CHUNK_CPU, _CHUNK = 1 << 15, 1 << 22


@dataclass(frozen=True)
class _Piece:
    """One plain tensor of the state dict (a weight, or a part of a quantized one), as this rank holds it."""

    total: Tensor  # int64 [], the sum over the elements that are counted here
    counted: int
    shape: tuple[int, ...]
    label: str  # dtype and shape, which are digested too


@torch.no_grad()
def weights_digest(
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, int]:
    """Return 64 bits for each tensor of a state dict, the same for every sharding and on all ranks.

    Call it on all ranks of the group (None: the default one, if there is one) with the same names, in any order.
    Replicas are assumed to be equal; of a plain tensor, rank 0's values count. A quantized tensor's digest is made from
    its parts, recipe and dtype. `read` returns the values of a tensor on the meta device; it is called for one at a
    time.

    Raises:
        ValueError: the pieces of a tensor are not boxes of it; or pieces are missing, since the group does not span the
            mesh.
    """
    pieces: dict[str, list[tuple[str, _Piece]]] = {}
    kinds: dict[str, list[Any]] = {}  # of the quantized ones
    # Sorted, since ranks' sums are matched by their place in one message.
    for name in sorted(named):
        value = named[name]
        if read is not None and value.is_meta:
            value = read(value)
        problem = placement_problem(value)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        tensors = expand_leaf(name, value) or {"": plain_leaf(value)}
        pieces[name] = [(part, _make_piece(tensor, counts=is_first(group))) for part, tensor in tensors.items()]
        q = quantized_local(value)
        if q is not None:
            kinds[name] = [q.recipe.to_json(), str(q.dtype)]
    sums = _sum_over_ranks([piece for parts in pieces.values() for _, piece in parts], group)
    digests = {}
    for name, parts in pieces.items():
        values = {part: _weight_digest(f"{name}.{part}".rstrip("."), piece, *next(sums)) for part, piece in parts}
        if name in kinds:
            text = json.dumps([*kinds[name], values], sort_keys=True)
            digests[name] = xxhash.xxh3_64_intdigest(text.encode())
        else:
            digests[name] = values[""]
    return {name: digests[name] for name in named}


def box_sum(local: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return int64 []: the sum of mix(index, bits), wrapping around, over a box at `offsets` of a tensor of `shape`.

    index is the element's place in the whole tensor, row-major. Bit for bit the same on every device.
    """
    if local.is_complex():
        local, shape, offsets = torch.view_as_real(local), (*shape, 2), (*offsets, 0)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if not local.numel():
        return total
    # The last dim that is cut and all whole dims after it lie in one run of memory.
    cut = max((dim for dim in range(local.ndim) if local.shape[dim] != shape[dim]), default=0)
    run = math.prod(local.shape[cut:])
    bits = local.contiguous().view(_INTEGERS[local.element_size()]).view(-1, run)
    starts = torch.zeros((1,), dtype=torch.int64, device=local.device)
    for dim in range(cut):
        stride = math.prod(shape[dim + 1 :])
        first, last = offsets[dim], offsets[dim] + local.shape[dim]
        rows = torch.arange(first, last, dtype=torch.int64, device=local.device).mul_(stride)
        starts = (starts[:, None] + rows).view(-1)
    if local.ndim:
        starts = starts + offsets[cut] * math.prod(shape[cut + 1 :])
    most = _CHUNK_CPU if local.is_cpu else _CHUNK
    # Chunks do not change the result: the sum wraps around, so it is the same in any order.
    columns = min(run, most)
    rows_at_once = max(1, most // columns)
    for row in range(0, len(bits), rows_at_once):
        for column in range(0, run, columns):
            chunk = bits[row : row + rows_at_once, column : column + columns]
            index = torch.arange(column, column + chunk.shape[1], dtype=torch.int64, device=local.device)
            total += _hash_pairs(index + starts[row : row + rows_at_once, None], chunk).sum()
    return total


def _hash_pairs(index: Tensor, bits: Tensor) -> Tensor:
    """Return int64, of the shapes broadcast: a hash of every (index, bits) pair; overwrites `index`."""
    # A mere product of index and bits would not do: a sum of products is the same if two signs change places. The shift
    # keeps the sign, which is faster than masking it out and costs one bit.
    x = index.mul_(GOLDEN).bitwise_xor_(bits.to(torch.int64) * MIX_FIRST)
    for _ in range(2):
        x.bitwise_xor_(x >> 32).mul_(MIX)
    return x.bitwise_xor_(x >> 32)


def _make_piece(value: Tensor, *, counts: bool) -> _Piece:
    local, shape = local_of(value), tuple(value.shape)
    offsets: Sequence[int] = (0,) * len(shape)
    if isinstance(value, DTensor):
        counts = value.device_mesh.get_coordinate() is not None
        if counts:
            _, offsets = compute_local_shape_and_global_offset(shape, value.device_mesh, value.placements)
    label = f"{value.dtype} {shape}"
    if not counts:
        return _Piece(torch.zeros((), dtype=torch.int64, device=local.device), 0, shape, label)
    return _Piece(box_sum(local, shape, offsets), local.numel(), shape, label)


def _sum_over_ranks(pieces: Sequence[_Piece], group: dist.ProcessGroup | None) -> Any:
    """Return (sum of the unsigned totals, elements counted) of every piece over all ranks, as exact integers."""
    totals: dict[torch.device, list[int]] = {}
    for place, piece in enumerate(pieces):
        totals.setdefault(piece.total.device, []).append(place)
    table = torch.zeros(len(pieces), 3, dtype=torch.int64, device="cpu")
    # One read for each device: the CPU waits for it each time.
    for places in totals.values():
        values = torch.stack([pieces[place].total for place in places]).cpu()
        table[places, 0], table[places, 1] = values & LOW, (values >> 32) & LOW
    table[:, 2] = torch.tensor([piece.counted for piece in pieces], dtype=torch.int64, device="cpu")
    if ranks_of(group) > 1 and pieces:
        table = table.to(device_of(group))
        dist.all_reduce(table, group=group)
    return iter([((high << 32) + low, counted) for low, high, counted in table.tolist()])


def _weight_digest(name: str, piece: _Piece, total: int, counted: int) -> int:
    size = math.prod(piece.shape)
    # Replicas count as often as there are of them, and everywhere alike; any other count is a wrong group.
    copies, rest = divmod(counted, size) if size else (1, 0)
    if rest or not copies:
        raise ValueError(
            f"{name}: the ranks hold {counted} elements of {piece.label}, which has {size}: some are missing or held "
            "unevenly; pass the group of all ranks that hold the model"
        )
    return (total // copies + xxhash.xxh3_64_intdigest(piece.label.encode())) % (1 << 64)
