"""Every entry point of torch's DCP saves and loads quantized state dicts through the two planners, bit for bit.

    dcp.save          with every option of the file writer, and through fsspec
    dcp.async_save    with every stager, on a thread and in a process
    Hugging Face      plain safetensors files, readable without DCP

Each way saves on two ranks and is read back on one and on three. What is saved asynchronously is overwritten behind the
staging: a checkpoint that still holds the values of the call is a snapshot.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from dcp_adapters import QuantizedSavePlanner, expand, read_manifest
from tests import ranks
from tests.dcp_adapters.cases import (
    SQUARE,
    assert_holds,
    bits,
    leaves,
    load,
    local_of,
    model,
    models,
    reference,
)
from tests.dcp_adapters.fsspec_storage import FsspecReader, FsspecWriter
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled

SOME = {"float8_tensor": None, "nvfp4": None, "mxfp8_square": SQUARE["mxfp8_square"]}
LOADED_ON = (1, 3)
loaded_on = sampled("world", LOADED_ON, [3])


def state(seed: int) -> dict[str, Any]:
    return {"model": models(seed, names=SOME), "counters": counters(seed)}


def full(seed: int) -> dict[str, Any]:
    return {"model": reference(seed, names=SOME), "counters": counters(seed)}


def counters(seed: int) -> dict[str, Any]:
    return {"step": 7 + seed, "name": f"run {seed}", "rates": [0.5, 0.25 + seed]}


def overwrite(state_dict: Any) -> None:
    """Every byte of every tensor, in place, as training would."""
    for _, value in leaves(expand(state_dict)):
        if isinstance(value, Tensor):
            local_of(value).view(-1).view(torch.uint8).fill_(0xA5)


@contextmanager
def named(way: str) -> Iterator[None]:
    """Says which of many ways it was that failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"way: {way}")
        raise


# -- dcp.save ----------------------------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Path], Any]] = {
    "one thread": dcp.FileSystemWriter,
    "two threads": lambda path: dcp.FileSystemWriter(path, thread_count=2, sync_files=False),
    "unsynced": lambda path: dcp.FileSystemWriter(path, sync_files=False),
    "a file per item": lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False, sync_files=False),
    "a file per item, two threads": lambda path: dcp.FileSystemWriter(
        path, single_file_per_rank=False, thread_count=2, sync_files=False
    ),
    "fsspec": lambda path: FsspecWriter(str(path), sync_files=False),
    "fsspec, two threads": lambda path: FsspecWriter(str(path), thread_count=2, sync_files=False),
}


def save_with_every_writer(base: Path) -> None:
    for way, writer in WRITERS.items():
        with named(way):
            dcp.save(state(0), storage_writer=writer(base / way), planner=QuantizedSavePlanner())


def load_each(base: Path, ways: list[str], *, through_fsspec: bool = False) -> None:
    target = state(1)
    for way in ways:
        with named(way):
            overwrite(target)
            load(target, base / way, reader=FsspecReader(str(base / way)) if through_fsspec else None)
            assert_holds(target, full(0))


@loaded_on
def test_every_writer_s_checkpoint_loads_on_other_world_sizes(world: int, shared_tmp_path: Path) -> None:
    run_ranks(2, save_with_every_writer, shared_tmp_path)
    files = {way: len(list((shared_tmp_path / way).glob("*.distcp"))) for way in WRITERS}
    assert files["one thread"] == 2
    assert files["two threads"] == 4
    assert files["a file per item"] > 20
    run_ranks(world, load_each, shared_tmp_path, list(WRITERS))
    run_ranks(3, load_each, shared_tmp_path, ["two threads", "fsspec"], through_fsspec=True)


# -- dcp.async_save ----------------------------------------------------------------------------------------------------

STAGING_WRITERS = ("one thread", "a file per item, two threads", "fsspec, two threads")
STAGERS: dict[str, Callable[[], Any]] = {
    "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "shared memory": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "staged by a thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "staged by a thread into shared memory": lambda: DefaultStager(StagingOptions(False, True, True, False)),
    "blocking": BlockingAsyncStager,
}


def save_async(live: Any, upload: Any, **options: Any) -> Any:
    """Save and return the future of the upload, behind the staging."""
    response = dcp.async_save(live, planner=QuantizedSavePlanner(), process_group=upload, **options)
    if isinstance(response, AsyncSaveResponse):
        response.staging_completion.result()
        return response.upload_completion
    return response


def save_with_every_stager(base: Path) -> None:
    upload = dist.new_group(backend="gloo")
    for way, make in STAGERS.items():
        with named(way):
            live, stager = state(0), make()
            future = save_async(live, upload, checkpoint_id=base / way, async_stager=stager)
            overwrite(live)
            future.result()
            stager.close()
    for way in STAGING_WRITERS:
        with named(way):
            live = state(0)
            future = save_async(live, upload, storage_writer=WRITERS[way](base / f"writer, {way}"))  # the stager too
            overwrite(live)
            future.result()


@loaded_on
def test_every_stager_s_checkpoint_is_a_snapshot_and_loads_on_other_world_sizes(
    world: int, shared_tmp_path: Path
) -> None:
    run_ranks(2, save_with_every_stager, shared_tmp_path)
    ways = [*STAGERS, *(f"writer, {way}" for way in STAGING_WRITERS)]
    run_ranks(world, load_each, shared_tmp_path, ways)


def weights(seed: int) -> dict[str, Any]:
    """Quantized weights alone: torch pins the cached copies of plain tensors, which needs a GPU."""
    return {
        f"{name}.{key}": w
        for name, net in models(seed, names=SOME).items()
        for key, w in net.items()
        if "weight" in key
    }


def cached_stager_twice(base: Path) -> None:
    upload, stager = dist.new_group(backend="gloo"), BlockingAsyncStager(cache_staged_state_dict=True)
    for i in range(2):
        live = weights(10 + i)
        future = save_async(live, upload, checkpoint_id=base / str(i), async_stager=stager)
        overwrite(live)
        future.result()


def load_weights(base: Path) -> None:
    for i in range(2):
        target = weights(1)
        load(target, base / str(i))
        whole = {
            f"{name}.{key}": w
            for name in SOME
            for key, w in model(name, 10 + i).state_dict().items()
            if "weight" in key
        }
        assert_holds(target, whole)


def test_a_stager_that_caches_its_copies_serves_two_saves(shared_tmp_path: Path) -> None:
    run_ranks(2, cached_stager_twice, shared_tmp_path)
    for world in LOADED_ON:
        run_ranks(world, load_weights, shared_tmp_path)


@contextmanager
def processes_allowed() -> Iterator[None]:
    """A rank of the pool is a daemon, which may have no children; DCP's executor keeps one process for good."""
    process = multiprocessing.current_process()
    was, process.daemon = process.daemon, False
    try:
        with patch.dict(os.environ, MASTER_ADDR="127.0.0.1"):
            yield
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
        _async_process_executor._CHECKPOINT_PROCESS = None  # it belongs to this call's group
        process.daemon = was


def save_in_a_process(base: Path) -> str:
    in_a_process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    upload = dist.new_group(backend="gloo")
    older = base / "default"  # a checkpoint that is saved over: its files stay, beside those of their own names
    dcp.save(state(7), checkpoint_id=older, planner=QuantizedSavePlanner())
    before = {file.name for file in older.iterdir()}
    with processes_allowed():
        for way in ("default", "shared memory", "staged by a thread into shared memory"):
            with named(way):
                live, stager = state(0), STAGERS[way]()
                future = save_async(live, upload, checkpoint_id=base / way, async_stager=stager, **in_a_process)
                overwrite(live)
                future.result()
                stager.close()
        assert before < {file.name for file in older.iterdir()}
        live = state(0)
        future = save_async(live, upload, storage_writer=dcp.FileSystemWriter(base / "writer"), **in_a_process)
        overwrite(live)
        future.result()
        forgotten = dcp.async_save(state(0), checkpoint_id=base / "forgotten", process_group=upload, **in_a_process)
        return repr(forgotten.exception())


@pytest.mark.slow
@loaded_on
def test_a_process_s_checkpoint_is_a_snapshot_and_a_forgotten_planner_an_error(
    world: int, shared_tmp_path: Path
) -> None:
    errors = run_ranks(2, save_in_a_process, shared_tmp_path)
    ways = ["default", "shared memory", "staged by a thread into shared memory", "writer"]
    run_ranks(world, load_each, shared_tmp_path, ways)
    for error in errors:
        assert "save it by dcp.save with planner=QuantizedSavePlanner()" in error
    assert not (shared_tmp_path / "forgotten" / ".metadata").exists()


# -- on a GPU ----------------------------------------------------------------------------------------------------------

ON_GPU: dict[str, Callable[[], Any]] = {
    **STAGERS,
    "pinned": lambda: DefaultStager(StagingOptions(True, False, False, False)),
    "pinned, non-blocking": lambda: DefaultStager(StagingOptions(True, False, False, True)),
    "pinned, shared, by a thread, non-blocking": DefaultStager,
    "cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
}


def saves_of(stager: Any) -> int:
    """How many saves a stager is for: two, of which the second one reuses buffers, if torch's own survives it."""
    return 1 if isinstance(stager, DefaultStager) and not stages_twice() else 2


@cache
def stages_twice() -> bool:
    """Not so in torch 2.11, whose DefaultStager closes what it copies with after its first save."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        for _ in range(2):
            stager.stage({"an object": object()})
    except KeyError:
        return False
    finally:
        stager.close()
    return True


def test_a_stager_that_fails_at_its_second_save_is_torchs_own() -> None:
    assert stages_twice() is (tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11))


def save_from_gpu(base: Path) -> None:
    for way, make in ON_GPU.items():
        with named(way):
            live, stager = on_gpu(0), make()
            for i in range(saves_of(stager)):
                future = save_async(live, None, checkpoint_id=base / way / str(i), async_stager=stager)
                future.result()
                assert_holds(live, on_gpu(0))
            overwrite(live)
            stager.close()
            target = on_gpu(1)
            load(target, base / way / str(saves_of(stager) - 1))
            assert_holds(target, on_gpu(0))


def on_gpu(seed: int) -> dict[str, Any]:
    return {name: {key: w.cuda() for key, w in net.items()} for name, net in reference(seed, names=SOME).items()}


@pytest.mark.gpu
def test_every_stager_copies_from_the_gpu(shared_tmp_path: Path) -> None:
    run_ranks(1, save_from_gpu, shared_tmp_path, backend="nccl")
    for way in ON_GPU:
        target = reference(1, names=SOME)
        load(target, shared_tmp_path / way / "0")
        assert_holds(target, reference(0, names=SOME))


# -- Hugging Face storage ----------------------------------------------------------------------------------------------


def save_safetensors(base: Path) -> None:
    saved = models(0, names=SOME)
    names = [*expand(flat(saved)), "qtensor.manifest", "qtensor.checksums"]
    indices = {name: 1 + i % 2 for i, name in enumerate(names)}
    writers = {
        "one file": dcp.HuggingFaceStorageWriter(base / "one file", save_distributed=True),
        "two files": dcp.HuggingFaceStorageWriter(
            base / "two files", fqn_to_index_mapping=indices, thread_count=2, save_distributed=True
        ),
    }
    for way, writer in writers.items():
        with named(way):
            (base / way).mkdir(exist_ok=True)
            dcp.save(saved, storage_writer=writer, planner=QuantizedSavePlanner())
    upload = dist.new_group(backend="gloo")
    writer = dcp.HuggingFaceStorageWriter(base / "async", save_distributed=True)
    (base / "async").mkdir(exist_ok=True)
    future = save_async(saved, upload, storage_writer=writer)
    overwrite(saved)
    future.result()


def save_on_one_rank(path: Path) -> None:
    dcp.save(models(0, names=SOME), storage_writer=dcp.HuggingFaceStorageWriter(path), planner=QuantizedSavePlanner())


def load_safetensors(base: Path) -> None:
    for way in SAFETENSORS:
        with named(way):
            target = models(1, names=SOME)
            load(target, base / way, reader=dcp.HuggingFaceStorageReader(base / way, thread_count=2))
            assert_holds(target, reference(0, names=SOME))


def flat(state_dict: Any) -> dict[str, Any]:
    return dict(leaves(state_dict))


SAFETENSORS = ("one file", "two files", "async", "one rank")


@pytest.fixture(scope="module")
def safetensors_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base: Path = ranks.agreed(tmp_path_factory.mktemp("safetensors"))
    for way in SAFETENSORS:
        (base / way).mkdir(exist_ok=True)
    run_ranks(2, save_safetensors, base)
    run_ranks(1, save_on_one_rank, base / "one rank")
    return base


def test_every_way_of_writing_safetensors_loads_on_other_world_sizes(safetensors_checkpoints: Path) -> None:
    for world in LOADED_ON:
        run_ranks(world, load_safetensors, safetensors_checkpoints)


@pytest.mark.parametrize("way", SAFETENSORS)
def test_safetensors_alone_reads_parts_and_manifest(way: str, safetensors_checkpoints: Path) -> None:
    path = safetensors_checkpoints / way
    found: dict[str, list[Tensor]] = {}
    for file in sorted(path.glob("*.safetensors"), key=lambda file: file.name):  # shard 1 is rank 0's, and so on
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                found.setdefault(name, []).append(opened.get_tensor(name))
    manifest = read_manifest(dcp.HuggingFaceStorageReader(path))
    assert bytes(found["qtensor.manifest"][0].tolist()).decode().startswith('{"format_version":1')
    assert manifest.tensors.keys() == {
        name for name in flat(reference(0, names=SOME)) if "layers" in name and "weight" in name
    }
    for name, whole in flat(expand(reference(0, names=SOME))).items():
        pieces = found[name]
        joined = torch.cat(pieces) if whole.ndim else pieces[0]
        assert (joined.dtype, joined.shape, bits(joined)) == (whole.dtype, whole.shape, bits(whole)), name
    assert found["mxfp8_square.layers.0.weight.scale"][0].dtype == torch.uint8  # E8M0 codes, not a dtype few can read


def load_without_a_file(path: Path) -> None:
    target = models(1, names=SOME)
    load(target, path, reader=dcp.HuggingFaceStorageReader(path))


def test_a_lost_safetensors_file_is_an_error_on_every_rank(safetensors_checkpoints: Path) -> None:
    path = safetensors_checkpoints / "one file"
    for number in (1, 2):
        [file] = path.glob(f"shard-0000{number}-*.safetensors")
        gone = file.rename(file.with_suffix(".gone"))
        try:
            errors = run_ranks_catching(3, load_without_a_file, path)
        finally:
            gone.rename(file)
        assert all("layers.0.weight" in error for error in errors), (number, errors)


def save_a_number_as_safetensors(path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save(state(0), storage_writer=writer, planner=QuantizedSavePlanner())


def test_what_is_no_tensor_is_not_saved_as_safetensors(shared_tmp_path: Path) -> None:
    """Torch would write such entries in front of the header, and only a load would tell."""
    for error in run_ranks_catching(2, save_a_number_as_safetensors, shared_tmp_path):
        assert re.search(
            r": safetensors files hold tensors alone, and \d+ entries .* are none; save them elsewhere", error
        )
