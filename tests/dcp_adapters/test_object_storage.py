"""Checkpoints in object storage: DCP's fsspec writer and reader, in memory and against an S3 server on this machine.

The server is moto's, on a loopback port of its own; what AWS clients read from the environment is set in the ranks that
talk to it and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, read_manifest
from tests import ranks
from tests.dcp_adapters.cases import assert_holds, load, models, reference
from tests.dcp_adapters.fsspec_storage import FsspecReader, FsspecWriter
from tests.ranks import run_ranks, run_ranks_catching

SOME = {"float8_tensor": None, "nvfp4": None, "mxfp8": None}


def state(seed: int) -> dict[str, Any]:
    return {"model": models(seed, names=SOME), "step": seed + 1}


def full(seed: int) -> dict[str, Any]:
    return {"model": reference(seed, names=SOME), "step": seed + 1}


def through_memory() -> None:
    """Memory belongs to one process, so one process writes it and reads it."""
    url = "memory://checkpoints/step-1"
    dcp.save(state(0), storage_writer=FsspecWriter(url, sync_files=False), planner=QuantizedSavePlanner())
    dcp.save(state(0), checkpoint_id=f"{url}-by-url", planner=QuantizedSavePlanner())
    for where in (url, f"{url}-by-url"):
        target = state(1)
        load(target, None, reader=FsspecReader(where))
        assert_holds(target, full(0))
        unsharded = full(1)
        dcp.load(unsharded, storage_reader=FsspecReader(where), planner=QuantizedLoadPlanner())
        assert_holds(unsharded, full(0))
        names = {f"model.{name}.layers.{i}.weight" for name in SOME for i in range(3)}
        assert read_manifest(FsspecReader(where)).tensors.keys() == names
    fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


def test_a_checkpoint_in_memory_loads() -> None:
    run_ranks(1, through_memory)


# -- S3 ----------------------------------------------------------------------------------------------------------------


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


@contextmanager
def bucket(endpoint: str) -> Iterator[str]:
    """The URL of a bucket that the first rank makes."""
    with patch.dict(os.environ, environment(endpoint)):
        s3 = fsspec.filesystem("s3")
        if dist.get_rank() == 0:
            s3.mkdirs("checkpoints", exist_ok=True)
        dist.barrier()
        yield "s3://checkpoints"
        s3.clear_instance_cache()


def save_to_s3(endpoint: str) -> None:
    with bucket(endpoint) as url:
        writer = FsspecWriter(f"{url}/sync", thread_count=2, sync_files=False)  # a sync would be of the whole machine
        dcp.save(state(0), storage_writer=writer, planner=QuantizedSavePlanner())
        upload = dist.new_group(backend="gloo")
        dcp.async_save(
            state(3), checkpoint_id=f"{url}/async", planner=QuantizedSavePlanner(), process_group=upload
        ).result()


def load_from_s3(endpoint: str) -> None:
    with bucket(endpoint) as url:
        for way, seed in {"sync": 0, "async": 3}.items():
            target = state(1)
            load(target, None, reader=FsspecReader(f"{url}/{way}"))
            assert_holds(target, full(seed))
        read_manifest(FsspecReader(f"{url}/sync"))


def load_from_damaged_s3(endpoint: str) -> str:
    with bucket(endpoint) as url:
        if dist.get_rank() == 0:
            fsspec.filesystem("s3").rm(f"{url}/sync/__1_0.distcp")
        dist.barrier()
        target = state(1)
        try:
            load(target, None, reader=FsspecReader(f"{url}/sync"))
        finally:
            assert_holds(target, full(1))
    return ""


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="the S3 file system is not installed")
    server = pytest.importorskip("moto.server", reason="the S3 server is not installed").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    yield ranks.agreed(f"http://{host}:{port}")
    server.stop()


@pytest.mark.full
def test_s3_holds_checkpoints_that_load_on_other_world_sizes(s3_endpoint: str) -> None:
    run_ranks(2, save_to_s3, s3_endpoint)
    for world in (1, 3):
        run_ranks(world, load_from_s3, s3_endpoint)
    for error in run_ranks_catching(2, load_from_damaged_s3, s3_endpoint):
        assert "FileNotFoundError" in error
        assert "__1_0.distcp" in error
