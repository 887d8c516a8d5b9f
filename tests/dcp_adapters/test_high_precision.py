"""storage="high_precision" in checkpoints: plain dense tensors under plain names, with either planner."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand
from dcp_adapters.records.manifest import MANIFEST
from fsdp_hooks import sync_scales
from qtensor import QuantizedTensor, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.dcp_adapters.cases import RECIPES, alone, bits, held, local_of, values
from tests.ranks import run_ranks

ROWS = (96, 33, 3)  # even, uneven and (on 4 ranks) empty shards
K = 64
SAVERS = {"ours": QuantizedSavePlanner, "stock": DefaultSavePlanner}
LOADERS = (QuantizedLoadPlanner, DefaultLoadPlanner)


class Layers(nn.Sequential):  # torch 2.11 shards no ModuleList, even with a forward
    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).float().square().mean() for layer in self)


def plain(seed: int = 0) -> Any:
    """The same model without any recipe."""
    torch.manual_seed(seed)
    return Layers(*(nn.Linear(K, rows, dtype=torch.bfloat16) for rows in ROWS))


def dense_model(name: str, seed: int = 0) -> Any:
    with quantized_model_init(RECIPES[name], storage="high_precision"):
        return plain(seed)


def sharded(net: Any) -> Any:
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def loss(net: Any) -> Tensor:
    return net(values((4, K), 7))


def assert_kind(net: Any) -> None:
    assert all(type(local_of(layer.weight)) is HighPrecisionWeight for layer in net)


def whole(state: Any) -> dict[str, bytes]:
    """Name -> bytes of the whole tensor."""
    found = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = bits(full.dense if isinstance(full, HighPrecisionWeight) else full)
    return found


def expected(seed: int = 0) -> dict[str, bytes]:
    return {name: bits(value) for name, value in plain(seed).state_dict().items()}


class Imports(pickle.Unpickler):
    """Notes the modules of every class and function that unpickling imports."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module.split(".", maxsplit=1)[0])
        return super().find_class(module, name)


def assert_plain_files(path: Path) -> None:
    with (path / ".metadata").open("rb") as file:
        unpickler = Imports(file)
        unpickler.load()
    assert "torch" in unpickler.modules
    assert not unpickler.modules & {"qtensor", "fsdp_hooks", "dcp_adapters", "tests"}
    metadata = dcp.FileSystemReader(path).read_metadata()
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if k not in (MANIFEST,)}
    reference = plain().state_dict()
    assert {name for name in tensors if not name.startswith("qtensor")} == set(reference), sorted(tensors)
    for name, value in reference.items():
        entry = tensors[name]
        assert isinstance(entry, TensorStorageMetadata), name
        assert (entry.size, entry.properties.dtype) == (value.shape, value.dtype), name
    for index, info in metadata.storage_data.items():
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        tensor = torch.load(io.BytesIO(data), weights_only=True)  # which refuses classes of ours
        assert type(tensor) is Tensor, index
        if index.fqn in reference:  # no padding rows, no storage of anything larger
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, index


# -- dcp ---------------------------------------------------------------------------------------------------------------


def writes(base: Path, name: str) -> None:
    live = sharded(dense_model(name))
    sync_scales(live)
    for saver, planner in SAVERS.items():
        dcp.save(live.state_dict(), checkpoint_id=base / saver, planner=planner())
    upload = dist.new_group(backend="gloo")
    for saver, planner in SAVERS.items():
        for way in ("thread", "stager"):
            stager = DefaultStager(StagingOptions(False, False, False, False))
            options = {"async_stager": stager} if way == "stager" else {}
            path = base / f"{saver}-{way}"
            future = dcp.async_save(
                live.state_dict(), checkpoint_id=path, planner=planner(), process_group=upload, **options
            )
            with torch.no_grad():  # training goes on
                for param in live.parameters():
                    param.mul_(-1)
            future.result()
            with torch.no_grad():
                for param in live.parameters():
                    param.mul_(-1)
            stager.close()
    assert_kind(live)


def reads(base: Path, name: str) -> None:
    target = sharded(dense_model(name, seed=1))
    sync_scales(target)
    for number, path in enumerate(sorted(base.iterdir())):
        planner = LOADERS[number % 2]
        state = target.state_dict()
        dcp.load(state, checkpoint_id=path, planner=planner())
        target.load_state_dict(state)
        assert_kind(target)
        assert whole(target.state_dict()) == expected(), path.name
        loss(target).backward()
        with torch.no_grad():
            for param in target.parameters():
                param.zero_()


def test_checkpoints_are_dense_and_load_on_any_world_size(shared_tmp_path: Path) -> None:
    name = "nvfp4"
    run_ranks(3, writes, shared_tmp_path, name)
    paths = sorted(shared_tmp_path.iterdir())
    assert len(paths) == 6
    for path in paths:
        assert_plain_files(path)
        stock = plain(seed=1)
        state = stock.state_dict()
        with alone():
            dcp.load(state, checkpoint_id=path)
        assert whole(stock.state_dict()) == expected(), path.name
        unsharded = dense_model(name, seed=1)
        with alone():
            dcp.load(unsharded.state_dict(), checkpoint_id=path, planner=QuantizedLoadPlanner())
        assert_kind(unsharded)
        assert whole(unsharded.state_dict()) == expected(), path.name
    for world in (1, 4):
        run_ranks(world, reads, shared_tmp_path, name)


def mixed(base: Path) -> None:
    """Quantized and dense storage side by side: one manifest for the former, plain entries for the latter."""
    torch.manual_seed(0)
    with quantized_model_init(RECIPES["mxfp8"]):
        stored = nn.Linear(K, 33, dtype=torch.bfloat16)
    net = nn.ModuleDict({"stored": fully_shard(stored), "dense": sharded(dense_model("mxfp8"))})
    dcp.save({"model": net.state_dict()}, checkpoint_id=base, planner=QuantizedSavePlanner())
    names = set(dcp.FileSystemReader(base).read_metadata().state_dict_metadata)
    assert {"model.stored.weight.payload", "model.stored.weight.scale", "model.dense.0.weight"} <= names
    assert not any(name.startswith("model.dense.0.weight.") for name in names)
    before = held(net.state_dict())
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    dcp.load({"model": net.state_dict()}, checkpoint_id=base, planner=QuantizedLoadPlanner())
    assert held(net.state_dict()) == before


def test_both_storages_share_a_checkpoint(shared_tmp_path: Path) -> None:
    run_ranks(2, mixed, shared_tmp_path)


def test_a_dense_checkpoint_is_no_quantized_one(shared_tmp_path: Path) -> None:
    """Storage is not interchangeable silently: a dense checkpoint does not fit a quantized target, nor the reverse."""
    with quantized_model_init(RECIPES["mxfp8"]):
        stored = plain()
    dense = dense_model("mxfp8")
    with alone():
        dcp.save(dense.state_dict(), checkpoint_id=shared_tmp_path / "dense", planner=QuantizedSavePlanner())
        dcp.save(stored.state_dict(), checkpoint_id=shared_tmp_path / "stored", planner=QuantizedSavePlanner())
        with pytest.raises(dcp.api.CheckpointException, match=r"0\.weight"):
            dcp.load(stored.state_dict(), checkpoint_id=shared_tmp_path / "dense", planner=QuantizedLoadPlanner())
        with pytest.raises(dcp.api.CheckpointException, match=r"0\.weight"):
            dcp.load(dense.state_dict(), checkpoint_id=shared_tmp_path / "stored", planner=QuantizedLoadPlanner())
    assert whole(dense.state_dict()) == expected()


def test_expand_gives_the_dense_tensor_itself() -> None:
    net = dense_model("nvfp4")
    found = expand({"model": net.state_dict(), "list": [net[0].weight]})
    assert found["model"].keys() == net.state_dict().keys()
    for tensor in (found["model"]["0.weight"], found["list"][0]):
        assert type(tensor) is Tensor
        assert tensor.data_ptr() == net[0].weight.dense.data_ptr()


# -- torch's own state dict functions ----------------------------------------------------------------------------------


def full_state_dicts(name: str) -> None:
    net = sharded(dense_model(name))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(net, options=options)
    first = dist.get_rank() == 0
    assert whole(state) == (expected() if first else {})
    assert not any(isinstance(value, DTensor | QuantizedTensor) for value in state.values())
    for broadcast in (False, True):
        target = sharded(dense_model(name, seed=1))
        sync_scales(target)
        full = plain().state_dict() if first or not broadcast else {}
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(target, full, options=how)
        assert_kind(target)
        assert whole(target.state_dict()) == expected(), broadcast
        loss(target).backward()


@pytest.mark.parametrize("world", [1, 3])
def test_full_state_dicts_are_dense_and_load(world: int) -> None:
    run_ranks(world, full_state_dicts, "float8_tensor")


def loads_state_dicts(name: str) -> None:
    source = sharded(dense_model(name))
    for assign in (False, True):
        target = sharded(dense_model(name, seed=1))
        loss(target).backward()
        target.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
        assert_kind(target)
        assert whole(target.state_dict()) == expected(), assign
        assert all(param.requires_grad for param in target.parameters())
        for net in (target, source):
            sync_scales(net)
        with torch.no_grad():
            assert loss(target) == loss(source)
        source.reshard()


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_load_by_copy_and_by_assignment(world: int) -> None:
    run_ranks(world, loads_state_dicts, "nvfp4")


def optimizer_states(base: Path, name: str, *, write: bool) -> dict[str, bytes]:
    net = sharded(dense_model(name, seed=0 if write else 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if write:
        for _ in range(2):
            sync_scales(net)
            loss(net).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
    if write:
        dcp.save(state, checkpoint_id=base, planner=QuantizedSavePlanner())
    else:
        dcp.load(state, checkpoint_id=base, planner=QuantizedLoadPlanner())
        net.load_state_dict(state["model"])
        set_optimizer_state_dict(net, optimizer, state["optim"])
    moments = {
        f"{fqn}.{key}": value
        for fqn, param in net.named_parameters()
        for key, value in optimizer.state[param].items()
        if key != "step"
    }
    assert len(moments) == 2 * 2 * len(ROWS)
    assert not any(isinstance(local_of(value), HighPrecisionWeight) for value in moments.values())
    found = whole(net.state_dict()) | whole(moments)
    sync_scales(net)
    loss(net).backward()
    optimizer.step()
    return found | {f"next.{name}": value for name, value in whole(net.state_dict()).items()}


def test_training_resumes_bit_for_bit_on_another_world_size(shared_tmp_path: Path) -> None:
    saved = run_ranks(2, optimizer_states, shared_tmp_path, "float8_tensor", write=True)
    assert saved[0] == saved[1]
    for world in (1, 4):
        for found in run_ranks(world, optimizer_states, shared_tmp_path, "float8_tensor", write=False):
            assert found == saved[0]


# -- torch.save and pickle ---------------------------------------------------------------------------------------------


def test_torch_save_writes_plain_tensors() -> None:
    net = dense_model("nvfp4")
    state = net.state_dict()
    assert isinstance(state["0.weight"], HighPrecisionWeight)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all(type(value) is Tensor for value in loaded.values())
    assert whole(loaded) == expected()
    other = dense_model("nvfp4", seed=1)
    other.load_state_dict(loaded)
    assert_kind(other)
    assert whole(other.state_dict()) == expected()


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("way", ["torch.save", "pickle", "deepcopy"])
def test_modules_and_parameters_keep_their_kind(way: str, requires_grad: bool) -> None:
    def copied(value: Any) -> Any:
        if way == "deepcopy":
            return copy.deepcopy(value)
        if way == "pickle":
            return pickle.loads(pickle.dumps(value))
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    net = dense_model("nvfp4").requires_grad_(requires_grad)
    found = copied(net)
    assert_kind(found)
    assert whole(found.state_dict()) == expected()
    weight = copied(net[0].weight)
    for param in (*(layer.weight for layer in found), weight):
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, HighPrecisionWeight)
        assert param.requires_grad == requires_grad
        assert param.recipe == RECIPES["nvfp4"]
    with torch.no_grad():
        for param in found.parameters():
            param.zero_()
    assert whole(net.state_dict()) == expected(), "a copy shares its values"
    tied = copied({"a": net[0].weight, "b": net[0].weight})
    assert tied["a"] is tied["b"]


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_a_load_counts_as_a_write(storage: Any, tmp_path: Path) -> None:
    """Whoever keeps something of a weight, such as a master or a saved tensor, asks its version."""
    with quantized_model_init(RECIPES["mxfp8"], storage=storage):
        layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    state = {"weight": layer.weight}
    with alone():
        dcp.save(state, checkpoint_id=tmp_path, planner=QuantizedSavePlanner())
        before = layer.weight._version
        dcp.load(state, checkpoint_id=tmp_path, planner=QuantizedLoadPlanner())
    assert layer.weight._version > before
