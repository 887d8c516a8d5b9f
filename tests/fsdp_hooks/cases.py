"""Models and comparisons that the tests of this folder share; every function here runs inside a rank."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_hooks import unsharded
from qtensor import (
    QuantizedTensor,
    quantized_model_init,
)
from tests import recipes

K = 64
UNEVEN = (112, 33, 3)  # rows a layer: even, uneven and (from 4 ranks on) empty shards
SQUARE = (384, 768)  # shards on 1..4 ranks are whole square blocks of 16 and 32; 2 and 4 ranks cut those of 128

ROW_RECIPES, SQUARE_RECIPES, RECIPES = recipes.ROW, recipes.SQUARE, recipes.MAIN
TENSOR_WIDE, HANDS = tuple(recipes.TENSOR_WIDE), recipes.HANDS
STAND_INS = recipes.STAND_INS
# Which formats train on how many ranks. In `make test` each format on one number, the stand-ins on 4, where shards are
# uneven, empty and cut inside of blocks; in `make test-all` all others on 4 ranks, too, and a hand on one.
TRAINED = [
    pytest.param(2, tuple(HANDS[0]), id="2"),  # where blocks of 128 are cut, too
    pytest.param(3, tuple(HANDS[2]), id="3"),
    pytest.param(4, tuple(STAND_INS), id="4"),
    pytest.param(1, tuple(HANDS[0]), id="1", marks=pytest.mark.full),
    pytest.param(4, tuple(name for name in RECIPES if name not in STAND_INS), id="4-others", marks=pytest.mark.full),
]


def rows_for(name: str) -> tuple[int, ...]:
    return SQUARE if name in SQUARE_RECIPES else UNEVEN


def cuts_blocks(name: str) -> bool:
    """Whether shards of these rows cut square blocks."""
    block, ranks = recipes.facts(RECIPES[name]).rows, dist.get_world_size()
    return ranks > 1 and any(-(-rows // ranks) % block for rows in rows_for(name))


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside it, by name, and the bytes that this rank gives to all-gathers.

    torch's CommDebugMode cannot be used: it fails when a module's forward is called directly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.given: list[int] = []  # bytes, an entry for each all-gather

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0]
            self.counts["objects" if name == "_allgather_base_" and _of_objects() else name] += 1
            if name == "_allgather_base_" and not _of_objects():
                self.given.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def _of_objects() -> bool:
    """Whether a collective is all_gather_object's own: from torch 2.15 on it is of the kind that weights use."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "all_gather_object":
        frame = frame.f_back
    return frame is not None


class Block(nn.Module):
    """x + tanh(linear(x)) @ mix: a layer with any number of weight rows that keeps the width K."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.linear = nn.Linear(K, rows, dtype=dtype)
        generator = torch.Generator().manual_seed(rows)
        mix = torch.randn(rows, K, generator=generator) / rows**0.5
        self.register_buffer("mix", mix.to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) @ self.mix


class Net(nn.Module):
    """Blocks of the given rows, then a norm (never quantized) and a head (part of FSDP's root group)."""

    def __init__(self, rows: Sequence[int], *, head: int = 96, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(n, dtype) for n in rows)
        self.norm = nn.LayerNorm(K, dtype=dtype)
        self.head = nn.Linear(K, head, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(recipe: Any, rows: Sequence[int], *, seed: int = 0, head: int | None = None, **init: Any) -> Net:
    """A quantized model, the same on every rank. The head's rows are those of the first block where not given."""
    torch.manual_seed(seed)
    with quantized_model_init(recipe, **init):
        return Net(rows, head=head or rows[0])


def shard(net: Net, **options: Any) -> Net:
    """fully_shard a block and the root."""
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def mesh_of(*shape: int) -> DeviceMesh:
    names = {1: ("shard",), 2: ("replicate", "shard")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def batch(step: int, rank: int | None = None) -> Tensor:
    """Another batch for every step and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, K, generator=generator).to(torch.bfloat16)


def local(param: Tensor) -> Any:
    """The shard behind a parameter, the very object."""
    with torch.no_grad():
        return param.to_local() if isinstance(param, DTensor) else param


def quantized(net: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(fqn, parameter, shard) of every quantized parameter."""
    for fqn, param in net.named_parameters():
        if isinstance(local(param), QuantizedTensor):
            yield fqn, param, local(param)


def rows_of(full: Tensor, shard_: Any, rank: int, ranks: int) -> Tensor:
    """The rows of `full` that a shard on `rank` of `ranks` holds, cut as torch.chunk cuts."""
    size = -(-full.shape[0] // ranks)
    rows = full[min(rank * size, full.shape[0]) :][:size]
    assert rows.shape == shard_.shape
    return rows


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor, copied."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def held() -> int:
    """Bytes in the storages of all tensors that python can reach; the parts of wrappers are tensors of their own."""
    gc.collect()
    gc.collect()  # what finalizers of the first pass let go
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def held_since(before: int, expected: int, slack: int = 0) -> int:
    """Bytes held above `before`: waits until they are `expected`, with `slack` more at most, or for 20 seconds in vain.

    gloo's threads let go of a collective's tensors some time after it has ended.
    """
    deadline = time.monotonic() + 20
    while not 0 <= (found := held() - before) - expected <= slack and time.monotonic() < deadline:
        pass
    return found


def parts_of(q: Any) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in q.detach().parts().items()}


def assert_same_bytes(found: Tensor, expected: Tensor, what: str) -> None:
    """Shape, dtype and every byte."""
    got, want = (tuple(found.shape), found.dtype), (tuple(expected.shape), expected.dtype)
    if got != want:
        raise AssertionError(f"{what}: {got} is not {want}")
    different = int((bits(found) != bits(expected)).sum())
    if different:
        raise AssertionError(f"{what}: {different} of {bits(found).numel()} bytes differ")


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    """Every byte that this rank holds at rest, by "fqn" or "fqn.part"."""
    held = {}
    for fqn, param in net.named_parameters():
        shard_ = local(param)
        if isinstance(shard_, QuantizedTensor):
            held |= {f"{fqn}.{name}": part for name, part in parts_of(shard_).items()}
        else:
            held[fqn] = shard_.detach().clone()
    return held


def assert_same_snapshot(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert_same_bytes(found[name], tensor, f"{what}: {name}")


def gathered(net: nn.Module) -> dict[str, Any]:
    """fqn -> what FSDP gathers: a dict of parts, or a plain tensor. Copies, the model is sharded again."""
    with unsharded(net):
        return {
            fqn: parts_of(param) if isinstance(param, QuantizedTensor) else param.detach().clone()
            for fqn, param in net.named_parameters()
        }


def exchanged(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shards_of(net: nn.Module, group: Any = None) -> dict[str, list[dict[str, Tensor]]]:
    """fqn -> the parts of every rank's shard, in rank order. float8 travels as it is pickled: exactly."""
    everyone = exchanged({fqn: pack(parts_of(q)) for fqn, _, q in quantized(net)}, group)
    return {fqn: [unpack(each[fqn]) for each in everyone] for fqn in everyone[0]}


def pack(parts: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (bits(part), part.dtype, part.shape) for name, part in parts.items()}


def unpack(packed: dict[str, Any]) -> dict[str, Tensor]:
    return {name: data.view(dtype).reshape(shape) for name, (data, dtype, shape) in packed.items()}


def assert_gathers_exactly(
    net: nn.Module, what: str, group: Any = None, *, full: dict[str, Any] | None = None, dim: int = 0
) -> None:
    """Gathered row parts are the shards' parts in rank order; the tensor-wide part is one value a shard.

    `full` is what `gathered` has just returned, where the caller needs it, too; `dim` is along which shards are cut.
    """
    shards, full = shards_of(net, group), gathered(net) if full is None else full
    for fqn, pieces in shards.items():
        for name, part in full[fqn].items():
            if pieces[0][name].ndim == 0:
                expected = torch.stack([piece[name] for piece in pieces])
            else:
                expected = torch.cat([piece[name].view(torch.uint8) for piece in pieces], dim).view(part.dtype)
            assert_same_bytes(part, expected, f"{what}: gathered {fqn}.{name}")


def assert_equals_reference(full: dict[str, Any], reference: nn.Module, what: str) -> None:
    """What `gathered` returned holds the bytes of an unsharded model; a tensor-wide scale in every entry."""
    for fqn, param in reference.named_parameters():
        if not isinstance(param, QuantizedTensor):
            assert_same_bytes(full[fqn], param, f"{what}: {fqn}")
            continue
        for name, part in parts_of(param).items():
            expected = part.repeat(full[fqn][name].shape) if part.ndim == 0 else part
            assert_same_bytes(full[fqn][name], expected, f"{what}: {fqn}.{name}")
