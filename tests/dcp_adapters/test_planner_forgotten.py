"""The planner forgotten at save, at load or at both: right data or an error on every rank, never garbage.

A row of the tables says what was saved how, what it is loaded into, and which of the two comes of it. "right" means the
bytes of the reference, on the world size that saved and on others. An error is raised on all ranks; a refused save
writes nothing, a refused load leaves the target as it was. MISSING is torch's own text: it names the weight, and does
not say that a planner is what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand
from qtensor import quantize
from tests import ranks
from tests.dcp_adapters.cases import RECIPES, alone, assert_holds, held, models, placed, reference, values
from tests.dcp_adapters.fsspec_storage import FsspecWriter
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled

NAMES = ("float8_row", "float8_tensor", "mxfp8", "nvfp4")
SOME: dict[str, Any] = dict.fromkeys(NAMES)
ROWS, K = 160, 64
FORGOTTEN = "save it by dcp.save with planner=QuantizedSavePlanner()"
MISSING = "Missing key in checkpoint state_dict: "


def quantized(seed: int) -> dict[str, Any]:
    return models(seed, names=SOME)


def expanded(seed: int) -> dict[str, Any]:
    return expand(quantized(seed))


def dense(seed: int, dim: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: placed(values((ROWS, K), seed), mesh, Shard(dim)) for name in RECIPES}


def dense_columns(seed: int) -> dict[str, Any]:
    return dense(seed, dim=1)


# -- at save -----------------------------------------------------------------------------------------------------------

STOCK_SAVES: dict[str, Callable[[Path, Any], Any]] = {
    "an explicit stock planner": lambda path, _: dcp.save(
        quantized(0), checkpoint_id=path, planner=DefaultSavePlanner()
    ),
    "two threads": lambda path, _: dcp.save(quantized(0), storage_writer=dcp.FileSystemWriter(path, thread_count=2)),
    "a file per item": lambda path, _: dcp.save(
        quantized(0), storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False)
    ),
    "fsspec": lambda path, _: dcp.save(quantized(0), storage_writer=FsspecWriter(str(path))),
    "safetensors": lambda path, _: dcp.save(
        quantized(0), storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True)
    ),
    "a blocking stager": lambda path, group: dcp.async_save(
        quantized(0), checkpoint_id=path, async_stager=BlockingAsyncStager(), process_group=group
    ).result(),
    "shared memory": lambda path, group: dcp.async_save(
        quantized(0),
        checkpoint_id=path,
        async_stager=DefaultStager(StagingOptions(False, True, False, False)),
        process_group=group,
    ).result(),
}


def save_without(way: str, path: Path) -> None:
    STOCK_SAVES[way](path, dist.new_group(backend="gloo"))


@pytest.mark.parametrize("way", STOCK_SAVES)
def test_a_save_without_the_planner_is_refused(way: str, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "saved"
    path.mkdir(exist_ok=True)
    for error in run_ranks_catching(2, save_without, way, path):
        assert FORGOTTEN in error
        assert "float8_row.layers.0.weight: a quantized weight of shape (56, 64)" in error
    assert list(path.iterdir()) == []


def test_a_save_of_unsharded_weights_without_the_planner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=re.escape(FORGOTTEN)), alone():
        dcp.save(reference(0, names=SOME), checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()


def save_one_weight_with_two_threads(path: Path) -> None:
    """One thread gets the weight, the other the bias: what a writer's own threads raise, torch does not notice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = placed(quantize(values((ROWS, K), 0), RECIPES["mxfp8"]), mesh, Shard(0))
    saved = {"weight": weight, "bias": values((3,), 0)}
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def test_a_forgotten_planner_is_noticed_before_writer_threads_start(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, save_one_weight_with_two_threads, shared_tmp_path):
        assert "weight: a quantized weight of shape (80, 64)" in error
        assert FORGOTTEN in error
    assert list(shared_tmp_path.rglob(".metadata")) == []


def one_rank_without(path: Path) -> None:
    """Rank 1 alone has a quantized weight, of its own: the other hears of it."""
    saved = {"bias": values((3,), 0)}
    if dist.get_rank() == 1:
        saved["weight"] = quantize(values((ROWS, K), 0), RECIPES["mxfp8"])
    dcp.save(saved, checkpoint_id=path)


def test_a_refusal_on_one_rank_is_an_error_on_all(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, one_rank_without, shared_tmp_path):
        assert "RANK 1" in error
        assert FORGOTTEN in error
    assert list(shared_tmp_path.rglob(".metadata")) == []


# -- at load, or at both -----------------------------------------------------------------------------------------------

# name -> planner of the save, what is saved
CHECKPOINTS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "ours": (QuantizedSavePlanner, quantized),
    "expanded by hand": (DefaultSavePlanner, expanded),
    "dense": (DefaultSavePlanner, dense),
    "dense, in columns": (DefaultSavePlanner, dense_columns),
}
# checkpoint, planner of the load, target -> what comes of it
LOADS: list[tuple[str, Any, Callable[[int], Any], str]] = [
    ("ours", DefaultLoadPlanner, expanded, "right"),
    ("ours", DefaultLoadPlanner, quantized, MISSING),
    ("ours", QuantizedLoadPlanner, expanded, "right"),
    ("expanded by hand", DefaultLoadPlanner, expanded, "right"),
    ("expanded by hand", QuantizedLoadPlanner, quantized, "right"),
    ("expanded by hand", DefaultLoadPlanner, quantized, MISSING),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base: Path = ranks.agreed(tmp_path_factory.mktemp("forgotten"))
    run_ranks(2, save_checkpoints, base)
    return base


def save_checkpoints(base: Path) -> None:
    for name, (planner, contents) in CHECKPOINTS.items():
        dcp.save(contents(0), checkpoint_id=base / name, planner=planner())


def load_row(row: int, path: Path) -> None:
    _, planner, target_of, outcome = LOADS[row]
    target = target_of(1)
    before = held(target)
    try:
        dcp.load(target, checkpoint_id=path, planner=planner())
    finally:
        if outcome != "right":
            assert held(target) == before
    whole = reference(0, names=SOME)
    assert_holds(target, whole if target_of is quantized else expand(whole))


@sampled("world", [1, 2, 3], [3])
@pytest.mark.parametrize(
    "row", range(len(LOADS)), ids=lambda row: f"{LOADS[row][0]}-{LOADS[row][1].__name__}-{LOADS[row][2].__name__}"
)
def test_a_load_gives_right_data_or_an_error(row: int, world: int, saved: Path) -> None:
    errors = run_ranks_catching(world, load_row, row, saved / LOADS[row][0])
    for error in errors:
        assert (error == "") if LOADS[row][3] == "right" else (LOADS[row][3] in error), error


# -- dense checkpoints into quantized weights without the planner ------------------------------------------------------
# Torch copies the stored pieces into the shards, which quantizes them: right where a piece can be quantized by itself.

PIECES = "would change its"
COLUMNS = "a slice of columns is a copy, so the write would be lost"
# recipe -> outcome where the pieces are the shards, where they are other rows, where they are columns
DENSE: dict[str, tuple[str, str, str]] = {
    "float8_row": ("right", "right", COLUMNS),
    "float8_tensor": ("right", PIECES, COLUMNS),
    "mxfp8": ("right", "right", COLUMNS),
    "nvfp4": ("right", PIECES, COLUMNS),
}


def load_dense(name: str, path: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    target = {name: placed(quantize(values((ROWS, K), 1), RECIPES[name]), mesh, Shard(0))}
    dcp.load(target, checkpoint_id=path)
    mine = values((ROWS, K), 0).narrow(0, rank * ROWS // world, ROWS // world)
    assert held(target) == held({name: quantize(mine, RECIPES[name])})


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_checkpoint_quantizes_piece_by_piece_or_is_refused(name: str, saved: Path) -> None:
    same, other, columns = DENSE[name]
    for checkpoint, world, outcome in [
        ("dense", 2, same),
        ("dense", 1, other),
        ("dense", 5, other),  # 32 rows each, of which the third rank's come from two pieces
        ("dense, in columns", 2, columns),
        ("dense, in columns", 1, columns),
    ]:
        for error in run_ranks_catching(world, load_dense, name, saved / checkpoint):
            assert (error == "") if outcome == "right" else (outcome in error), (checkpoint, world, error)


def test_pieces_that_split_square_blocks_are_refused() -> None:
    """Stock DCP copies a dense checkpoint piece by piece; scales of square blocks need whole blocks."""
    full = values((96, 64), 0)
    target = quantize(torch.zeros(96, 64, dtype=torch.bfloat16), RECIPES["mxfp8_square"])
    before = held({"w": target})
    with pytest.raises(RuntimeError, match="writing values into rows that split square blocks of a quantized weight"):
        target[:48].copy_(full[:48])  # the second block begins at row 32
    assert held({"w": target}) == before
    for start in (0, 32, 64):
        target[start : start + 32].copy_(full[start : start + 32])
    assert held({"w": target}) == held({"w": quantize(full, RECIPES["mxfp8_square"])})
