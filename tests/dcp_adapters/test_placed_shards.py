"""Shards that say themselves where they lie: PlacedShard, torch's CheckpointableTensor, uneven DTensors.

Whole tensors are functions of a seed, so each rank knows the bytes of every piece. Pieces are cut from one whole tensor
and saved by some ranks, then loaded by others under other cuts, and into FSDP2 and TP placements, and back.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import PlacedShard, QuantizedSavePlanner, QuantizedStager, expand, export_hf, tensor_digests
from dcp_adapters.delta.shards import Shards
from dcp_adapters.records.expand import quantized_local
from fsdp_hooks.torch_private import dtensor_around
from qtensor import quantize
from qtensor.spec.registry import block_multiple
from tests.dcp_adapters.cases import EVERY, K, alone, arbitrary, assert_holds, bits, load, placed, save, values
from tests.ranks import run_ranks

ROWS = 96
Box = tuple[tuple[int, int], tuple[int, int]]  # offsets, sizes
# one box for each rank; square blocks, and rows that share a scale, are cut in their middle
CUTS: dict[str, list[Box]] = {
    "one": [((0, 0), (ROWS, K))],
    "two": [((0, 0), (37, K)), ((37, 0), (ROWS - 37, K))],
    "three, one empty": [((50, 0), (ROWS - 50, K)), ((0, 0), (0, K)), ((0, 0), (50, K))],
    "grid": [((0, 0), (41, K)), ((41, 0), (ROWS - 41, 32)), ((41, 32), (ROWS - 41, 32))],
}
FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def whole(seed: int) -> dict[str, Any]:
    """Every recipe in arbitrary bytes, and dense tensors."""
    quantized = {name: arbitrary((ROWS, K), recipe, seed + i) for i, (name, recipe) in enumerate(EVERY.items())}
    return {**quantized, "dense": values((ROWS, K), seed + 50), "fp32": values((ROWS, K), seed + 51, torch.float32)}


def can_cut(value: Tensor, box: Box) -> bool:
    q = quantized_local(value)
    return q is None or box[1][1] == K or not box[1][1] % block_multiple(q.recipe)


def cut(value: Tensor, box: Box) -> Tensor:
    (row, column), (rows, columns) = box
    return value.narrow(0, row, rows).narrow(1, column, columns).clone()


def by_hand(cuts: Sequence[Box], seed: int) -> dict[str, Any]:
    """This rank's pieces."""
    box = cuts[dist.get_rank()]
    tensors = {name: value for name, value in whole(seed).items() if all(can_cut(value, one) for one in cuts)}
    return {"model": {name: PlacedShard(cut(value, box), (ROWS, K), box[0]) for name, value in tensors.items()}}


def sharded(dim: int, seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = K // dist.get_world_size()
    tensors = {n: v for n, v in whole(seed).items() if dim == 0 or can_cut(v, ((0, 0), (ROWS, size)))}
    return {"model": {name: placed(value, mesh, Shard(dim)) for name, value in tensors.items()}}


def equal(one: Tensor, other: Tensor) -> bool:
    q, p = quantized_local(one), quantized_local(other)
    if q is None or p is None:
        return q is p and one.dtype == other.dtype and bits(one) == bits(other)
    return q.recipe == p.recipe and all(bits(part) == bits(p.parts()[name]) for name, part in q.parts().items())


def save_by_hand(path: Path, cuts: Sequence[Box], options: dict[str, Any]) -> None:
    state = by_hand(cuts, 0)
    before = dict(state["model"])
    save(state, path, **options)
    assert all(state["model"][name] is shard for name, shard in before.items())


def there(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has of a state: some cuts are between the blocks of some recipes only."""
    names = {key.split(".")[1] for key in stored(path)}
    assert len(names) > len(EVERY) // 2
    return {"model": {name: value for name, value in state["model"].items() if name in names}}


def load_by_hand(path: Path, cuts: Sequence[Box]) -> None:
    state, box = there(path, by_hand(cuts, 7)), cuts[dist.get_rank()]
    shards = dict(state["model"])
    load(state, path, allow_partial_load=True, verify_checksums=True)
    expected = whole(0)
    for name, shard in shards.items():
        assert state["model"][name] is shard, name  # DCP's planner puts None in the place of what it does not know
        assert equal(shard.local, cut(expected[name], box)), name


def load_sharded(path: Path, dim: int) -> None:
    state = there(path, sharded(dim, 7))
    load(state, path, allow_partial_load=True)
    assert_holds(state["model"], {name: value for name, value in whole(0).items() if name in state["model"]})


def save_sharded(path: Path, dim: int) -> None:
    save(sharded(dim, 0), path)


@pytest.mark.parametrize(
    "options", [{}, {"digest": True, "enable_plan_caching": True}], ids=["plain", "digests and cached plans"]
)
def test_pieces_go_from_any_cut_to_any_other_and_into_fsdp2_and_tp(shared_tmp_path: Path, options: Any) -> None:
    for source in ("two", "grid") if options else CUTS:
        path = shared_tmp_path / source
        run_ranks(len(CUTS[source]), save_by_hand, path, CUTS[source], options)
        targets = [cuts for name, cuts in CUTS.items() if name != source]
        for cuts in targets[-1:] if options else targets:
            run_ranks(len(cuts), load_by_hand, path, cuts)
        run_ranks(2, load_sharded, path, 0)
        if source == "two":
            run_ranks(2, load_sharded, path, 1)


def test_dtensors_are_loaded_into_pieces(shared_tmp_path: Path) -> None:
    for dim in (0, 1):
        run_ranks(2, save_sharded, shared_tmp_path / str(dim), dim)
        for name in ("one", "three, one empty", "grid"):
            run_ranks(len(CUTS[name]), load_by_hand, shared_tmp_path / str(dim), CUTS[name])


def stored(path: Path) -> dict[str, tuple[Any, Any]]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {
        name: (entry.properties.dtype, entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model")
    }


def test_the_checkpoint_is_that_of_dtensors(shared_tmp_path: Path) -> None:
    run_ranks(2, save_by_hand, shared_tmp_path / "hand", CUTS["two"], {"digest": True})
    run_ranks(2, save_digested, shared_tmp_path / "mesh")
    assert stored(shared_tmp_path / "hand") == stored(shared_tmp_path / "mesh")
    own, other = (tensor_digests(shared_tmp_path / name) for name in ("hand", "mesh"))
    assert own == other


def save_digested(path: Path) -> None:
    save(sharded(0, 0), path, digest=True)


# -- in the background -------------------------------------------------------------------------------------------------


def staged(path: Path, stager: str) -> None:
    cuts = CUTS["two"]
    state, group = by_hand(cuts, 0), dist.new_group(backend="gloo")
    kwargs = {"async_stager": QuantizedStager()} if stager == "ours" else {}
    future = dcp.async_save(state, checkpoint_id=path, planner=QuantizedSavePlanner(), process_group=group, **kwargs)
    future = getattr(future, "upload_completion", future)
    if stager == "ours":  # its snapshot is complete when the call returns
        for shard in state["model"].values():
            for part in expand({"w": shard.local}).values():
                part.zero_()
    future.result()


def test_snapshots_keep_the_place(shared_tmp_path: Path) -> None:
    run_ranks(2, staged, shared_tmp_path, "ours")
    run_ranks(len(CUTS["grid"]), load_by_hand, shared_tmp_path, CUTS["grid"])


def test_records_travel_to_other_processes() -> None:
    shard = PlacedShard(quantize(values((8, K), 0), EVERY["mxfp8"]), (16, K), (8, 0))
    for other in (pickle.loads(pickle.dumps(shard)), copy.deepcopy(shard)):
        assert (other.global_shape, other.offsets) == ((16, K), (8, 0))
        assert equal(other.local, shard.local)


def without_dims(path: Path) -> None:
    """A counter beside pieces: every rank has it."""
    rank = dist.get_rank()
    state = {
        "steps": PlacedShard(torch.tensor(3.0), (), ()),
        "v": PlacedShard(torch.full((4,), rank), (8,), (4 * rank,)),
    }
    save(state, path)
    found = {"steps": PlacedShard(torch.tensor(0.0), (), ()), "v": torch.zeros(8, dtype=torch.int64)}
    load(found, path, verify_checksums=True)
    assert found["steps"].local.item() == 3.0
    assert found["v"].tolist() == [0] * 4 + [1] * 4


def test_tensors_without_dims_and_vectors_are_placed_too(shared_tmp_path: Path) -> None:
    run_ranks(2, without_dims, shared_tmp_path)


# -- torch's protocol: CheckpointableTensor ----------------------------------------------------------------------------


def describe(tensor: Tensor, shape: Any, pieces: Sequence[tuple[Any, Any, Any]]) -> Tensor:
    """Give a tensor the four attributes of torch's protocol, which exist as a class from torch 2.15 on."""
    told: Any = tensor
    told.global_shape = tuple(shape)
    told.global_offsets, told.local_offsets, told.local_sizes = (tuple(one) for one in zip(*pieces, strict=True))
    return tensor


# rank -> pieces: global offsets, local offsets, sizes; rank 0 has rows of two places, and padding between them
SCATTERED = [
    [((0, 0), (0, 0), (16, K)), ((64, 0), (20, 0), (32, K))],
    [((16, 0), (0, 0), (48, K))],
]


def scattered(seed: int) -> dict[str, Any]:
    state = {}
    for name, value in whole(seed).items():
        pieces = SCATTERED[dist.get_rank()]
        rows = max(local[0] + size[0] for _, local, size in pieces)
        local = value.narrow(0, 0, rows).clone()
        for (at, _), (own, _), (count, _) in pieces:
            for mine, full in zip(parts_of(local), parts_of(value), strict=True):
                if mine.ndim == value.ndim:
                    mine.narrow(0, own, count).copy_(full.narrow(0, at, count))
        state[name] = describe(local, (ROWS, K), pieces)
    return {"model": state}


def parts_of(value: Tensor) -> list[Tensor]:
    q = quantized_local(value)
    return [value] if q is None else list(q.parts().values())


def save_scattered(path: Path) -> None:
    save(scattered(0), path)


def load_scattered(path: Path) -> None:
    state = scattered(7)
    before = {name: value.clone() for name, value in state["model"].items()}
    load(state, path)
    expected = scattered(0)["model"]
    for name, value in state["model"].items():
        rows = [row for _, (own, _), (count, _) in SCATTERED[dist.get_rank()] for row in range(own, own + count)]
        rest = [row for row in range(value.shape[0]) if row not in rows]
        for mine, want, old in zip(parts_of(value), parts_of(expected[name]), parts_of(before[name]), strict=True):
            if mine.ndim != value.ndim:
                assert bits(mine) == bits(want), name
                continue
            assert bits(mine[rows]) == bits(want[rows]), name
            assert bits(mine[rest]) == bits(old[rest]), name  # padding is nobody's


def test_tensors_of_several_pieces_go_both_ways(shared_tmp_path: Path) -> None:
    run_ranks(2, save_scattered, shared_tmp_path / "scattered")
    run_ranks(3, load_by_hand, shared_tmp_path / "scattered", CUTS["grid"])
    run_ranks(2, load_sharded, shared_tmp_path / "scattered", 0)
    run_ranks(2, save_sharded, shared_tmp_path / "mesh", 0)
    run_ranks(2, load_scattered, shared_tmp_path / "mesh")


def staged_protocol(path: Path) -> None:
    state = scattered(0)
    snapshot = QuantizedStager().stage(state)
    for value in state["model"].values():
        for part in parts_of(value):
            part.zero_()
    save(snapshot, path)


def test_snapshots_of_such_tensors_keep_their_places(shared_tmp_path: Path) -> None:
    run_ranks(2, staged_protocol, shared_tmp_path)
    run_ranks(1, load_by_hand, shared_tmp_path, CUTS["one"])


# -- what is refused ---------------------------------------------------------------------------------------------------


def mx(rows: int, seed: int = 0) -> Any:
    return quantize(values((rows, K), seed), EVERY["mxfp8"])


Bad = tuple[Callable[[int], Any], str]
BAD_SAVES: dict[str, Bad] = {
    "a gap": (
        lambda r: PlacedShard(mx(8), (24, K), (12 * r, 0)),
        (
            r"w.payload: of \(24, 64\), no chunk holds the "
            r"elements from \(8, 0\) on"
        ),
    ),
    "an overlap": (
        lambda r: PlacedShard(mx(8), (12, K), (4 * r, 0)),
        (
            r"w.payload: of \(12, 64\), 2 chunks hold the "
            r"elements from \(4, 0\) on"
        ),
    ),
    "an overlap from one place": (
        lambda r: PlacedShard(torch.ones(4 + 4 * r, K), (8, K), (0, 0)),
        (
            r"w: of \(8, 64\), "
            r"2 chunks hold the elements from \(0, 0\) on"
        ),
    ),
    "none has a row": (lambda r: PlacedShard(mx(0), (8, K), (0, 0)), "w.payload: .*no chunk holds the elements from"),
    "other shapes": (
        lambda r: PlacedShard(torch.ones(4, K), (8 + 8 * r, K), (4 * r, 0)),
        (
            r"w: rank 1 has a piece of "
            r"\(16, 64\), torch.float32, rank 0 one of \(8, 64\), torch.float32"
        ),
    ),
    "other dtypes": (
        lambda r: PlacedShard(torch.ones(4, K, dtype=[torch.float32, torch.float64][r]), (8, K), (4 * r, 0)),
        "w: rank 1 has a piece of .*float64, rank 0 one of .*float32",
    ),
    "one rank forgot": (
        lambda r: PlacedShard(torch.ones(4, K), (8, K), (0, 0)) if r == 0 else torch.ones(4, K),
        r"w: rank 1 has a piece of \(4, 64\)",
    ),
    "other scales": (
        lambda r: PlacedShard(quantize(values((8, K), r), EVERY["nvfp4"]), (16, K), (8 * r, 0)),
        "w.global_scale: rank 0 holds .* cut pieces that are placed by hand",
    ),
    "a split block": (
        lambda r: PlacedShard(mx(8), (8, 2 * K), (0, 16 + 48 * r)),
        "w: a shard of .*column cuts must fall on multiples of 32",
    ),
    "rows of other heights share scales": (
        lambda r: PlacedShard(quantize(torch.ones([8, 4][r], 32), EVERY["float8_row"]), (8, K), (0, 32 * r)),
        "w.payload: of .*no chunk holds",
    ),
    "hidden in a tuple": (lambda r: (PlacedShard(mx(8), (16, K), (8 * r, 0)),), "w: a tuple holds a PlacedShard"),
    "of other counts": (
        lambda r: describe_badly(mx(8)),
        "w: it describes its pieces by 2 global_offsets, 1 local_offsets, 1 local_sizes",
    ),
    "outside": (
        lambda r: describe(torch.ones(8, K), (16, K), [((12, 0), (0, 0), (8, K))]),
        (
            "w: it describes a piece "
            r"of \(8, 64\) at \(0, 0\) of its local tensor, \(8, 64\), and at \(12, 0\) of \(16, 64\)"
        ),
    ),
    "chunks of its own": (lambda r: with_chunks(mx(8)), "w: a quantized tensor that tells DCP of chunks of its own"),
    "twice in memory": (
        lambda r: describe(torch.ones(8, K), (16, K), [((0, 0), (0, 0), (8, K)), ((8, 0), (4, 0), (4, K))]),
        "w: two pieces have the same elements of the local tensor",
    ),
}


def with_chunks(tensor: Tensor) -> Tensor:
    told: Any = tensor
    told.__create_chunk_list__ = list
    return tensor


def describe_badly(tensor: Tensor) -> Tensor:
    told: Any = describe(tensor, (16, K), [((0, 0), (0, 0), (8, K))])
    told.global_offsets = ((0, 0), (8, 0))
    return tensor


def refused_saves(path: Path, names: Sequence[str]) -> None:
    for name in names:
        make, text = BAD_SAVES[name]
        with pytest.raises(BaseException, match=text):
            save({"w": make(dist.get_rank())}, path / name.replace(" ", "-"))
        assert not list(path.rglob("*.distcp"))


def test_pieces_that_do_not_make_up_the_tensor_are_refused(shared_tmp_path: Path) -> None:
    run_ranks(2, refused_saves, shared_tmp_path, list(BAD_SAVES))


def half(path: Path) -> None:
    with pytest.raises(BaseException, match=r"w.payload: of \(16, 64\), no chunk holds"):
        save({"w": PlacedShard(mx(8), (16, K), (0, 0))}, path)


def test_half_a_tensor_is_refused_on_one_rank_too(shared_tmp_path: Path) -> None:
    run_ranks(1, half, shared_tmp_path)


def test_a_piece_lies_inside_of_its_tensor() -> None:
    with pytest.raises(ValueError, match=r"a piece of \(8, 64\) at \(9, 0\) is not inside of \(16, 64\)"):
        PlacedShard(mx(8), (16, K), (9, 0))
    with pytest.raises(ValueError, match="one offset for each dim"):
        PlacedShard(mx(8), (16, K), (0,))
    with pytest.raises(TypeError, match="local is a list"):
        PlacedShard([1.0], (1,), (0,))  # type: ignore[arg-type]


def others_refuse(path: Path) -> None:
    shard = PlacedShard(mx(8), (8, K), (0, 0))
    told = describe(torch.ones(8, K), (16, K), [((0, 0), (0, 0), (8, K))])
    for value in (shard, told):
        for use in (
            expand,
            tensor_digests,
            partial(export_hf, out_dir=path / "out"),
            partial(save, path=path / "deep", verify="deep"),
            partial(Shards.of, group=None),
        ):
            with pytest.raises(BaseException, match=r"w.* (says itself where it lies|(is|holds) a PlacedShard)"):
                use({"w": value})
    with pytest.raises(BaseException, match="w: a PlacedShard, of which DCP's own planners know no place"), alone():
        dcp.save({"w": shard}, checkpoint_id=path / "stock")
    save({"w": mx(8)}, path / "whole")
    with pytest.raises(BaseException, match=r"Invalid checkpoint metadata|Missing key"), alone():
        dcp.load({"w": shard}, checkpoint_id=path / "whole")


def test_who_knows_no_such_places_refuses_them(shared_tmp_path: Path) -> None:
    run_ranks(1, others_refuse, shared_tmp_path)


# -- conversions -------------------------------------------------------------------------------------------------------


def convert(path: Path) -> None:
    cuts = CUTS["two"]
    box, full = cuts[dist.get_rank()], values((ROWS, K), 50)
    for name, recipe in EVERY.items():
        target = PlacedShard(cut(quantize(values((ROWS, K), 3), recipe), box), (ROWS, K), box[0])
        before = target.local.clone()
        shares = any(part.ndim < 2 for part in target.local.parts().values())
        if shares:
            with pytest.raises(BaseException, match="dense: its pieces share a scale under"):
                load({"model": {"dense": target}}, path, on_mismatch="convert", allow_partial_load=True)
            assert equal(target.local, before)
            continue
        load({"model": {"dense": target}}, path, on_mismatch="convert", allow_partial_load=True)
        assert equal(target.local, cut(quantize(full, recipe), box)), name
    dense = PlacedShard(torch.zeros(box[1]), (ROWS, K), box[0])
    load({"model": {"mxfp8": dense}}, path, on_mismatch="convert", allow_partial_load=True)
    expected = cut(whole(0)["mxfp8"].dequantize(torch.float32), box)
    assert torch.equal(dense.local.isnan(), expected.isnan())  # some of arbitrary bytes are
    assert torch.equal(dense.local.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_blocks_convert_and_shared_scales_are_refused(shared_tmp_path: Path) -> None:
    run_ranks(2, save_by_hand, shared_tmp_path, CUTS["two"], {})
    run_ranks(2, convert, shared_tmp_path)


# -- DTensors whose local tensor is not what their placement tells -----------------------------------------------------

UNEVEN = [24, 72]  # torch cuts 48 and 48


def uneven(seed: int, *, described: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    mesh, start = init_device_mesh("cpu", (2,)), sum(UNEVEN[:rank])
    state: dict[str, Any] = {}
    for name, value in whole(seed).items():
        local = cut(value, ((start, 0), (UNEVEN[rank], K)))
        if described:
            chunk = ChunkStorageMetadata(offsets=(start, 0), sizes=tuple(local.shape))  # type: ignore[arg-type]
            told: Any = local
            told.__create_chunk_list__ = lambda chunk=chunk: [chunk]
        state[name] = dtensor_around(local, mesh, (Shard(0),), (ROWS, K))
    return {"model": state}


def save_uneven(path: Path) -> None:
    save(uneven(0, described=True), path)


def load_uneven(path: Path) -> None:
    state = uneven(7, described=True)
    load(state, path)
    for name, value in uneven(0, described=True)["model"].items():
        assert equal(state["model"][name].to_local(), value.to_local()), name


def test_uneven_dtensors_that_tell_their_chunks_go_both_ways(shared_tmp_path: Path) -> None:
    run_ranks(2, save_uneven, shared_tmp_path / "uneven")
    run_ranks(3, load_by_hand, shared_tmp_path / "uneven", CUTS["grid"])
    run_ranks(2, load_sharded, shared_tmp_path / "uneven", 0)
    run_ranks(2, save_sharded, shared_tmp_path / "mesh", 0)
    run_ranks(2, load_uneven, shared_tmp_path / "mesh")


def refuse_uneven(path: Path) -> None:
    rank = dist.get_rank()
    for name, value in uneven(0, described=False)["model"].items():
        before = value.to_local().clone()
        for use in (partial(save, path=path / "new"), partial(load, path=path / "old", allow_partial_load=True)):
            with pytest.raises(BaseException, match=rf"{name}: .*(its local tensor has \({UNEVEN[rank]}|column cuts)"):
                use({"model": {name: value}})
        assert equal(value.to_local(), before)
        for use in (tensor_digests, partial(export_hf, out_dir=path / "out")):
            with pytest.raises(BaseException, match=f"{name}|other ranks|another rank"):
                use({name: value})
    assert not (path / "new").exists() or not list((path / "new").iterdir())


def test_uneven_dtensors_that_tell_nothing_are_refused(shared_tmp_path: Path) -> None:
    run_ranks(2, save_sharded, shared_tmp_path / "old", 0)
    run_ranks(2, refuse_uneven, shared_tmp_path)


def stale(path: Path) -> None:
    value = uneven(0, described=True)["model"]["dense"]
    told: Any = cut(value.to_local(), ((0, 0), (5, K)))
    told.__create_chunk_list__ = value._local_tensor.__create_chunk_list__
    value = dtensor_around(told, value.device_mesh, value.placements, value.shape)
    with pytest.raises(BaseException, match=r"dense: its local tensor of .* tells chunks of another shape"):
        save({"model": {"dense": value}}, path)


def test_a_description_of_another_local_tensor_is_refused(shared_tmp_path: Path) -> None:
    run_ranks(2, stale, shared_tmp_path)


# -- DCP's own planners, where torch knows the protocol ----------------------------------------------------------------

needs_protocol = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch has CheckpointableTensor from 2.15 on"
)


def dense_pieces(seed: int) -> dict[str, Any]:
    box = CUTS["two"][dist.get_rank()]
    local = cut(whole(seed)["dense"], box)
    return {"model": {"dense": describe(local, (ROWS, K), [(box[0], (0, 0), box[1])])}}


def with_stock(path: Path) -> None:
    state = dense_pieces(0)
    assert isinstance(state["model"]["dense"], dcp.CheckpointableTensor)  # type: ignore[attr-defined]
    dcp.save(state, checkpoint_id=path / "stock")
    save(state, path / "ours")
    for name in ("stock", "ours"):
        for read in (dcp.load, load):
            found = dense_pieces(7)
            read(found, checkpoint_id=path / name) if read is dcp.load else load(found, path / name)
            assert equal(found["model"]["dense"], state["model"]["dense"]), (name, read)


@needs_protocol
def test_dense_pieces_are_those_of_stock(shared_tmp_path: Path) -> None:
    run_ranks(2, with_stock, shared_tmp_path)


def stock_refuses(path: Path) -> None:
    state = scattered(0)["model"]
    quantized = {name: value for name, value in state.items() if quantized_local(value) is not None}
    for name, value in quantized.items():
        with pytest.raises(BaseException, match=f"{name}: .*save it by dcp.save with planner=QuantizedSavePlanner"):
            dcp.save({"model": {name: value}}, checkpoint_id=path / "stock")
        before = value.clone()
        with pytest.raises(BaseException, match="Missing key"):
            dcp.load({"model": {name: value}}, checkpoint_id=path / "ours")
        assert equal(value, before)


@needs_protocol
def test_stock_refuses_quantized_pieces(shared_tmp_path: Path) -> None:
    run_ranks(2, save_scattered, shared_tmp_path / "ours")
    run_ranks(2, stock_refuses, shared_tmp_path)
