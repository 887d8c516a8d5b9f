"""Fingerprints: the same for the same run however it is cut, another one for the least difference, and in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from layerwise.resume import weight_sums
from layerwise.resume.fingerprint import Fingerprint, data_digest
from layerwise.resume.weight_sums import weights_digest
from qtensor import (
    MXFP8BlockScaling,
    MXFP8Tensor,
    NVFP4BlockScaling,
    quantize,
    quantize_,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import ROW, WITH_HISTORY


def dense() -> dict[str, Tensor]:
    """Dtypes of 1 to 8 bytes; rows that 4 ranks share evenly, unevenly, and that leave some without any."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 12, 10, generator=generator)
    return {
        "even": x[0].clone(),
        "uneven": x[0, :7].bfloat16(),
        "empty_shards": x[0, :2].double(),
        "experts": x.half(),
        "flags": x[0, 0] > 0,
        "fp8": x[0].to(torch.float8_e4m3fn),
        "complex": torch.complex(x[0], x[1]),
        "count": torch.arange(5),
        "nothing": x[0, :0].clone(),
    }


def quantized() -> dict[str, Tensor]:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    return {name: quantize(x, recipe) for name, recipe in (ROW | WITH_HISTORY).items()}


class Net(nn.Module):
    """Two linears of uneven rows, a quantized one among them, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(64, 7)
        self.quantized = nn.Linear(64, 3, bias=False)
        self.norm = nn.LayerNorm(2)
        self.register_buffer("steps", torch.tensor(3.0))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        quantize_(self, NVFP4BlockScaling(), include=("quantized",))


def net_digest(*, mesh_shape: tuple[int, ...] = ()) -> dict[str, int]:
    net = Net()
    if mesh_shape:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
        fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
        assert isinstance(net.state_dict()["first.weight"], DTensor)
    return weights_digest(net.state_dict())


def placed_digest(placement: Any) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = dense() if placement != Shard(1) else {name: x for name, x in dense().items() if x.ndim > 1}
    shards = {
        name: distribute_tensor(x.view(torch.uint8), mesh, [placement]).view(x.dtype)
        if x.element_size() == 1 and x.dtype.is_floating_point
        else distribute_tensor(x, mesh, [placement])
        for name, x in values.items()
    }
    parts = {name: distribute_tensor(q, mesh, [Shard(0)], src_data_rank=None) for name, q in quantized().items()}
    return weights_digest(shards | parts)


def test_a_digest_does_not_depend_on_the_number_of_ranks() -> None:
    whole = weights_digest(dense() | quantized())
    assert len(set(whole.values())) == len(whole)
    assert all(0 <= value < 1 << 64 for value in whole.values())
    for world_size in (1, 2, 3, 4):
        for values in run_ranks_each(world_size, (Shard(0), Shard(1), Replicate()), placed_digest):
            assert [found == {name: whole[name] for name in found} for found in values] == [True] * 3
            cut = len(whole) - sum(x.ndim < 2 for x in dense().values())  # vectors have no dim 1
            assert [len(found) for found in values] == [len(whole), cut, len(whole)]


def test_a_digest_is_that_of_the_model_under_fsdp_and_hsdp() -> None:
    whole = net_digest()
    assert {*whole} == {"first.weight", "first.bias", "quantized.weight", "norm.weight", "norm.bias", "steps"}
    for mesh_shape in ((1,), (2,), (3,), (4,), (2, 2), (1, 2)):
        assert run_ranks(math.prod(mesh_shape), net_digest, mesh_shape=mesh_shape) == [whole] * math.prod(mesh_shape)


def submesh_digest() -> dict[str, int]:
    """A weight sharded over one dim of a mesh alone: along the other it is held again, which no placement says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return weights_digest({name: distribute_tensor(x, mesh["dp"], [Shard(0)]) for name, x in dense_pair().items()})


def dense_pair() -> dict[str, Tensor]:
    return {name: dense()[name] for name in ("even", "uneven")}


def test_replicas_that_no_placement_mentions_count_once() -> None:
    assert run_ranks(4, submesh_digest) == [weights_digest(dense_pair())] * 4


def group_digest() -> dict[str, int]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return {}
    mesh = DeviceMesh.from_group(group, "cpu")
    shards = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in dense_pair().items()}
    return weights_digest(shards, group) | {"data": data_digest([dist.get_rank()], group)[0]}


def test_no_group_but_the_given_one_is_used() -> None:
    expected = weights_digest(dense_pair()) | {"data": data_digest([2, 1])[0]}
    assert run_ranks(3, group_digest) == [{}, expected, expected]


def outsider_digest() -> tuple[dict[str, int], list[int]]:
    """Rank 2 is outside of the mesh. Counts the collectives, too."""
    mesh = DeviceMesh("cpu", [0, 1])
    q = quantized()
    values = dense_pair() | {name: q[name] for name in ("mxfp8", "nvfp4")}
    shards = {name: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for name, x in values.items()}
    reduced: list[int] = []
    all_reduce, all_gather = dist.all_reduce, dist.all_gather_object
    dist.all_reduce = lambda table, **options: (reduced.append(len(table)), all_reduce(table, **options))
    dist.all_gather_object = lambda *args, **options: (reduced.append(0), all_gather(*args, **options))
    try:
        return weights_digest(shards), reduced
    finally:
        dist.all_reduce, dist.all_gather_object = all_reduce, all_gather


def test_one_all_reduce_serves_all_weights_and_ranks_outside_of_the_mesh() -> None:
    q = quantized()
    expected = weights_digest(dense_pair() | {name: q[name] for name in ("mxfp8", "nvfp4")})
    assert run_ranks(3, outsider_digest) == [(expected, [2 + 2 + 3])] * 3


def own_value_digest() -> dict[str, int]:
    return weights_digest({"steps": torch.tensor(float(dist.get_rank()))})


def test_of_a_plain_tensor_the_first_rank_counts() -> None:
    assert run_ranks(2, own_value_digest) == [weights_digest({"steps": torch.tensor(0.0)})] * 2


def partial_digest() -> None:
    mesh = init_device_mesh("cpu", (2,))
    weights_digest({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])})


def test_terms_of_a_sum_are_refused_by_name() -> None:
    errors = run_ranks_catching(2, partial_digest)
    assert all(error.startswith("ValueError: w: it is placed as (Partial(sum),): each rank") for error in errors)


def half_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))
    groups = [dist.new_group([0]), dist.new_group([1])]
    weights_digest({"w": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}, groups[dist.get_rank()])


def test_missing_pieces_are_refused() -> None:
    missing = (
        "ValueError: w: the ranks hold 4 elements of torch.float32 (4, 2), which has 8: some are missing or held "
        "unevenly; pass the group of all ranks that hold the model"
    )
    assert run_ranks_catching(2, half_a_mesh) == [missing] * 2


def bits_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def test_every_bit_counts() -> None:
    for name, x in {"bf16": dense()["uneven"][:2, :3].clone(), "fp64": dense()["empty_shards"][:1, :4].clone()}.items():
        digests, count = {weights_digest({name: x})[name]}, 8 * bits_of(x).numel()
        for bit in range(count):
            bits_of(x)[bit // 8] ^= 1 << bit % 8
            digests.add(weights_digest({name: x})[name])
            bits_of(x)[bit // 8] ^= 1 << bit % 8
        assert len(digests) == count + 1
    for q in quantized().values():
        before = weights_digest({"q": q})
        for part in q.parts().values():
            bits_of(part)[-1] ^= 1
            assert weights_digest({"q": q}) != before
            bits_of(part)[-1] ^= 1
        assert weights_digest({"q": q}) == before


def test_places_dtypes_shapes_and_recipes_count() -> None:
    x = dense()["empty_shards"]
    variants = [x, x.flip(0), x.flip(1), x.t(), x.view(-1), x.view(torch.int64), x + 0.0, -x]
    signs = x.abs()
    for places in ((0, 1), (0, 2), (3, 7), (4, 12)):  # swaps of elements that differ in their highest bits only
        y = signs.clone()
        y.view(-1)[list(places)] *= -1
        variants.append(y)
    found = [weights_digest({"w": value})["w"] for value in variants]
    assert found[0] == found[6]
    assert len(set(found)) == len(found) - 1
    zero, nan = torch.tensor([0.0, -0.0]), torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert len({weights_digest({"w": value})["w"] for value in (*zero, *nan)}) == 4
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    q = quantize(rows, MXFP8BlockScaling())
    other = MXFP8Tensor.from_parts(q.parts(), MXFP8BlockScaling(scale_rounding="floor"), q.dtype)
    assert weights_digest({"w": q}) != weights_digest({"w": other})


def test_swapped_signs_do_not_cancel() -> None:
    """A sum of weights times bits would: two odd weights times 2^63 are the same modulo 2^64."""
    x = torch.ones(64, dtype=torch.float64)
    x[5] = -1
    y = x.roll(1)
    assert weights_digest({"w": x}) != weights_digest({"w": y})


def test_a_digest_leaves_the_weights_alone_and_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = dense()
    before = {name: bits_of(x).clone() for name, x in values.items()}
    whole = weights_digest(values)
    assert all(torch.equal(bits_of(x), before[name]) for name, x in values.items())
    for chunk in (1, 7, 36):
        monkeypatch.setattr(weight_sums, "_CHUNK_CPU", chunk)
        assert weights_digest(values) == whole
    strided = torch.stack([values["even"], values["even"]], 2)[..., 0]
    assert weights_digest({"even": strided}) == {"even": whole["even"]}


def test_the_digest_is_that_of_earlier_versions() -> None:
    """Checkpoints outlive versions: these numbers are part of the format."""
    assert weights_digest({"w": torch.arange(6.0).view(2, 3)}) == {"w": GOLDEN_WEIGHT}
    assert data_digest([3, 1, 2, 2]) == (GOLDEN_DATA, 4)


GOLDEN_WEIGHT, GOLDEN_DATA = 0x44E490B608DFB807, 0xA4BA602EA82965FD


def rank_data(hashes: list[list[int]]) -> tuple[int, int]:
    return data_digest(hashes[dist.get_rank()])


def test_the_order_of_batches_and_their_ranks_do_not_matter_their_number_does() -> None:
    expected = data_digest([5, 6, 7, 7])
    assert expected[1] == 4
    assert data_digest([7, 5, 7, 6]) == expected
    assert data_digest([5, 6, 7]) != expected
    assert data_digest([5, 6, 7]) != data_digest([5, 6, 6, 7])
    assert data_digest([5, 6, 6, 7])[0] != expected[0]
    for hashes in ([[7, 6], [5, 7]], [[7], [7, 5, 6]], [[], [5, 6, 7, 7]]):
        assert run_ranks(2, rank_data, hashes) == [expected] * 2


def fingerprint(**changes: Any) -> Fingerprint:
    run: dict[str, Any] = {
        "weights": {"model.layers.3.mlp.up_proj.weight": 1, "b": (1 << 64) - 1, "c": 3},
        "data": 17,
        "batches": 8,
        "recipe": {"type": "NVFP4BlockScaling", "blocks": "row"},
        "algorithm": {"type": "GPTQ", "damp": 0.01},
        "options": {"layers": ["a", "b"], "include": ("a.x", "b.x"), "inputs": "dynamic"},
        "threads": 2,
        "versions": {"torch": "2.13.0", "qtensor": "0.1.0"},
    }
    return Fingerprint(**(run | changes))


def test_a_fingerprint_survives_json() -> None:
    there = Fingerprint.from_json(fingerprint().to_json())
    assert there.to_json() == fingerprint().to_json()
    assert there.weights == fingerprint().weights
    assert there.differences(fingerprint()) == there.remarks(fingerprint()) == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        there.data = 3


UP = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": {UP: 2, "b": 4, "c": 5}}, [f"other weights: {UP} and 2 more differ"]),
        ({"weights": {UP: 2, "b": (1 << 64) - 1, "c": 3}}, [f"other weights: {UP} differs"]),
        (
            {"weights": {UP: 1, "d": 1, "e": 1}},
            ["other weights: b and 1 more are missing now", "other weights: d and 1 more are new"],
        ),
        ({"data": 18}, ["other data: as many batches (8), but not the same ones"]),
        ({"batches": 9, "data": 5}, ["other data: 8 batches, now 9"]),
        (
            {"recipe": {"type": "NVFP4BlockScaling", "blocks": "square"}},
            ['another recipe: blocks was "row", now "square"'],
        ),
        (
            {"algorithm": {"type": "AWQ", "search": "full"}},
            ['another algorithm: type was "GPTQ", now "AWQ"'],
        ),
        (
            {"algorithm": {"type": "GPTQ", "search": "full"}},
            ['another algorithm: damp was 0.01, now there is none, search is "full", there was none'],
        ),
        (
            {"options": {"layers": ["b", "a"], "include": ["a.x", "c.x", "d.x"], "inputs": "static"}},
            [
                (
                    'other options: layers now in another order or number, include now without "b.x", with "c.x" and 1 '
                    'more, inputs was "dynamic", now "static"'
                )
            ],
        ),
    ],
)
def test_differences_are_told_in_words(changes: dict[str, Any], words: list[str]) -> None:
    assert fingerprint().differences(fingerprint(**changes)) == words


def test_threads_and_versions_are_told_but_are_no_difference() -> None:
    now = fingerprint(threads=4, versions={"torch": "2.14.0", "qtensor": "0.1.0"})
    assert fingerprint().differences(now) == []
    assert fingerprint().remarks(now) == [
        (
            "it was calibrated with 2 threads, now there are 4: statistics may differ in their last bits from those of "
            "an uninterrupted run (torch.set_num_threads, OMP_NUM_THREADS)"
        ),
        "it was calibrated with torch 2.13.0, now it is 2.14.0",
    ]
    here = Fingerprint(weights={}, data=0, batches=0, recipe={}, algorithm={})
    assert here.threads == torch.get_num_threads()
    assert here.versions["torch"] == torch.__version__
