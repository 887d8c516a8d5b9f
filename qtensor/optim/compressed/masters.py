"""Masters between steps: a remainder beside the weight's bytes (qtensor/states/remainders.py)."""

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import dtensor_around, local_of
from qtensor.numerics import kernels
from qtensor.scales.agreement import decide
from qtensor.scales.cut_blocks import CutBlocks
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.blocks import BlockFacts
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of
from qtensor.states.draws import Positions
from qtensor.states.kinds import MARK, WORD
from qtensor.states.remainders import join, join_dense, remainder_of, rounded, split, split_dense
from qtensor.tensor.contents import initial_value, store, values_of, write
from qtensor.tensor.quantized_tensor import QuantizedTensor


def new_remainder(param: Tensor) -> Tensor:
    """Return the remainder of a master that is what its weight's bytes say: zeros, a DTensor if `param` is one."""
    return torch.zeros_like(param, dtype=WORD).detach()


def words_of(remainder: Tensor) -> Tensor:
    """Return the int16 of a remainder's shard, the same memory."""
    return local_of(remainder).detach().view(torch.int16)


def stand_in(param: Tensor) -> Tensor:
    """Return what stands for a master in the inner optimizer's groups: fp32 zeros in one element's memory.

    It has the shape and the shards of the master, since some optimizers make states of it before their first step.
    """
    local = local_of(param)
    return as_sharded(torch.zeros((), dtype=torch.float32, device=local.device).expand(local.shape), param)


def recipe_mark(param: Tensor) -> Tensor:
    """Return a number for what a parameter's remainder is counted from, int64 []: a hash of its recipe, or its dtype.

    It is new each time: checkpoints are read into the tensors of a state dict.
    """
    local = local_of(param)
    number = _number_of(local.recipe if isinstance(local, QuantizedTensor) else param.dtype)
    return torch.tensor(number, dtype=torch.int64, device="cpu")


@functools.cache
def _number_of(kind: Recipe | torch.dtype) -> int:
    text = str(kind)
    if isinstance(kind, Recipe):
        record, usual = kind.to_json(), type(kind)().to_json()
        # a field that a later version adds has a default that says what was there before
        text = repr(sorted((name, value) for name, value in record.items() if name == "type" or value != usual[name]))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def mark_problem(param: Tensor, values: Mapping[str, object]) -> str | None:
    """Return why a saved remainder is not one of a parameter; None: it is."""
    found = values.get(MARK)
    local = local_of(param)
    here = local.recipe if isinstance(local, QuantizedTensor) else param.dtype
    if isinstance(found, Tensor) and found.numel() == 1 and found.item() == recipe_mark(param).item():
        return None
    return (
        f"is counted from values of another recipe or dtype than the weight has here ({here}); load the weights under "
        "the recipe they were saved in, or states that were saved with masters in fp32"
    )


def as_sharded(local: Tensor, param: Tensor) -> Tensor:
    """Return a tensor of a parameter's shard as a DTensor, if the parameter is one."""
    if isinstance(param, DTensor):
        return dtensor_around(local, param.device_mesh, param.placements, param.shape)
    return local


def say_initial_value(param: Tensor, remainder: Tensor) -> None:
    """Have a remainder say where training starts, if that is a preserved initial value: a checkpoint has no other."""
    shard, own = local_of(param), words_of(remainder)
    if not isinstance(shard, QuantizedTensor) or not own.numel():
        return
    value = initial_value(shard)
    if value is not None:
        left = remainder_of(as_rows(value.to(torch.float32)), shard.parts(), shard.recipe)
        own.copy_(left.view(own.shape))


def as_rows(x: Tensor) -> Tensor:
    """Return a shard as [rows, K]."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1) if x.numel() else x


def dense_of(shard: Tensor) -> Tensor:
    """Return the bf16 numbers of a shard that is not quantized."""
    return shard.dense if isinstance(shard, HighPrecisionWeight) else shard.detach()


def expand_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the master of a shard, fp32 in its shape, new; one that is held in fp32 as it is."""
    if remainder.dtype == torch.float32:
        return local_of(remainder)
    shard, own = local_of(param), words_of(remainder)
    rows = as_rows(own)
    if not own.numel():
        return torch.empty(own.shape, dtype=torch.float32, device=own.device)
    if not isinstance(shard, QuantizedTensor):
        return join_dense(dense_of(shard).reshape(rows.shape), rows).view(own.shape)
    value = initial_value(shard)
    # as masters.refill: the first step takes over from it
    if value is not None:
        return value.to(torch.float32, copy=True).add_(0.0)
    return join(shard.parts(), rows, shard.recipe).view(own.shape)


def first_master(param: Tensor) -> Tensor:
    """Return the master that a weight's bytes, or its preserved initial value, say, fp32, new; sharded as it is."""
    shard = local_of(param)
    if not isinstance(shard, QuantizedTensor):
        return as_sharded(dense_of(shard).to(torch.float32, copy=True), param)  # bit for bit, as masters.refill
    return as_sharded(values_of(shard, torch.float32).to(torch.float32, copy=True).add_(0.0), param)


def round_master(master: Tensor, shard: QuantizedTensor, at: Positions) -> Tensor:
    """Return a master, rounded so that its amaxes can be claimed."""
    if not master.numel():
        return master
    return rounded(as_rows(master), shard.recipe, at).view(master.shape)


def write_master(
    master: Tensor,
    shard: QuantizedTensor,
    remainder: Tensor,
    agreed: tuple[Tensor | None, CutBlocks | None],
    at: Positions,
) -> None:
    """Write a shard and its remainder from a master that `round_master` returned.

    Args:
        master: fp32, in the shape of the shard.
        shard: what is quantized.
        remainder: int16, in the same shape.
        agreed: what was agreed on for its scales, and the blocks that shards cut; see `batches.write_each`.
        at: where the rows of the shard are.
    """
    recipe = shard.recipe
    amax, blocks = decide(master, recipe, agreed[1], agreed[0])
    if amax is not None:
        amax = amax.view(kernels.amax_shape(master.shape, recipe))
    elif kernels.shares_amax(recipe):
        amax = kernels.shared_amax(master, recipe)
    if not master.numel():
        store(shard, kernels.encode(master, recipe, amax, blocks))
        return
    rows = as_rows(master)
    facts = None if blocks is None else BlockFacts(*(fact.reshape(rows.shape[0], -1) for fact in blocks))
    amax = amax.reshape(-1, 1) if amax is not None and amax.ndim else amax
    parts, left = split(rows, recipe, amax, facts, at)
    store(shard, {spec.name: parts[spec.name].view(spec.shape(master.shape)) for spec in specs_of(recipe)})
    remainder.copy_(left.view(remainder.shape))


def write_fp32(master: Tensor, shard: QuantizedTensor, agreed: tuple[Tensor | None, CutBlocks | None]) -> None:
    """Write a shard from a master that is held in fp32; see `write_master`."""
    write(shard, master, *decide(master, shard.recipe, agreed[1], agreed[0]), step=True)


def write_dense(master: Tensor, shard: Tensor, remainder: Tensor, at: Positions) -> None:
    """Write a bf16 shard and its remainder from a master, fp32 in its shape."""
    if not master.numel():
        return
    weight, left = split_dense(as_rows(master), at)
    dense_of(shard).copy_(weight.view(master.shape))
    remainder.copy_(left.view(remainder.shape))
