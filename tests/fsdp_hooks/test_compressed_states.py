"""Compressed states under FSDP2, HSDP and tensor parallelism: the bytes, remainders and moments of one process."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init, share_scales
from qtensor.optim import inner_step
from tests.fsdp_hooks.cases import RECIPES, Collectives, Net, assert_same_bytes, build, exchanged, local, mesh_of, shard
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled

ROWS = (96, 33, 3)  # even, uneven and, from 4 ranks on, empty shards
SQUARE = (96, 160)  # on 2 to 4 ranks some shards cut blocks of 32
SMALL: dict[str, Any] = {"masters": "remainder", "moments": "float8"}
STORAGES = ("quantized", "high_precision")
CASES = [
    ("mxfp8", "quantized"),
    ("mxfp8_square", "quantized"),
    ("nvfp4", "quantized"),
    ("float8_tensor", "quantized"),
    ("float8_row", "quantized"),
    ("nvfp4", "high_precision"),
    (None, "quantized"),
]
STEPS = 3


def built(name: str | None, storage: str) -> Net:
    rows = SQUARE if name is not None and name.endswith("_square") else ROWS
    if name is None:
        torch.manual_seed(0)
        return Net(rows, head=rows[0])
    model = build(RECIPES[name], rows, storage=storage)
    if rows == SQUARE:
        # the last rows of a block decide its scale, also where others are on another rank
        with torch.no_grad():
            for param in model.parameters():
                if isinstance(param, QuantizedTensor):
                    factors = torch.exp2(torch.arange(param.shape[0]) % 32 // 8 * 2)
                    param.copy_(param.dequantize() * factors.unsqueeze(-1))
    return model


def optimizer_of(model: nn.Module, **options: Any) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), **(SMALL | {"lr": 0.01} | options))


def gradients(model: nn.Module, step: int) -> None:
    """The same whole gradients on every mesh."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def train(model: nn.Module, optimizer: Any, steps: range = range(STEPS)) -> None:
    for step in steps:
        gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: MasterWeightOptimizer) -> dict[str, Tensor]:
    """What this rank holds, of weights and states, by name; bytes, with the number of rows first."""
    found: dict[str, Tensor] = {}
    for fqn, param in model.named_parameters():
        held = {"": param, **optimizer.state[param]}
        for name, value in held.items():
            own = local(value.detach())
            own = getattr(own, "dense", own)
            parts = own.parts() if isinstance(own, QuantizedTensor) else {"": own}
            for part, each in parts.items():
                rows = each.detach().contiguous()
                flat = rows.view(torch.uint8) if rows.ndim else rows.reshape(1).view(torch.uint8)
                found[f"{fqn}|{name}|{part}|{rows.ndim}"] = flat.clone()
    return found


def whole(model: nn.Module, optimizer: MasterWeightOptimizer) -> dict[str, Tensor]:
    """The same of the whole tensors, cut along rows."""
    every = exchanged(tensors_of(model, optimizer))
    found = {}
    for name, own in every[0].items():
        pieces = [rank[name] for rank in every]
        alike = name.endswith("|0")
        found[name] = own if alike else torch.cat([piece for piece in pieces if piece.numel()])
        if alike:
            assert all(torch.equal(piece, own) for piece in pieces), name
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        assert_same_bytes(found[name], value, f"{what}: {name}")


def equals_one_process(case: tuple[str | None, str], options: dict[str, Any]) -> None:
    name, storage = case
    reference = built(name, storage)
    its = optimizer_of(reference, **options)
    model = shard(built(name, storage))
    optimizer = optimizer_of(model, **options)
    for step in range(STEPS):
        train(reference, its, range(step, step + 1))
        train(model, optimizer, range(step, step + 1))
        assert_same(whole(model, optimizer), tensors_of(reference, its), f"{case}, step {step}")
    assert its.state[next(iter(reference.parameters()))]["master_remainder"].any()


@sampled("ranks", [1, 2, 3, 4], [4])
def test_every_number_of_ranks_holds_what_one_process_holds(ranks: int) -> None:
    run_ranks_each(ranks, CASES, equals_one_process, {})


@pytest.mark.parametrize("options", [{"moments": "bfloat16"}, {"rounding": "nearest"}], ids=str)
def test_so_do_moments_in_bf16_and_what_is_rounded_to_the_nearest(options: dict[str, Any]) -> None:
    run_ranks_each(3, [("nvfp4", "quantized"), ("mxfp8_square", "quantized")], equals_one_process, options)


def equals_itself_in_chunks(case: tuple[str | None, str]) -> None:
    """Of chunks of one weight each, so that those that share scales step twice."""
    found = []
    for elements in (2**30, 100):
        with patch.dict(inner_step.CHUNK, {"cpu": elements}):
            model = shard(built(*case))
            optimizer = optimizer_of(model)
            train(model, optimizer)
            found.append(whole(model, optimizer))
    assert_same(found[1], found[0], str(case))


def test_shards_of_more_than_one_chunk_get_the_bytes_of_one() -> None:
    run_ranks_each(2, [CASES[2]], equals_itself_in_chunks)


def replicas_equal_one_process(name: str) -> None:
    reference = built(name, "quantized")
    its = optimizer_of(reference)
    model = shard(built(name, "quantized"), mesh=mesh_of(2, 2))
    optimizer = optimizer_of(model, check_replicas=True)
    train(reference, its)
    train(model, optimizer)
    every = exchanged(tensors_of(model, optimizer))
    for key, value in tensors_of(reference, its).items():
        for pair in (every[:2], every[2:]):
            own = pair[0][key] if key.endswith("|0") else torch.cat([one[key] for one in pair if one[key].numel()])
            assert_same_bytes(own, value, key)


def test_replicas_hold_what_one_process_holds() -> None:
    run_ranks_each(4, ["nvfp4", "mxfp8_square"], replicas_equal_one_process)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)


def cut_both_ways(name: str | None) -> None:
    """Colwise and rowwise under FSDP: rows of shards are cut twice, and others along K."""
    torch.manual_seed(0)
    if name is None:
        reference = MLP()
    else:
        with quantized_model_init(RECIPES[name]):
            reference = MLP()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    its, optimizer = optimizer_of(reference), optimizer_of(model)
    train(reference, its)
    train(model, optimizer)
    for fqn, param in model.named_parameters():
        full = reference.get_parameter(fqn)
        for entry in ("master_remainder", "exp_avg", "exp_avg_sq_root"):
            found, expected = optimizer.state[param][entry], its.state[full][entry]
            if entry != "master_remainder":
                found = DTensor.from_local(
                    local(found).dequantize(torch.float32), param.device_mesh, param.placements, run_check=False,
                    shape=param.shape, stride=(param.shape[1], 1),
                )  # fmt: skip
                expected = expected.dequantize(torch.float32)
            assert_same_bytes(found.full_tensor(), expected, f"{fqn}: {entry}")
        own = local(param.detach())
        if isinstance(own, QuantizedTensor):
            values = DTensor.from_local(
                own.dequantize(), param.device_mesh, param.placements, run_check=False, shape=param.shape,
                stride=(param.shape[1], 1),
            )  # fmt: skip
            assert torch.equal(values.full_tensor(), full.detach().dequantize()), fqn
        else:
            assert torch.equal(param.detach().full_tensor(), full.detach()), fqn


def test_tensor_parallel_shards_hold_what_one_process_holds() -> None:
    run_ranks_each(4, ["mxfp8", "nvfp4", "float8_tensor", None], cut_both_ways)


def cut_inside_of_blocks() -> None:
    model = nn.Linear(96, 8, bias=False, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, RowwiseParallel(), src_data_rank=None)
    optimizer_of(model, moments="bfloat16")
    optimizer_of(model)


def test_rows_that_are_cut_inside_of_blocks_of_moments_are_refused() -> None:
    for message in run_ranks_catching(2, cut_inside_of_blocks):
        assert message.startswith("ValueError"), message
        assert "weight is cut along its rows of 96 into 48, no multiple of 32" in message


def share(name: str) -> None:
    """Two weights of one scale, one of which has no gradient in the second step."""
    found = []
    for cut in (False, True):
        model = build(RECIPES[name], (96, 32))
        share_scales(model, [("blocks.0.linear", "blocks.1.linear")])
        if cut:
            shard(model)
        optimizer = optimizer_of(model)
        for step in range(3):
            gradients(model, step)
            if step == 1:
                model.blocks[1].linear.weight.grad = None
            optimizer.step()
        found.append(whole(model, optimizer) if cut else tensors_of(model, optimizer))
    assert_same(found[1], found[0], name)


def test_weights_that_share_a_scale_hold_what_one_process_holds() -> None:
    run_ranks_each(3, ["nvfp4", "float8_tensor"], share)


def counted(name: str, options: dict[str, Any]) -> list[Any]:
    model = shard(built(name, "quantized"))
    optimizer = optimizer_of(model, **options)
    found = []
    for step in range(2):
        gradients(model, step)
        with Collectives() as comms:
            optimizer.step()
        found.append(dict(comms.counts))
    return found


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_step_takes_the_collectives_of_one_with_states_in_fp32(name: str) -> None:
    plain: dict[str, Any] = {"masters": "fp32", "moments": "fp32"}
    small, wide = (run_ranks(2, counted, name, own) for own in ({}, plain))
    assert small == wide
    assert small[0][1] == {"allreduce_": 1}


def fails_on_one_rank() -> None:
    model = shard(built("nvfp4", "quantized"))
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    before = {key: value for key, value in tensors_of(model, optimizer).items() if "step" not in key}

    def fails(*_: Any) -> None:
        raise FloatingPointError("no such step")

    if dist.get_rank() == 1:
        assert optimizer._inner is not None
        optimizer._inner.register_step_pre_hook(fails)
    try:
        train(model, optimizer, range(1, 2))
    finally:
        now = tensors_of(model, optimizer)
        own = {key for key in before if ".weight|" in key and "norm" not in key}
        assert all(torch.equal(now[key], before[key]) for key in own)


def test_a_rank_that_fails_tells_the_others_and_nothing_quantized_is_written() -> None:
    found = run_ranks_catching(3, fails_on_one_rank)
    assert found[1] == "FloatingPointError: no such step"
    for message in (found[0], found[2]):
        assert message.startswith("RanksDifferError: MasterWeightOptimizer.step: rank 1 failed"), message


def written_where_others_moved() -> None:
    model = shard(built("mxfp8", "quantized"))
    for param in model.parameters():
        own = local(param.detach())
        if isinstance(own, QuantizedTensor):
            own.payload.view(torch.uint8).fill_(0x30)  # 0.5: another scale would hold these
    optimizer = optimizer_of(model)
    gradients(model, 0)
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    optimizer.step()
    for name, param in model.named_parameters():
        own = local(param.detach())
        if isinstance(own, QuantizedTensor) and own.numel() and dist.get_rank() == 1:
            # a shard that did not step has its values under the scale that they ask for
            for part, value in quantize(own.dequantize(torch.float32), own.recipe).parts().items():
                assert_same_bytes(own.parts()[part], value, f"{name}.{part} on rank {dist.get_rank()}")


def test_a_shard_that_no_step_has_written_is_written_where_others_moved() -> None:
    run_ranks(2, written_where_others_moved)


def steps_with_gradients_placed_otherwise() -> None:
    """They are brought to their weights' places, as the step begins, also where a shard is empty."""
    models = [shard(built("mxfp8", "quantized")) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    for step in range(2):
        for model in models:
            gradients(model, step)
        for param in models[1].parameters():
            assert isinstance(param.grad, DTensor)
            grad = param.grad.full_tensor()
            placed = [Replicate()] * param.device_mesh.ndim
            param.grad = DTensor.from_local(grad, param.device_mesh, placed, run_check=False)
        for optimizer in optimizers:
            optimizer.step()
    found, expected = (tensors_of(*pair) for pair in zip(models[::-1], optimizers[::-1], strict=True))
    assert_same(found, expected, "gradients that are replicated")


def test_gradients_may_be_placed_otherwise() -> None:
    run_ranks(2, steps_with_gradients_placed_otherwise)
