"""Models, state dicts and comparisons that the tests of this folder share.

Every value is a function of a seed alone, so each rank can say what any shard must hold without asking another rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from dcp_adapters.records.expand import expand_leaf, quantized_local
from qtensor import quantize
from tests import recipes

ROW, SQUARE, RECIPES = recipes.ROW, recipes.SQUARE, recipes.MAIN
EVERY = RECIPES | recipes.WITH_HISTORY
K = 64
# Rows of a weight: 112 even and uneven, 33 uneven, 3 empty shards from 4 ranks on. Square blocks want multiples of 32.
ROWS = (112, 33, 3)
SQUARE_ROWS = (160, 96, 32)


def rows_for(name: str) -> tuple[int, ...]:
    return SQUARE_ROWS if name in SQUARE else ROWS


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values no two rows or blocks of which are alike in magnitude: bytes from a wrong offset are wrong bytes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(torch.randn((*shape[:-1], 1), generator=generator)) * (1 + seed)).to(dtype)


def arbitrary(shape: tuple[int, ...], recipe: Any, seed: int) -> Any:
    """A quantized tensor of bytes that no quantizer makes: whoever decodes and encodes them on the way changes them.

    What rows share (tensor-wide parts, the scales of square blocks) they share here, too.
    """
    generator = torch.Generator().manual_seed(seed)
    q = quantize(values(shape, seed), recipe)
    for part, tensor in q.parts().items():
        raw = tensor.view(-1).view(torch.uint8)
        noise = torch.randint(256, raw.shape, generator=generator, dtype=torch.uint8)
        if part == "scale" and tensor.ndim and recipes.facts(recipe).square:
            block = recipes.facts(recipe).rows
            noise = noise.view(shape[-2], -1)[::block].repeat_interleave(block, 0)[: shape[-2]].reshape(-1)
        raw.copy_(noise)
    return q


class Layer(nn.Module):
    """A quantized weight with a dense bias."""

    def __init__(self, rows: int, recipe: Any, seed: int, columns: int = K) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantize(values((rows, columns), seed), recipe))
        self.bias = nn.Parameter(values((rows,), seed + 1))


class Model(nn.Module):
    """A dense embedding, quantized layers, a bf16 norm and an fp32 buffer."""

    def __init__(self, recipe: Any, rows: tuple[int, ...] = ROWS, seed: int = 0, columns: int = K) -> None:
        super().__init__()
        self.embedding = nn.Parameter(values((19, columns), 100 + seed))
        self.layers = nn.ModuleList(Layer(n, recipe, 10 * i + seed, columns) for i, n in enumerate(rows))
        self.norm = nn.Parameter(values((columns,), 200 + seed))
        self.register_buffer("steps", torch.tensor(3.0 + seed))


def model(name: str, seed: int = 0) -> Model:
    return Model(RECIPES[name], rows_for(name), seed)


def sharded(net: Model, mesh: DeviceMesh | None = None) -> Model:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def models(seed: int = 0, mesh: DeviceMesh | None = None, *, names: Mapping[str, Any] = RECIPES) -> dict[str, Any]:
    """A nested state dict with a sharded model for each recipe."""
    return {name: sharded(model(name, seed), mesh).state_dict() for name in names}


def reference(seed: int = 0, *, names: Mapping[str, Any] = RECIPES) -> dict[str, Any]:
    """What `models` holds, unsharded."""
    return {name: model(name, seed).state_dict() for name in names}


def placed(full: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """This rank's piece of a tensor that every rank holds."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save(state_dict: Mapping[str, Any], path: Any, **options: Any) -> Any:
    with alone():
        return dcp.save(dict(state_dict), checkpoint_id=path, planner=QuantizedSavePlanner(**options))


def load(state_dict: dict[str, Any], path: Any, *, reader: Any = None, **options: Any) -> None:
    where = {"checkpoint_id": path} if reader is None else {"storage_reader": reader}
    with alone():
        dcp.load(state_dict, **where, planner=QuantizedLoadPlanner(**options))


@contextmanager
def alone() -> Iterator[None]:
    """DCP warns when there is no process group; where there is none, that is meant."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


# -- comparison --------------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    """Every byte of a plain tensor; of a copy, since memory that numpy has seen can no longer be resized."""
    if not tensor.numel():
        return b""
    held = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return held.reshape(-1).view(torch.uint8).numpy().tobytes()


def leaves(state_dict: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = state_dict.items() if isinstance(state_dict, Mapping) else enumerate(state_dict)
    for name, value in items:
        if isinstance(value, Mapping | list):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def held(state_dict: Any) -> dict[str, Any]:
    """Name -> (shape, dtype, bytes) of every tensor of this rank, parts by their own names; other leaves as is."""
    found = {}
    for name, value in leaves(state_dict):
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        q = quantized_local(value)
        tensors = (
            {name: local_of(value)} if q is None else {f"{name}.{part}": tensor for part, tensor in q.parts().items()}
        )
        found |= {key: (tuple(tensor.shape), tensor.dtype, bits(tensor)) for key, tensor in tensors.items()}
    return found


def local_of(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_holds(state_dict: Any, full: Any) -> None:
    """Each rank holds exactly its piece of `full`, a state dict of whole tensors, bit for bit."""
    expected = dict(leaves(full))
    found = dict(leaves(state_dict))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        want = expected[name]
        if not isinstance(value, Tensor):
            assert value == want, name
            continue
        assert value.shape == want.shape, name
        pieces = expand_leaf(name, value) or {"": value.detach()}
        wanted = quantized_local(want).parts() if quantized_local(want) is not None else {"": want.detach()}
        assert pieces.keys() == wanted.keys(), name
        for part, piece in pieces.items():
            assert_piece(piece, wanted[part], f"{name}.{part}")


def assert_piece(piece: Tensor, whole: Tensor, what: str) -> None:
    if isinstance(piece, DTensor):
        assert piece.shape == whole.shape, (what, piece.shape, whole.shape)
        shape, offset = compute_local_shape_and_global_offset(piece.shape, piece.device_mesh, piece.placements)
        for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
            whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    local = local_of(piece)
    assert (local.shape, local.dtype) == (whole.shape, whole.dtype), (what, local.shape, whole.shape)
    assert bits(local) == bits(whole), f"{what}: other bytes"


def payload_bytes(q: Any) -> int:
    return sum(math.prod(part.shape) * part.itemsize for part in q.parts().values())
