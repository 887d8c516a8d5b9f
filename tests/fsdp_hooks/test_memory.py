"""A sharded quantized weight costs its payload bytes: at rest, on the wire, and nothing more after reshard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_hooks import unsharded
from qtensor import QuantizedTensor
from qtensor.spec.registry import specs_of
from tests.fsdp_hooks.cases import (
    RECIPES,
    Collectives,
    Net,
    batch,
    build,
    held,
    held_since,
    local,
    mesh_of,
    quantized,
    rows_for,
    shard,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import sampled

FORMATS = ("float8_tensor", "mxfp8", "nvfp4_square")  # one recipe a format


def _payload_bytes(q: QuantizedTensor, rows: int) -> int:
    """Bytes of the parts of `rows` rows."""
    shape = (rows, *q.shape[1:])
    total = 0
    for spec in specs_of(q.recipe):
        total += torch.Size(spec.shape(shape)).numel() * spec.dtype.itemsize
    return total


def _padded_rows(param: Any) -> int:
    return -(-param.shape[0] // dist.get_world_size())


def _expected(net: nn.Module) -> int:
    """Payload bytes of every shard with its padding rows, dense shards with theirs, and the buffers."""
    total = sum(buffer.nbytes for buffer in net.buffers())
    for param in net.parameters():
        shard_ = local(param)
        if isinstance(shard_, QuantizedTensor):
            total += _payload_bytes(shard_, _padded_rows(param))
        else:
            total += _padded_rows(param) * (param.numel() // param.shape[0]) * param.element_size()
    return total


def _sharded(name: str, **options: Any) -> Net:
    return shard(build(RECIPES[name], rows_for(name)), **options)


def _costs_its_payload_at_rest(name: str, *, offload: bool) -> None:
    mesh = mesh_of(dist.get_world_size())  # holds the numbers of its ranks
    before = held()
    net = _sharded(name, mesh=mesh, **({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}))
    expected = _expected(net)
    assert (found := held_since(before, expected)) == expected, ("sharded", found, expected)
    for step in range(2):
        net(batch(step)).float().square().mean().backward()
        net.zero_grad()
        assert (found := held_since(before, expected)) == expected, (f"after step {step}", found, expected)
    with unsharded(net):
        assert dist.get_world_size() == 1 or held() - before > expected
    assert (found := held_since(before, expected)) == expected, ("after unsharded()", found, expected)
    for assign in (False, True):
        state = {key: value.clone() for key, value in net.state_dict().items()}
        net.load_state_dict(state, assign=assign)
        del state
        net(batch(0))
        net.reshard()
        assert (found := held_since(before, expected)) == expected, (
            f"after load_state_dict(assign={assign})",
            found,
            expected,
        )


@sampled("world_size", [1, 2, 3, 4], [3])
def test_a_shard_costs_its_payload_bytes_at_rest(world_size: int) -> None:
    run_ranks_each(world_size, FORMATS, _costs_its_payload_at_rest, offload=False)
    run_ranks(world_size, _costs_its_payload_at_rest, "nvfp4", offload=True)


def _frees_what_it_gathered(name: str) -> None:
    net = _sharded(name)
    for _ in range(2):  # the first gather allocates, later ones refill
        with unsharded(net):
            parts = [
                (f"{fqn}.{part}", tensor)
                for fqn, param in net.named_parameters()
                for part, tensor in (param.parts() if isinstance(param, QuantizedTensor) else {"": param.data}).items()
            ]
            assert all(tensor.untyped_storage().nbytes() >= tensor.nbytes for _, tensor in parts)
        left = {fqn: tensor.untyped_storage().nbytes() for fqn, tensor in parts if tensor.untyped_storage().nbytes()}
        assert not left, f"still allocated after reshard: {left}"


@sampled("world_size", [1, 2, 4], [2])
def test_nothing_of_a_gathered_weight_stays_allocated_after_reshard(world_size: int) -> None:
    run_ranks_each(world_size, FORMATS, _frees_what_it_gathered)


def _assert_inputs_alias(net: nn.Module, what: str) -> None:
    for fqn, param, q in quantized(net):
        inputs, rows = q.fsdp_pre_all_gather(param.device_mesh)
        assert rows == _padded_rows(param), (what, fqn, rows)
        assert all(given.dtype == torch.uint8 and given.is_contiguous() for given in inputs)
        given, expected = sum(given.nbytes for given in inputs), _payload_bytes(q, rows)
        assert given == expected, (what, fqn, given, expected)
        for part, given in zip(q.parts().values(), inputs, strict=True):
            assert given.untyped_storage().data_ptr() == part.untyped_storage().data_ptr(), f"{what}: {fqn} was copied"


def _gathers_its_payload(name: str) -> None:
    net = _sharded(name)
    _assert_inputs_alias(net, "sharded")
    net(batch(0)).float().sum().backward()
    _assert_inputs_alias(net, "after a step")
    net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
    net(batch(0))
    net.reshard()
    _assert_inputs_alias(net, "after load_state_dict(assign=True)")
    for module in [*net.blocks, net]:
        expected = 0
        for fqn, param in module.named_parameters():
            if fqn.startswith("blocks"):
                continue  # not the root's own
            q = local(param)
            dense = _padded_rows(param) * (param.numel() // param.shape[0]) * param.element_size()
            expected += _payload_bytes(q, _padded_rows(param)) if isinstance(q, QuantizedTensor) else dense
        with Collectives() as comms:
            module.unshard()
        module.reshard()
        assert comms.given == [expected] * (dist.get_world_size() > 1), (name, comms.given, expected)


@sampled("world_size", [1, 2, 3, 4], [1, 3])
def test_an_all_gather_is_given_the_payload_bytes_and_no_copies(world_size: int) -> None:
    run_ranks_each(world_size, RECIPES, _gathers_its_payload)
