"""QuantizedStager: exact snapshots, one stored copy, in memory that no unfinished save uses."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from collections import OrderedDict, namedtuple
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_adapters import QuantizedSavePlanner, QuantizedStager, expand
from dcp_adapters.records.expand import quantized_local
from dcp_adapters.save.staging import host_memory
from fsdp_hooks.all_gather import AT_REST, Sharding, ShardRows
from qtensor import QuantizedTensor, high_precision_init_val, quantize, quantized_model_init
from qtensor.tensor.contents import initial_value
from tests.dcp_adapters.cases import (
    RECIPES,
    alone,
    assert_holds,
    bits,
    held,
    leaves,
    load,
    local_of,
    models,
    placed,
    reference,
    values,
)
from tests.ranks import run_ranks

Pair = namedtuple("Pair", ["first", "second"])


def stager(**options: Any) -> QuantizedStager:
    """One that fails at once instead of waiting."""
    return QuantizedStager(**{"wait_timeout": 0, **options})


def weight(seed: int = 0, name: str = "mxfp8", rows: int = 32) -> Any:
    return quantize(values((rows, 64), seed), RECIPES[name])


def tensors(state_dict: Any) -> list[Tensor]:
    """The plain local tensors of a state dict, parts for quantized ones."""
    return [local_of(value) for _, value in leaves(expand(state_dict)) if isinstance(value, Tensor)]


def addresses(state_dict: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors(state_dict)]


def overwrite(state_dict: Any, byte: int = 0xA5) -> None:
    with torch.no_grad():
        for tensor in tensors(state_dict):
            tensor.view(-1).view(torch.uint8).fill_(byte)


def assert_a_snapshot(staged: Any, live: Any) -> None:
    """The same bytes and kinds, on the CPU, each tensor in a storage of its own of exactly its bytes."""
    assert held(staged) == held(live)
    for (name, copy), (_, source) in zip(leaves(staged), leaves(live), strict=True):
        q = quantized_local(source)
        if q is not None:
            assert type(quantized_local(copy)) is type(q), name
            assert (quantized_local(copy).recipe, quantized_local(copy).dtype) == (q.recipe, q.dtype), name
            assert quantized_local(copy)._sharding == AT_REST, name  # no padding rows behind it
        if isinstance(source, DTensor):
            assert (copy.device_mesh, copy.placements) == (source.device_mesh, source.placements), name
            assert (copy.shape, copy.dtype) == (source.shape, source.dtype), name
    for copy, source in zip(tensors(staged), tensors(live), strict=True):
        assert type(copy) is Tensor
        assert (copy.device.type, copy.requires_grad) == ("cpu", False)
        assert copy.untyped_storage().nbytes() == source.numel() * source.itemsize
        assert copy.data_ptr() != source.data_ptr() or not source.numel()
        assert copy.data_ptr() % 64 == 0


# -- what is in a snapshot ---------------------------------------------------------------------------------------------


def test_a_snapshot_has_the_structure_and_the_bytes_and_does_not_follow_the_source() -> None:
    setting = {1, 2}
    live = {
        "models": reference(0),
        "ordered": OrderedDict(b=weight(1), a=torch.arange(5)),
        "list": [weight(2), [3, "x", None], {}],
        "plain": {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "bool": torch.tensor([True, False])},
        "parameter": nn.Parameter(values((3, 4), 3)),
        "strided": values((6, 8), 4).t()[1:5],
        7: torch.Size([1, 2]),
    }
    expected = held(live)
    staged = stager().stage({**live, "set": setting})
    setting.add(3)
    assert staged.pop("set") == {1, 2}
    assert_a_snapshot(staged, live)
    assert list(staged) == list(live)
    assert type(staged["ordered"]) is OrderedDict
    assert staged[7] == torch.Size([1, 2])
    assert staged["strided"].is_contiguous()
    overwrite({key: live[key] for key in ("models", "ordered", "list", "plain")})
    live["list"][1].append(4)
    assert held(staged) == expected


def test_tuples_are_snapshots_too() -> None:
    live = (torch.ones(3), Pair(weight(), [torch.zeros(2)]))
    staged = stager().stage({"t": live})["t"]
    live[0].zero_()
    live[1].second[0].fill_(1)
    assert (type(staged), type(staged[1])) == (tuple, Pair)
    assert staged[0].tolist() == [1, 1, 1]
    assert staged[1].second[0].tolist() == [0, 0]
    assert held({"w": staged[1].first}) == held({"w": weight()})


def test_tied_tensors_are_copied_once_and_stay_aliases() -> None:
    tied, other = weight(0), weight(0)
    dense = values((4, 4), 1)
    live = {"a": tied, "b": tied.detach(), "c": other, "x": dense, "y": dense.view(4, 4), "row": dense[:1]}
    staged = stager().stage(live)
    assert held(staged) == held(live)
    assert addresses({"w": staged["a"]}) == addresses({"w": staged["b"]}) != addresses({"w": staged["c"]})
    assert staged["x"].data_ptr() == staged["y"].data_ptr() != staged["row"].data_ptr()


def test_what_only_looks_alike_is_no_alias() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    square = torch.arange(4.0).view(2, 2)
    live = {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "s": square, "t": square.t()}
    live["int"] = square.view(torch.int32)
    staged = stager().stage(live)
    assert all(torch.equal(staged[name], value) for name, value in live.items())
    assert staged["int"].dtype == torch.int32


def test_preserved_initial_values_stay_behind() -> None:
    with quantized_model_init(RECIPES["mxfp8"], preserve_high_precision_init_val=True):
        net = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    staged = stager().stage(net.state_dict())
    assert initial_value(quantized_local(staged["weight"])) is None
    assert high_precision_init_val(net.weight) is not None
    assert held(staged) == held(net.state_dict())


def test_a_high_precision_weight_becomes_the_dense_tensor_it_is() -> None:
    with quantized_model_init(RECIPES["nvfp4"], storage="high_precision"):
        net = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    staged = stager().stage(net.state_dict())
    assert type(staged["weight"]) is Tensor
    assert bits(staged["weight"]) == bits(net.weight.dense)


def test_a_gathered_weight_is_saved_as_the_weight_it_is(tmp_path: Path) -> None:
    q = weight(0, "float8_tensor")
    parts = {"payload": q.payload, "scale": q.scale.repeat(2)}
    gathered = q._like(parts, sharding=Sharding(shards=ShardRows(16)))
    staged = stager().stage({"w": gathered})
    assert quantized_local(staged["w"]).scale.shape == (2,)
    with alone():
        dcp.save(staged, checkpoint_id=tmp_path, planner=QuantizedSavePlanner())
    target = {"w": weight(1, "float8_tensor")}
    load(target, tmp_path)
    assert held(target) == held({"w": q})


def test_a_structure_that_changed_is_staged_as_it_is_now() -> None:
    keep = stager(max_snapshots=1)
    for live in (
        {"w": weight(0), "b": torch.ones(4)},
        {"w": weight(0, rows=48), "b": torch.ones(4)},  # shape
        {"w": weight(0, rows=48), "b": torch.ones(4, dtype=torch.float64)},  # dtype
        {"w": weight(0, "nvfp4", rows=48), "b": torch.ones(4)},  # recipe
        {"w": torch.ones(48, 64), "b": weight(1)},  # which one is quantized
        {"v": weight(0), "b": [torch.ones(4)]},  # names, nesting
        {"b": torch.ones(4), "w": weight(0)},  # order
    ):
        staged = keep.stage(live)
        assert_a_snapshot(staged, live)
        del staged


def test_snapshots_are_pickled_by_their_own_bytes() -> None:
    live = reference(0)
    staged = stager().stage(live)
    nbytes = sum(tensor.nbytes for tensor in tensors(live))
    file = io.BytesIO()
    torch.save(staged, file)
    assert len(file.getbuffer()) < nbytes + 1000 * len(tensors(live))
    file.seek(0)
    assert held(torch.load(file, weights_only=False)) == held(live)


def test_snapshots_travel_to_another_process_and_give_their_memory_back() -> None:
    live, keep = {"w": weight(0), "tied": torch.ones(7), "n": 3}, stager(max_snapshots=1)
    staged = keep.stage(live)
    sent = ForkingPickler.dumps(staged)  # moves the bytes to shared memory, as the process executor does
    received = ForkingPickler.loads(sent)
    resource_sharer.stop()
    assert held(received) == held(staged) == held(live)
    keep.stage(live)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_unfinished_snapshots_are_never_overwritten_and_finished_ones_are_reused() -> None:
    keep, live = stager(max_snapshots=3), {"w": weight(0), "b": torch.zeros(5)}
    snapshots, expected = [], []
    for byte in range(3):
        overwrite(live, byte)
        snapshots.append(keep.stage(live))
        expected.append(held(live))
    assert [held(snapshot) for snapshot in snapshots] == expected
    assert len({addresses(snapshot)[0] for snapshot in snapshots}) == 3
    second = addresses(snapshots.pop(1))
    again = keep.stage(live)
    assert addresses(again) == second
    assert [held(snapshot) for snapshot in snapshots] == [expected[0], expected[2]]


ALIASES = {
    "view": lambda staged: staged["b"].view(5, 2)[1:],
    "detach": lambda staged: staged["b"].detach(),
    "storage": lambda staged: staged["b"].untyped_storage(),
    "numpy": lambda staged: staged["b"].numpy(),
    "other dtype": lambda staged: staged["b"].view(torch.uint8),
    "part": lambda staged: staged["w"].scale,
    "quantized view": lambda staged: staged["w"].detach()[:2],
}


@pytest.mark.parametrize("kind", ALIASES)
def test_any_alias_keeps_the_memory(kind: str) -> None:
    live, keep = {"w": weight(0), "b": torch.ones(10)}, stager(max_snapshots=1)
    staged = keep.stage(live)
    began = addresses(staged)
    alias = ALIASES[kind](staged)
    del staged
    assert keep._memory.returned.empty()
    del alias
    assert not keep._memory.returned.empty()
    assert addresses(keep.stage(live)) == began


def test_a_snapshot_beyond_the_limit_names_what_to_do() -> None:
    keep = stager()
    held_back = [keep.stage({"b": torch.ones(1)}) for _ in range(2)]
    with pytest.raises(TimeoutError) as error:
        keep.stage({"b": torch.ones(1)})
    assert str(error.value) == (
        "QuantizedStager: 2 snapshots are still alive after 0 s, and max_snapshots=2. A snapshot lives until its "
        "upload has ended and nothing refers to it any more: save less often, raise max_snapshots (each takes the "
        "bytes of the state dict), and keep no staged state dict, no planner that has saved and no future of a failed "
        "save"
    )
    held_back.pop()
    keep.stage({"b": torch.ones(1)})


def test_a_save_beyond_the_limit_waits_for_an_upload_to_end() -> None:
    keep = QuantizedStager(max_snapshots=1, wait_timeout=60)
    uploading = [keep.stage({"b": torch.zeros(3)})]
    waits = threading.Event()

    def upload() -> None:
        waits.wait()
        uploading.clear()

    thread = threading.Thread(target=upload)
    thread.start()
    with patch.object(host_memory.gc, "collect", side_effect=waits.set):  # called when there is a need to wait
        assert keep.stage({"b": torch.ones(3)})["b"].tolist() == [1, 1, 1]
    thread.join()


def test_memory_in_a_reference_cycle_is_found_by_the_collection_inside_stage() -> None:
    keep = stager(max_snapshots=1)
    cycle: dict[str, Any] = {"staged": keep.stage({"b": torch.ones(3)})}
    cycle["itself"] = cycle
    gc.disable()
    try:
        del cycle
        keep.stage({"b": torch.ones(3)})
    finally:
        gc.enable()


def test_a_state_dict_that_grew_takes_the_place_of_a_free_slab() -> None:
    keep = stager(max_snapshots=2)
    for count in (1000, 5000, 20000):
        keep.stage({"b": torch.ones(count)})
    keep._memory._collect()
    assert [slab.nbytes for slab in keep._memory.free] == [20032, 80000]  # multiples of 64
    small = keep.stage({"b": torch.ones(10)})
    keep.stage({"b": torch.ones(20000)})  # the large one is still free
    assert small["b"].tolist() == [1] * 10
    assert (keep._memory.lent, keep._memory.free) == (2, [])


def test_a_refused_state_dict_takes_no_memory() -> None:
    keep = stager(max_snapshots=1)
    with pytest.raises(ValueError, match="meta"):
        keep.stage({"b": torch.ones(3), "m": torch.ones(3, device="meta")})
    with patch.object(Tensor, "copy_", side_effect=RuntimeError("device lost")), pytest.raises(RuntimeError) as error:
        keep.stage({"b": torch.ones(3)})
    assert str(error.value) == "device lost"
    del error
    keep.stage({"b": torch.ones(3)})


def test_close_frees_memory_that_of_a_snapshot_when_it_dies() -> None:
    keep = stager()
    slabs = []

    class Watched(host_memory.Slab):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            slabs.append(weakref.ref(self))

    with patch.object(host_memory, "Slab", Watched):
        uploading, uploaded = keep.stage({"b": torch.ones(3)}), keep.stage({"b": torch.ones(3)})
    del uploaded
    assert [slab() is None for slab in slabs] == [False, False]
    keep.close()
    assert [slab() is None for slab in slabs] == [False, True]
    assert uploading["b"].tolist() == [1, 1, 1]
    del uploading
    assert [slab() is None for slab in slabs] == [True, True]
    with pytest.raises(RuntimeError, match=r"QuantizedStager\.stage: the stager is closed; make a new one"):
        keep.stage({})


def test_threads_that_share_a_stager_take_turns() -> None:
    keep, seen = stager(), []

    class Curious:
        def __deepcopy__(self, memo: Any) -> None:
            seen.append(keep._turn.locked())

    keep.stage({"x": Curious(), "b": torch.ones(1)})
    assert (seen, keep._turn.locked()) == ([True], False)


# -- errors ------------------------------------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A subclass whose bytes are not where torch thinks."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class Labelled(Tensor):
    """A subclass that is a plain tensor with a name."""


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("a socket")


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


OF_THE_WEIGHT = (
    f"of a quantized weight of shape (32, 64) ({RECIPES['mxfp8']}), which would be saved as the weight itself; put the "
    "weight into the state dict"
)
REFUSED = {
    "meta": lambda: torch.ones(2, device="meta"),
    "meta part": lambda: weight().to("meta"),
    "freed": freed,
    "subclass": lambda: torch.empty(0).as_subclass(Elsewhere),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "transposed": lambda: weight().t(),
    "reshaped": lambda: weight().view(-1),
    "uncopyable": Uncopyable,
}
MATERIALISE = "on the meta device, without data; materialise it (to_empty) and initialise or load"
EXPECTED = (
    "expected a plain, quantized or DTensor leaf. Leave it out of the state dict, or save without QuantizedStager"
)
TEXTS = {
    "meta": f"a.0.x: {MATERIALISE}",
    "meta part": f"a.0.x.payload: {MATERIALISE}",
    "freed": "a.0.x: its storage was freed, as FSDP does with gathered weights; take the state dict of the sharded "
    "model anew",
    "subclass": f"a.0.x: a Elsewhere can not be staged as bytes; {EXPECTED}",
    "sparse": f"a.0.x: a torch.sparse_coo tensor can not be staged as bytes; {EXPECTED}",
    "transposed": f"a.0.x: a transposed view, (64, 32), {OF_THE_WEIGHT}",
    "reshaped": f"a.0.x: a reshaped view, (2048,), {OF_THE_WEIGHT}",
    "uncopyable": "a.0.x: a Uncopyable can not be copied (OSError: a socket); leave it out of the state dict, or give "
    "it a __deepcopy__",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_staged_is_named(kind: str) -> None:
    wrong_kind = kind in {"subclass", "sparse", "uncopyable"}
    with pytest.raises(TypeError if wrong_kind else ValueError) as error:
        stager().stage({"a": [{"x": REFUSED[kind]()}]})
    assert str(error.value) == TEXTS[kind]


def test_a_subclass_that_only_adds_python_is_staged_as_a_plain_tensor() -> None:
    staged = stager().stage({"x": torch.arange(3).as_subclass(Labelled)})
    assert type(staged["x"]) is Tensor
    assert staged["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_snapshots": 0}, "QuantizedStager: max_snapshots=0, expected at least 1"),
        ({"wait_timeout": -1}, "QuantizedStager: wait_timeout=-1, expected seconds, at least 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QuantizedStager(**options)


def test_pinning_needs_cuda() -> None:
    with (
        patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(ValueError, match="QuantizedStager: pin_memory=True needs CUDA, and there is none"),
    ):
        QuantizedStager(pin_memory=True)


def test_memory_that_is_not_there_is_said() -> None:
    memory = host_memory.SnapshotMemory(1, 0)
    with pytest.raises(MemoryError, match=f"no {1 << 62} bytes of host memory for a snapshot .*; run fewer ranks"):
        memory.lease(1 << 62, pinned=False)
    memory.lease(10, pinned=False)


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Application:
    """A Stateful that is asked for its state when it is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "w": torch.full((3,), float(self.step))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        assert state_dict["w"].tolist() == [float(self.step)] * 3


def sharded_snapshots(base: Path) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]  # two uploads overlap
    names = {name: RECIPES[name] for name in ("float8_tensor", "mxfp8", "nvfp4")}
    live, keep = models(0, names=names), QuantizedStager()
    staged = keep.stage(live)
    assert_a_snapshot(staged, live)  # uneven and empty shards among them
    alias = next(value for _, value in leaves(staged) if isinstance(value, DTensor)).to_local()
    del staged
    assert keep._memory.returned.empty()
    del alias
    assert keep._memory.returned.qsize() == 1
    futures = []
    refuse = AssertionError("a save dequantized something")
    with patch.object(QuantizedTensor, "dequantize", side_effect=refuse):
        for i in range(3):
            for (_, value), (_, new) in zip(
                leaves(expand(live)), leaves(expand(models(10 + i, names=names))), strict=True
            ):
                local_of(value).copy_(local_of(new))
            application = Application(i)
            future = dcp.async_save(
                {"models": live, "app": application},
                checkpoint_id=base / str(i),
                planner=QuantizedSavePlanner(),
                async_stager=keep,
                process_group=groups[i % 2],
            )
            overwrite(live)
            application.step = -1
            futures.append(future)
            if i == 1:
                futures[0].result()  # its memory and its group serve the third
        for future in futures:
            future.result()
    assert keep._memory.lent + len(keep._memory.free) <= 2  # one, where an upload was faster than the next save
    keep.close()
    for i in range(3):
        target, application = models(1, names=names), Application(-2)
        load({"models": target, "app": application}, base / str(i))
        assert_holds(target, reference(10 + i, names=names))
        assert application.step == i


def test_async_saves_hold_the_values_of_their_calls(shared_tmp_path: Path) -> None:
    run_ranks(2, sharded_snapshots, shared_tmp_path)


def placements_change() -> None:
    mesh, keep = init_device_mesh("cpu", (dist.get_world_size(),)), stager(max_snapshots=1)
    q, dense = weight(3, rows=33), values((5, 8), 3)
    for placement in (Shard(0), Replicate(), Shard(1), Shard(0)):
        live = {"w": placed(q, mesh, placement), "d": placed(dense, mesh, placement)}
        assert_a_snapshot(keep.stage(live), live)
    tied = {"a": live["w"], "b": live["w"].detach()}
    staged = keep.stage(tied)
    assert addresses({"w": staged["a"]}) == addresses({"w": staged["b"]})
    del staged
    with quantized_model_init(RECIPES["mxfp8"], storage="high_precision"):
        net = fully_shard(nn.Linear(64, 33, bias=False, dtype=torch.bfloat16))
    staged = keep.stage(net.state_dict())["weight"]
    assert isinstance(staged, DTensor)
    assert type(staged.to_local()) is Tensor
    assert bits(staged.to_local()) == bits(local_of(net.weight.detach()).dense)


def test_placements_are_those_of_now() -> None:
    run_ranks(2, placements_change)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [None, False])
def test_snapshots_of_cuda_tensors(pin_memory: bool | None) -> None:
    live = {"w": weight(0).to("cuda"), "b": torch.ones(1 << 20, device="cuda"), "n": torch.ones(3)}
    keep = stager(max_snapshots=1, pin_memory=pin_memory)
    for byte in range(2):  # memory that is page-locked already serves again
        overwrite(live, byte)
        staged = keep.stage(live)
        expected = held({key: value.to("cpu") for key, value in live.items()})
        overwrite(live, 0x77)
        assert held(staged) == expected
        assert staged["b"].is_pinned() is (pin_memory is None)
        del staged
    keep.close()


class Cudart:
    """Counts what is page-locked; refuses with `status`."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked, self.calls = status, {}, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.calls += 1
        self.locked[address] = (nbytes, flags)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.locked[address]
        return 0


def test_memory_is_page_locked_once_and_unlocked_before_it_goes() -> None:
    cudart, memory = Cudart(), host_memory.SnapshotMemory(1, 0)
    with patch.object(torch.cuda, "cudart", return_value=cudart):
        address = torch.frombuffer(memory.lease(640, pinned=True), dtype=torch.uint8).data_ptr()
        assert cudart.locked == {address: (640, 1)}
        memory.lease(100, pinned=True)
        assert cudart.calls == 1
        memory.lease(1280, pinned=False)
        assert cudart.locked == {}
        memory.lease(100, pinned=True)
        assert [nbytes for nbytes, _ in cudart.locked.values()] == [1280]
        memory.close()
        assert cudart.locked == {}


NOT_LOCKED = (
    "page-locking 640 bytes of host memory for a snapshot failed with CUDA error 2; use "
    "QuantizedStager(pin_memory=False), or raise the limit of locked memory"
)


def test_a_refused_page_lock_names_the_way_out_and_forgets_the_error() -> None:
    memory, launches = host_memory.SnapshotMemory(1, 0), []
    with (
        patch.object(torch.cuda, "cudart", return_value=Cudart(status=2)),
        patch.object(torch, "zeros", side_effect=lambda *_, **options: launches.append(options["device"])),
        pytest.raises(RuntimeError) as error,
    ):
        memory.lease(640, pinned=True)
    assert str(error.value) == NOT_LOCKED
    assert launches == ["cuda"]  # which would have reported it
    memory.lease(640, pinned=False)


def test_a_page_lock_that_nobody_insists_on_becomes_pageable_memory_with_one_warning() -> None:
    keep, cudart = stager(max_snapshots=1), Cudart(status=2)
    with patch.object(torch.cuda, "cudart", return_value=cudart):
        with pytest.warns(UserWarning, match="page-locking") as warned:
            lease = keep._lease(640, pinned=True)
        assert [str(one.message) for one in warned] == [
            f"QuantizedStager: {NOT_LOCKED}. Snapshots go to pageable memory from here on"
        ]
        assert len(lease) >= 640
        assert keep.pin_memory is False  # which later snapshots go by
        del lease
        keep.pin_memory = True
        with pytest.raises(RuntimeError, match="page-locking 640 bytes"):
            keep._lease(640, pinned=True)
    keep.close()
