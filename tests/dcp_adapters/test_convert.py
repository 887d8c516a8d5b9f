"""on_mismatch="convert": each rank gets, bit for bit, its piece of the converted full tensor.

One checkpoint holds every weight dense (bf16 and fp32) and under every recipe; a target takes any of them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from dcp_adapters import QuantizedLoadPlanner
from dcp_adapters.load import all_conversions
from dcp_adapters.load.conversion import Conversion, narrowed, widened_box
from fsdp_hooks.ranks.exchange import RanksDifferError
from qtensor import high_precision_init_val, quantize, quantized_model_init
from qtensor.tensor.quantized_tensor import QuantizedTensor
from tests import ranks
from tests.dcp_adapters.cases import EVERY, alone, assert_holds, bits, held, load, placed, save, values
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import facts
from tests.sampling import halves, sampled

DENSE = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COLUMNS = 512  # four column cuts of one block of 128
ROWS = {"even": 64, "uneven": 96, "few": 32}  # on 3 and 4 ranks cuts fall inside of square blocks


@cache
def source(kind: str, rows: int) -> Tensor:
    """A full tensor as the checkpoint holds it; do not write to it."""
    x = values((rows, COLUMNS), rows, torch.float32)
    x[3, 40] = float("nan")  # one block, and one row, that is not finite
    x[rows // 2] = 0
    return x.to(DENSE[kind]) if kind in DENSE else quantize(x, EVERY[kind])


def converted(full: Tensor, kind: str, rows: int) -> Tensor:
    """A full target of a kind that got `full`: what conversion is defined by."""
    if kind not in DENSE:
        target = quantize(torch.ones(rows, COLUMNS, dtype=torch.bfloat16), EVERY[kind])
        target.copy_(full)
        return target
    return full.dequantize(DENSE[kind]) if isinstance(full, QuantizedTensor) else full.to(DENSE[kind])


@cache
def expected(a: str, b: str, rows: int) -> Tensor:
    """The source of kind `a` as kind `b`."""
    return converted(source(a, rows), b, rows)


def empty_target(kind: str, rows: int) -> Tensor:
    x = torch.full((rows, COLUMNS), 7.0, dtype=DENSE.get(kind, torch.bfloat16))
    return x if kind in DENSE else quantize(x, EVERY[kind])


KINDS = [*DENSE, *EVERY]


def checkpoint(path: Path) -> None:
    state = {f"{size}.{kind}": source(kind, rows) for size, rows in ROWS.items() for kind in KINDS}
    save(state, path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = ranks.agreed(tmp_path_factory.mktemp("convert")) / "saved"
    run_ranks(1, checkpoint, path)
    return path


PLACEMENTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "fsdp": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "fsdp x tp rows": ((2, 2), (Shard(0), Shard(0))),
    "fsdp x tp columns": ((2, 2), (Shard(0), Shard(1))),
}


# Every kind under "fsdp"; of the two other layouts that cut rows, and of the two that cut columns, under one of each.
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)
TARGETS = {"columns": EVEN, "hsdp": EVEN, "fsdp x tp rows": ODD, "fsdp x tp columns": ODD}


def every_pair(path: Path, layouts: Iterable[str]) -> None:
    """All kinds into each kind, in one load a kind and layout (an entry can be loaded under one name only)."""
    world = dist.get_world_size()
    for layout in layouts:
        shape, placements = PLACEMENTS[layout] if world == 4 else ((world,), (Shard(0),))
        mesh = init_device_mesh("cpu", shape)
        sizes = ROWS if layout == "fsdp" and world > 1 else {"uneven": ROWS["uneven"]}
        for kind in KINDS[TARGETS.get(layout, slice(None))]:
            full = {f"{size}.{other}": expected(other, kind, rows) for size, rows in sizes.items() for other in KINDS}
            target: dict[str, Any] = {
                name: placed(empty_target(kind, ROWS[name.split(".")[0]]), mesh, *placements) for name in full
            }
            load(target, path, on_mismatch="convert", allow_partial_load=True)
            assert_holds(target, full)


@sampled("world", [1, 3], [3])
def test_every_kind_becomes_every_kind(world: int, saved: Path) -> None:
    run_ranks(world, every_pair, saved, ["fsdp"])


# Kinds and placements do not interact but for what is cut inside of a block: in `make test` half of the kinds where
# columns are cut, the others where rows are cut twice.
@pytest.mark.slow
@halves("layouts", PLACEMENTS, ["columns", "fsdp x tp rows"])
def test_every_kind_becomes_every_kind_under_any_placement(layouts: tuple[str, ...], saved: Path) -> None:
    run_ranks(4, every_pair, saved, layouts)


def test_without_a_process_group(saved: Path) -> None:
    for kind in KINDS:
        full = {f"even.{other}": expected(other, kind, ROWS["even"]) for other in KINDS}
        target: dict[str, Any] = {name: empty_target(kind, ROWS["even"]) for name in full}
        load(target, saved, on_mismatch="convert", allow_partial_load=True)
        assert_holds(target, full)


def dense_rows_read(path: Path) -> None:
    names = [f"few.{kind}" for kind in EVERY]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target: dict[str, Any] = {name: placed(empty_target("bfloat16", ROWS["few"]), mesh, Shard(0)) for name in names}
    planner = QuantizedLoadPlanner(on_mismatch="convert", allow_partial_load=True)
    planner.set_up_planner(target, FileSystemReader(path).read_metadata(), dist.get_rank() == 0)
    read = {item.storage_index.fqn: item.lengths for item in planner.create_local_plan().items}
    payloads = {key: lengths for key, lengths in read.items() if key.endswith("payload")}
    assert len(payloads) == len(names)
    rows = len(target[names[0]].to_local())
    assert all(lengths[0] == rows for lengths in payloads.values()), (rows, payloads)


def test_a_dense_target_reads_its_own_rows_and_no_more(saved: Path) -> None:
    run_ranks(3, dense_rows_read, saved)  # the second rank's rows begin and end at odd numbers


STACK = (4, 96, 256)  # experts [E, N, K]; 24 rows of a rank hold no whole square block
SQUARE = [kind for kind in EVERY if facts(EVERY[kind]).square]


def stack() -> Tensor:
    return values(STACK, 7, torch.float32)


def stacks_are_filled(path: Path) -> None:
    for shape, placements in (((4,), (Shard(1),)), ((2, 2), (Shard(0), Shard(1))), ((2, 2), (Shard(1), Shard(2)))):
        mesh = init_device_mesh("cpu", shape)
        for kind in SQUARE:
            empty = quantize(torch.ones(STACK, dtype=torch.bfloat16), EVERY[kind])
            target: dict[str, Any] = {"experts": placed(empty, mesh, *placements)}
            load(target, path, on_mismatch="convert")
            expected = empty.clone()
            expected.copy_(stack())
            assert_holds(target, {"experts": expected})


def test_square_blocks_of_stacked_experts_may_be_cut(shared_tmp_path: Path) -> None:
    run_ranks(1, save, {"experts": stack()}, shared_tmp_path)
    run_ranks(4, stacks_are_filled, shared_tmp_path)


# -- models ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 64, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3))


def dense_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def load_dense_model(name: str, path: Path) -> None:
    for storage in ("quantized", "high_precision"):
        if (name, storage) == ("float8_delayed", "high_precision"):
            continue
        with quantized_model_init(EVERY[name], storage=storage):
            net = dense_net(9)
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        state = {"model": net.state_dict()}
        with patch.object(all_conversions, "all_reduce_max", wraps=all_conversions.all_reduce_max) as all_reduce:
            load(state, path, on_mismatch="convert")
        shares = storage == "quantized" and facts(EVERY[name]).tensor_wide is not None
        assert all_reduce.call_count == shares, (name, storage)
        full = dense_net(0).state_dict()
        if storage == "quantized":
            full = {key: quantize(value, EVERY[name]) if key.endswith("weight") and "layers" in key else value
                    for key, value in full.items()}  # fmt: skip
            assert_holds(state, {"model": full})
        else:
            for key, value in full.items():
                assert torch.equal(net.state_dict()[key].full_tensor(), value), key


def test_a_dense_checkpoint_fills_a_quantized_model_by_one_all_reduce(shared_tmp_path: Path) -> None:
    run_ranks(1, save, {"model": dense_net(0).state_dict()}, shared_tmp_path)
    run_ranks_each(2, EVERY, load_dense_model, shared_tmp_path)


def from_safetensors(path: Path) -> None:
    for name in ("mxfp8_square", "nvfp4"):
        with quantized_model_init(EVERY[name]):
            net = fully_shard(dense_net(9))
        state = net.state_dict()
        load(state, None, reader=dcp.HuggingFaceStorageReader(str(path), thread_count=2), on_mismatch="convert")
        full = {key: quantize(value, EVERY[name]) if key.endswith("weight") and "layers" in key else value
                for key, value in dense_net(0).state_dict().items()}  # fmt: skip
        assert_holds(state, full)


def write_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    state = {key: value.contiguous() for key, value in dense_net(0).state_dict().items()}
    halves = [dict(list(state.items())[:3]), dict(list(state.items())[3:])]
    for number, half in enumerate(halves):
        save_file(half, path / f"model-{number + 1:05d}-of-00002.safetensors")


def test_a_hugging_face_directory_fills_a_quantized_model(shared_tmp_path: Path) -> None:
    run_ranks(1, write_safetensors, shared_tmp_path)
    run_ranks(2, from_safetensors, shared_tmp_path)


def partial_loads(path: Path) -> None:
    """As DCP users do them: a subset, other names through a renamed dict, layers that stay as they are."""
    with quantized_model_init(EVERY["nvfp4"]):
        net = fully_shard(dense_net(9))
    state = net.state_dict()
    before = held(state)
    some = {f"model.{key}": value for key, value in state.items() if key.startswith("layers.1.")}
    load(some, path, on_mismatch="convert", allow_partial_load=True)
    want = quantize(dense_net(0).layers[1].weight, EVERY["nvfp4"])
    assert_holds({"w": some["model.layers.1.weight"]}, {"w": want})
    after = held(net.state_dict())
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {name for name in changed if name.startswith("layers.1.")} != set()


def test_partial_loads_convert_what_they_name(shared_tmp_path: Path) -> None:
    run_ranks(1, save, {f"model.{key}": value for key, value in dense_net(0).state_dict().items()}, shared_tmp_path)
    run_ranks(2, partial_loads, shared_tmp_path)


def test_a_preserved_initial_value_is_the_dense_value_it_was_quantized_from(tmp_path: Path) -> None:
    save({"weight": dense_net(0).layers[0].weight, "q": source("nvfp4", 64)}, tmp_path)
    with quantized_model_init(EVERY["mxfp8"], preserve_high_precision_init_val=True):
        first, second = (nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), nn.Linear(COLUMNS, 64, bias=False))
    load({"weight": first.weight, "q": second.weight}, tmp_path, on_mismatch="convert")
    assert torch.equal(high_precision_init_val(first.weight).bfloat16(), dense_net(0).layers[0].weight)
    assert high_precision_init_val(second.weight) is None  # the bytes it holds came from no dense value


# -- memory ------------------------------------------------------------------------------------------------------------


def saved_by_three(path: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    save({f"w{i}": placed(values((96, 64), i), mesh, Shard(0)) for i in range(12)}, path)


def buffers_alive(path: Path, name: str) -> int:
    """The most tensors that were being converted at once, counted whenever one more begins."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    real = Conversion.buffer

    def counted(self: Conversion, *args: Any) -> Tensor:
        nonlocal most
        tensor = real(self, *args)
        alive.add(tensor.untyped_storage())
        most = max(most, len(alive))
        return tensor

    target = {f"w{i}": quantize(torch.zeros(96, 64), EVERY[name]) for i in range(12)}
    with patch.object(Conversion, "buffer", counted):
        load(target, path, on_mismatch="convert")
    assert_holds(target, {f"w{i}": quantize(values((96, 64), i), EVERY[name]) for i in range(12)})
    return most


def test_two_tensors_are_in_flight_although_each_lies_in_three_files(shared_tmp_path: Path) -> None:
    run_ranks(3, saved_by_three, shared_tmp_path)
    # the one at hand, and the last one, which a variable of stock's reading loop still holds; nvfp4 has here nobody to
    # agree with, so it need not wait either
    assert buffers_alive(shared_tmp_path, "mxfp8") == 2
    assert buffers_alive(shared_tmp_path, "nvfp4") == 2


# -- boxes -------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_widened_box_holds_the_box_and_ends_on_multiples(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 70), min_size=2, max_size=3)))
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - start)) for size, start in zip(shape, offsets, strict=True))
    rows, columns = data.draw(st.sampled_from([1, 16, 32])), data.draw(st.sampled_from([1, 16, 32]))
    wide = widened_box((offsets, sizes), shape, rows=rows, columns=columns)
    if not all(sizes):
        assert wide == (offsets, sizes)
        return
    for dim, multiple in zip(range(-len(shape), 0), [1, rows, columns][-len(shape) :], strict=True):
        start, end = wide[0][dim], wide[0][dim] + wide[1][dim]
        assert start <= offsets[dim]
        assert end >= offsets[dim] + sizes[dim]
        assert start % multiple == 0
        assert end % multiple == 0 or end == shape[dim]
        assert offsets[dim] - start < multiple
        assert end - offsets[dim] - sizes[dim] < multiple
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    outer = narrowed(x, ((0,) * len(shape), shape), wide)
    assert torch.equal(
        narrowed(outer, wide, (offsets, sizes)), narrowed(x, ((0,) * len(shape), shape), (offsets, sizes))
    )


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing(dcp.FileSystemReader):
    """Reads of one rank fail behind the probes; `tells` the planner, as SafeFileSystemReader does."""

    def __init__(self, path: Path, *, tells: bool) -> None:
        super().__init__(path)
        self.tells = tells

    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() != 1:
            return super().read_data(plan, planner)
        error = OSError("the disk of rank 1 is gone")
        if self.tells:
            planner.read_failed(error)
        raise error


def among_groups_of_some(path: Path) -> None:
    """Ranks that belong to different numbers of groups, as those of pipelines and experts do."""
    dist.new_group([0])
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("nvfp4", "float8_tensor"):
        target = {"even.bfloat16": placed(empty_target(kind, 64), mesh, Shard(0))}
        load(target, path, on_mismatch="convert", allow_partial_load=True, conversion_timeout=dt.timedelta(seconds=20))
        assert_holds(target, {"even.bfloat16": converted(source("bfloat16", 64), kind, 64)})


def test_ranks_agree_whatever_groups_they_belong_to(saved: Path) -> None:
    run_ranks(2, among_groups_of_some, saved)


def a_rank_fails(path: Path, tells: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    target = {"even.bfloat16": placed(empty_target("nvfp4", 64), mesh, Shard(0))}
    before = held(target)
    timeout = dt.timedelta(seconds=60 if tells else 4)
    planner = QuantizedLoadPlanner(on_mismatch="convert", allow_partial_load=True, conversion_timeout=timeout)
    try:
        dcp.load(target, storage_reader=Failing(path, tells=tells), planner=planner)
    finally:
        assert held(target) == before, "a weight whose scale was not agreed on was written"


@pytest.mark.parametrize("tells", [True, False])
def test_a_rank_that_fails_leaves_no_other_waiting(tells: bool, saved: Path) -> None:
    errors = run_ranks_catching(2, a_rank_fails, saved, tells, timeout=30)
    for error in errors:
        assert "the disk of rank 1 is gone" in error
        if tells:
            assert "another rank failed to read its part" in error
        else:
            assert "amaxes did not come within 0:00:04" in error


def a_rank_can_not_decode(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    target = {"even.bfloat16": placed(empty_target("nvfp4", 64), mesh, Shard(0))}
    before = held(target)
    fails = patch.object(Conversion, "claim", side_effect=MemoryError("rank 1 has no room"))
    with fails if dist.get_rank() == 1 else contextlib.nullcontext():
        try:
            load(target, path, on_mismatch="convert", allow_partial_load=True)
        finally:
            assert held(target) == before


def test_a_rank_that_fails_behind_its_reads_leaves_no_other_waiting(saved: Path) -> None:
    for error in run_ranks_catching(2, a_rank_can_not_decode, saved, timeout=30):
        assert "rank 1 has no room" in error
        assert "another rank failed to read its part" in error


def ranks_list_other_weights(path: Path) -> None:
    """Which the plans have compared; what is said where the exchange of amaxes finds it all the same."""
    mesh = init_device_mesh("cpu", (2,))
    target = {"even.bfloat16": placed(empty_target("nvfp4", 64), mesh, Shard(0))}
    before = held(target)
    with patch.object(all_conversions, "reduce_max", side_effect=RanksDifferError("ranks list other weights")):
        try:
            load(target, path, on_mismatch="convert", allow_partial_load=True)
        finally:
            assert held(target) == before


def test_ranks_that_differ_in_the_exchange_are_told_so(saved: Path) -> None:
    for error in run_ranks_catching(2, ranks_list_other_weights, saved, timeout=30):
        assert "ranks list other weights" in error
        assert "another rank failed" not in error


def into_other_recipes(path: Path) -> list[str]:
    """Rank 1 has another target than rank 0: one that needs no conversion, shares no scale, or shares another."""
    errors = []
    for kinds in (("nvfp4", "bfloat16"), ("nvfp4", "mxfp8"), ("nvfp4", "float8_tensor"), ("mxfp8", "int4_32")):
        mesh = init_device_mesh("cpu", (2,))
        kind = kinds[dist.get_rank()]
        target = {"even.bfloat16": placed(empty_target(kind, 64), mesh, Shard(0))}
        before = held(target)
        with pytest.raises(CheckpointException) as caught:
            load(target, path, on_mismatch="convert", allow_partial_load=True)
        assert held(target) == before
        errors.append(str(caught.value))
    return errors


def test_a_rank_of_another_recipe_is_an_error_on_all(saved: Path) -> None:
    """Before anything is written; the other ranks waited for its amaxes."""
    for one, other in zip(*run_ranks(2, into_other_recipes, saved, timeout=60), strict=True):
        for error in (one, other):
            assert "the ranks' targets do not fit each other, nothing has been loaded" in error
            assert "rank 0 converts to this, rank 1 does not" in error
            assert "even.bfloat16: (64, 512) bfloat16 " in error


def load_again(path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException):
        a_rank_fails(path, True)
    mesh = init_device_mesh("cpu", (2,))
    target = {"even.bfloat16": placed(empty_target("nvfp4", 64), mesh, Shard(0))}
    load(target, path, on_mismatch="convert", allow_partial_load=True)
    assert_holds(target, {"even.bfloat16": converted(source("bfloat16", 64), "nvfp4", 64)})


def test_the_next_load_agrees_as_if_nothing_had_happened(saved: Path) -> None:
    run_ranks(2, load_again, saved)


def test_a_view_of_a_larger_weight_is_no_target(saved: Path) -> None:
    stack = quantize(torch.ones(2, 64, COLUMNS), EVERY["nvfp4"])
    with (
        pytest.raises(BaseException, match="a view of some of a larger tensor, which a conversion can not write"),
        alone(),
    ):
        dcp.load(
            {"even.bfloat16": stack[0]},
            checkpoint_id=saved,
            planner=QuantizedLoadPlanner(on_mismatch="convert", allow_partial_load=True),
        )


def test_converting_changes_nothing_that_is_not_to_be_converted(saved: Path) -> None:
    target: dict[str, Any] = {"even.mxfp8": empty_target("mxfp8", 64), "even.float32": torch.zeros(64, COLUMNS)}
    load(target, saved, on_mismatch="convert", allow_partial_load=True)
    assert_holds({"w": target["even.mxfp8"]}, {"w": source("mxfp8", 64)})
    assert bits(target["even.float32"]) == bits(source("float32", 64))
