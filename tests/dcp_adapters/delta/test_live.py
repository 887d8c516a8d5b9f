"""Deltas of live shards: the file that one process makes, from any number of ranks; applied whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_adapters.delta import live
from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.live import HeldVersion
from dcp_adapters.delta.patches.patch_format import delta_from_bytes, delta_to_bytes
from dcp_adapters.delta.stored_states import InMemory
from dcp_adapters.records.expand import expand
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, high_precision_init_val, quantize, quantized_model_init
from tests.dcp_adapters.cases import model as model_of
from tests.dcp_adapters.cases import placed, reference, sharded
from tests.dcp_adapters.delta.states import copied, nudged
from tests.dcp_adapters.delta.test_patch import assert_same, between
from tests.ranks import run_ranks, run_ranks_catching
from tests.recipes import MAIN
from tests.sampling import sampled

NAMES = tuple(MAIN)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, inner in state.items() for key, value in inner.items()}


def whole(seed: int) -> dict[str, Any]:
    return flat(reference(seed))


def shards(seed: int) -> dict[str, Any]:
    return flat({name: sharded(model_of(name, seed)).state_dict() for name in NAMES})


def file_of_ranks(bucket: int) -> bytes | None:
    """What rank 0 has of the change between two versions."""
    live.BUCKET = bucket
    base = HeldVersion(shards(0), 4)
    first = base.since(shards(1), 5)
    assert (first is None) == (dist.get_rank() > 0)
    base.hold(shards(1), 5)
    assert base.version == 5
    nothing = base.since(shards(1), 6)
    assert nothing is None or (nothing.frames, nothing.base) == ((), nothing.result)
    return None if first is None else delta_to_bytes(first)


@sampled("ranks", [1, 2, 3, 4], [2, 3])
def test_the_file_is_the_same_on_any_number_of_ranks(ranks: int) -> None:
    expected = delta_to_bytes(between(whole(0), whole(1), versions=(4, 5)))
    first, *others = run_ranks(ranks, file_of_ranks, 2**10 if ranks == 2 else 2**26)
    assert first == expected
    assert others == [None] * (ranks - 1)


def state_on_a_mesh(seed: int) -> dict[str, Any]:
    """Rows and columns cut, replicas, tensors on all ranks alike, and shards along one dim of the mesh alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    w = {
        "mx": quantize(nudged(seed, (64, 128)), MXFP8BlockScaling()),
        "nv": quantize(nudged(seed, (64, 128)), NVFP4BlockScaling()),
    }
    return {
        "rows and columns": placed(w["mx"], mesh, Shard(0), Shard(1)),
        "columns": placed(w["nv"], mesh, Replicate(), Shard(1)),
        "codes": distribute_tensor(nudged(seed, (6, 10)).mul(1e6).int(), mesh, (Shard(1), Replicate())),
        "plain": nudged(seed, (5,)),
        "rows beside": placed(w["nv"], mesh["dp"], Shard(0)),
        "codes beside": distribute_tensor(nudged(seed, (6, 10)).mul(1e6).int(), mesh["tp"], (Shard(1),)),
        "replicated": distribute_tensor(nudged(seed, (7, 3)), mesh, (Replicate(), Replicate())),
    }


def whole_of(state: dict[str, Any]) -> dict[str, Any]:
    """The parts as whole tensors."""
    full = {}
    for key, part in expand(state).items():
        local = part
        if isinstance(part, DTensor):
            raw = part.to_local().contiguous().view(torch.uint8) if part.dtype.itemsize == 1 else part.to_local()
            like = DTensor.from_local(raw, part.device_mesh, part.placements, run_check=False)
            local = like.full_tensor().view(part.dtype)
        full[key] = local
    return full


def through_a_mesh() -> tuple[bytes | None, dict[str, bytes], dict[str, bytes]]:
    base = HeldVersion(state_on_a_mesh(0))
    made = base.since(state_on_a_mesh(1), 1)
    sent = [None if made is None else delta_to_bytes(made)]
    dist.broadcast_object_list(sent, src=0)
    assert sent[0] is not None
    target = state_on_a_mesh(0)
    delta = delta_from_bytes(sent[0])
    assert apply_deltas(target, [delta]) == 1
    assert apply_deltas(target, [delta]) == 0
    found, expected = (
        {key: part.reshape(-1).view(torch.uint8).numpy().tobytes() for key, part in whole_of(state).items()}
        for state in (target, state_on_a_mesh(1))
    )
    return sent[0], found, expected


def test_rows_columns_and_replicas() -> None:
    for _, found, expected in run_ranks(4, through_a_mesh):
        assert found == expected


def test_a_model_of_one_process_takes_what_ranks_made() -> None:
    data = run_ranks(2, file_of_ranks, 2**26)[0]
    assert data is not None
    target = whole(0)
    apply_deltas(target, [delta_from_bytes(data)])
    assert_same(target, whole(1))


def two_linears(*, cut: bool = False) -> nn.Sequential:
    with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        net = nn.Sequential(*(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    with torch.no_grad():
        for layer in net:
            layer.weight.copy_(nudged(0, (32, 64)))
    return fully_shard(net) if cut else net


def first_rows_change() -> None:
    """Of one linear, and only in the rows of the first rank, if there are several."""
    old = two_linears().state_dict()
    new = copied(old)
    new["0.weight"][:8].copy_(nudged(1, (8, 64)))
    made = between(old, new)
    net = two_linears(cut=dist.is_initialized())
    before = [param._version for param in net.parameters()]
    apply_deltas(net.state_dict(), [made])
    counted = [param._version > count for param, count in zip(net.parameters(), before, strict=True)]
    assert counted == [True, False]
    assert [high_precision_init_val(param) is None for param in net.parameters()] == [True, False]


def test_what_a_delta_changes_has_been_written() -> None:
    """torch counts a write, and an initial value that belonged to other bytes is gone: on all ranks alike."""
    first_rows_change()
    run_ranks(2, first_rows_change)


def applied_where_one_rank_differs() -> None:
    made = between(whole(0), whole(1))
    target = shards(0)
    name = next(name for name in target if name.endswith("layers.0.bias"))
    if dist.get_rank() == 1:
        target[name].to_local()[0] += 1
    before = {
        key: part.to_local().clone() if isinstance(part, DTensor) else part.clone()
        for key, part in expand(target).items()
    }
    try:
        apply_deltas(target, [made])
    finally:
        after = expand(target)
        for key, part in before.items():
            now = after[key].to_local() if isinstance(after[key], DTensor) else after[key]
            assert torch.equal(part.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8)), key


def test_a_rank_with_other_bytes_keeps_all_from_writing() -> None:
    for error in run_ranks_catching(2, applied_where_one_rank_differs):
        assert "the target has digest " in error
        assert "it is another state, or its bytes have changed" in error


def replicas_that_differ(how: str) -> None:
    old = {"w": torch.zeros(4), "norm": torch.ones(3)}
    made = between(old, {**old, "w": torch.ones(4)})
    base = HeldVersion(old)
    own = copied(old)
    if dist.get_rank() == 1:
        own["norm"][1] = 2.0
    if how == "since":
        base.since(own, 1)
    else:
        apply_deltas(own, [made])


@pytest.mark.parametrize("how", ["since", "apply"])
def test_replicas_that_differ_are_refused(how: str) -> None:
    for error in run_ranks_catching(2, replicas_that_differ, how):
        assert "norm: ranks hold 2 copies of it that differ; give all replicas the same bytes" in error


def held_on_another_mesh() -> None:
    full = nudged(0, (8, 4))
    there, back = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 0]))
    base = HeldVersion({"w": placed(full, there, Shard(0))})
    base.since({"w": placed(full, back, Shard(0))}, 1)


def test_shards_that_moved_are_refused() -> None:
    own, other = run_ranks_catching(2, held_on_another_mesh)
    assert "w: this rank's shard is (4, 4) at (4, 0), that of the held version (4, 4) at (0, 0); hold a v" in own
    assert (
        "w: this rank's shard is (4, 4) at (0, 0), that of the held version (4, 4) at (4, 0); hold a version anew"
        in other
    )


def test_live_states_that_do_not_fit_are_refused() -> None:
    state = {"w": quantize(nudged(0, (32, 64)), MXFP8BlockScaling()), "b": torch.zeros(3)}
    base = HeldVersion(state)
    with pytest.raises(ValueError, match=r"b: the held version holds float32 \[3\], the state dict float32 \[4\]"):
        base.since({**state, "b": torch.zeros(4)}, 1)
    with pytest.raises(ValueError, match="step is a int; a delta of live weights holds tensors only"):
        HeldVersion({**state, "step": 3})
    with pytest.raises(ValueError, match=r"b: on the meta device, without data|b is a"):
        HeldVersion({**state, "b": torch.zeros(3, device="meta")})


def other_tensors_on_one_rank() -> None:
    more = {"b": torch.zeros(2), "c": torch.zeros(1)} if dist.get_rank() else {"b": torch.zeros(3)}
    HeldVersion({"a": torch.zeros(3), **more})


def other_deltas_on_one_rank() -> None:
    states = [{"w": torch.full((3,), float(version))} for version in range(3)]
    deltas = [between(states[0], states[1], versions=(0, 1)), between(states[1], states[2], versions=(1, 2))]
    apply_deltas(states[1], deltas[: 1 + dist.get_rank()])  # rank 0 has nothing left to apply


def test_ranks_with_other_tensors_or_deltas_are_refused() -> None:
    told = run_ranks_catching(2, other_tensors_on_one_rank)
    assert told[0] == told[1]
    assert (
        "ValueError: the ranks do not hold the same tensors; give all ranks of the group the state dict of" in told[0]
    )
    assert "b: rank 0 holds float32 [3], rank 1 float32 [2]" in told[0]
    assert "c: rank 0 holds no such tensor, rank 1 float32 [1]" in told[0]
    told = run_ranks_catching(2, other_deltas_on_one_rank)
    assert told == ["ValueError: ranks 0 and 1 have different deltas; give all ranks of the group the same"] * 2


def test_live_weights_that_are_not_contiguous() -> None:
    module = nn.Linear(4, 6)
    old = {"w": module.weight.detach().t(), "b": module.bias.detach()}
    new = {"w": old["w"] + 1, "b": old["b"] * 2}
    base = HeldVersion(old)
    made = base.since(new, 1)
    assert made is not None
    assert delta_to_bytes(made) == delta_to_bytes(between(copied(old), new, versions=(0, 1)))
    assert apply_deltas(old, [made]) == 1
    assert torch.equal(module.weight.detach().t(), new["w"])
    assert torch.equal(InMemory(old).part("b", ""), new["b"])
