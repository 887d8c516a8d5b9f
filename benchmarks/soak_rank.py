"""One rank of the soak: state that is a function of the step alone, a save that dies at a moment, a load that compares.

A rank is a process that does one job, tells the soak over a pipe how far it is ("at", phase), and is gone. What the
pipe holds outlives the rank, so its last message says what a SIGKILL interrupted.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks import soak_streaming as streaming
from benchmarks.soak_jobs import (
    COMMIT,
    COMMITTED,
    FINISH_PLAN,
    GLOBAL_PLAN,
    GROUP_TIMEOUT,
    LOCAL_PLAN,
    PLANNED,
    PROCESS,
    RENAME,
    SET_UP,
    STAGED,
    STAGING,
    WRITE,
    WRITTEN,
    Job,
    Place,
    Receive,
    Save,
    Send,
)
from dcp_adapters import AtomicFileSystemWriter, QuantizedLoadPlanner, QuantizedSavePlanner, expand, read_manifest
from dcp_adapters.save.atomic_writer import AtomicFiles
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize

TIMEOUT = timedelta(seconds=GROUP_TIMEOUT)
RECIPES = {
    "float8_row": Float8CurrentScaling(),
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8_square": MXFP8BlockScaling(blocks="square"),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4_square": NVFP4BlockScaling(blocks="square"),
}
SHAPE = (160, 128)  # cut by 3 ranks off the 32-blocks, too

torch.compiler.list_backends()  # imports what DTensor imports at its first use: once, before the ranks are forked


def run(conn: Connection, place: Place, job: Job) -> None:
    """The life of a rank."""
    gc.disable()  # one pass over the objects that importing torch made costs more than the job
    logging.disable(logging.WARNING)  # DCP logs a traceback for a missing .metadata
    warnings.simplefilter("ignore")  # and warns where it overwrites
    torch.set_num_threads(1)
    if isinstance(job, Receive):
        streaming.receive(conn, job)
        conn.close()
        os._exit(0)
    store = dist.FileStore(str(place.store), place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
    try:
        if isinstance(job, Save):
            _save(conn, job)
        elif isinstance(job, Send):
            streaming.send(conn, job)
        else:
            for path in job.paths:
                conn.send(_loaded(path))
    except BaseException as error:  # noqa: BLE001 - the soak judges it
        conn.send(("raised", f"{type(error).__name__}: {error}"))
    conn.close()
    os._exit(0)  # a group that lost a rank cannot be shut down cleanly


# -- state -------------------------------------------------------------------------------------------------------------


def state(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Weights of every recipe, two optimizer states for each, a bias, and values that are no tensors.

    An even step is the odd one before it but for some columns, which is what a delta to that one stores.
    """
    model, optim = {}, {}
    for i, (name, recipe) in enumerate(RECIPES.items()):
        generator = torch.Generator().manual_seed(1000 * ((step + 1) // 2) + i)
        x = torch.randn(SHAPE, generator=generator)
        if step % 2 == 0:
            x[:, ::9] *= -1.5
        model[f"{name}.weight"] = _placed(quantize(x.bfloat16(), recipe), mesh)
        model[f"{name}.bias"] = x[0].bfloat16()
        optim[f"{name}.master"] = _placed(x, mesh)
        optim[f"{name}.exp_avg"] = _placed(x.square(), mesh)
    return {"model": model, "optim": optim, "step": step, "cursor": f"batch {step}"}


def _placed(full: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)


def contents(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> the bytes of this rank's piece of every tensor, parts by their own names; other leaves as they are."""
    found: dict[str, Any] = {}
    for section, leaves in expand(state_dict).items():
        for name, leaf in leaves.items() if isinstance(leaves, Mapping) else [("", leaves)]:
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            is_tensor = isinstance(local, Tensor)
            found[f"{section}.{name}"] = (
                bytes(local.contiguous().view(-1).view(torch.uint8).numpy()) if is_tensor else local
            )
    return found


# -- saving ------------------------------------------------------------------------------------------------------------


class Trace:
    """Tells the soak each phase, and dies at the moment it is asked to."""

    def __init__(self, conn: Connection, moment: tuple[str, int] | None) -> None:
        self.conn, self.moment, self.passed = conn, moment, dict[str, int]()

    def at(self, phase: str) -> None:
        self.passed[phase] = self.passed.get(phase, 0) + 1
        self.conn.send(("at", phase))
        if self.moment is not None and self.moment == (phase, self.passed[phase]):
            os.kill(os.getpid(), signal.SIGKILL)


class TracedPlanner(QuantizedSavePlanner):
    """The planner, with a trace."""

    def __init__(self, trace: Trace, **options: Any) -> None:
        super().__init__(**options)
        self.trace = trace

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: FBT001, FBT002 - DCP's signature
        self.trace.at(SET_UP)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self.trace.at(LOCAL_PLAN)
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.trace.at(GLOBAL_PLAN)
        planned = super().create_global_plan(all_plans)
        self.trace.at(PLANNED)
        return planned

    def finish_plan(self, new_plan: Any) -> Any:
        self.trace.at(FINISH_PLAN)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self.trace.at(WRITE)
        return super().resolve_data(write_item)


class TracedFiles(AtomicFiles):
    """The file system, with a trace of the one rename of a save."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(syncs=True)
        self.trace = trace

    def rename(self, path: Any, new_path: Any) -> None:
        self.trace.at(RENAME)
        super().rename(path, new_path)
        self.trace.at(COMMITTED)


class TracedWriter(AtomicFileSystemWriter):
    """The writer, with a trace."""

    def __init__(self, path: Path, trace: Trace) -> None:
        super().__init__(path)
        self.trace, self.fs = trace, TracedFiles(trace)

    def stage(self, state_dict: Any) -> Any:
        self.trace.at(STAGING)
        staged = super().stage(state_dict)
        self.trace.at(STAGED)
        return staged

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner)
        self.trace.at(WRITTEN)
        return results

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self.trace.at(COMMIT)
        super().finish(*args, **kwargs)


class TracedStager(DefaultStager):
    """The stager that async_save uses by default, with a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(StagingOptions(False, False, False, False))
        self.trace = trace

    def stage(self, *args: Any, **kwargs: Any) -> Any:
        self.trace.at(STAGING)
        staged = super().stage(*args, **kwargs)
        self.trace.at(STAGED)
        return staged


def _save(conn: Connection, job: Save) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    upload = dist.new_group(backend="gloo", timeout=TIMEOUT) if job.mode != "sync" else None
    in_process: dict[str, Any] = {}
    if job.mode == PROCESS:
        in_process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "process_group": upload}
        _start_uploader(conn, state(job.good_step, mesh), job, in_process)
    else:
        dcp.save(state(job.good_step, mesh), checkpoint_id=job.good, planner=QuantizedSavePlanner())
    live, delta_to = state(job.step, mesh), job.good if job.delta else None
    trace = Trace(conn, job.moment)
    options: dict[str, Any] = {
        "storage_writer": TracedWriter(job.path, trace),
        "planner": TracedPlanner(trace, delta_to=delta_to),
    }
    if in_process:  # whose planner and writer are pickled
        writer = AtomicFileSystemWriter(job.path)
        options = {"storage_writer": writer, "planner": QuantizedSavePlanner(delta_to=delta_to), **in_process}
    dist.barrier()
    conn.send(("go", ""))
    started = time.perf_counter()
    if job.mode == "sync":
        dcp.save(live, **options)
    else:
        if job.mode == "async with a stager":
            options["async_stager"] = TracedStager(trace)
        future = dcp.async_save(live, **{"process_group": upload, **options})
        _overwrite(live)  # training goes on
        future.result()
    conn.send(("saved", str(time.perf_counter() - started)))


def _start_uploader(conn: Connection, good: Any, job: Save, options: dict[str, Any]) -> None:
    """Save the good checkpoint by a process of this rank's own, which stays for the next save; tell which it is."""
    multiprocessing.current_process().daemon = False  # a daemon may have no children
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dcp.async_save(good, checkpoint_id=job.good, planner=QuantizedSavePlanner(), **options).result()
    (uploader,) = multiprocessing.active_children()
    conn.send(("uploader", uploader.pid))


def _overwrite(state_dict: Mapping[str, Any]) -> None:
    for leaf in expand(state_dict["model"]).values():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        local.view(-1).view(torch.uint8).fill_(0xA5)


# -- loading -----------------------------------------------------------------------------------------------------------


def _loaded(path: Path) -> tuple[str, Any]:
    """("holds", step) if every byte is that step's, ("refused", why) if it does not load, else ("wrong", names)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = state(0, mesh)
    try:
        dcp.load(target, checkpoint_id=path, planner=QuantizedLoadPlanner(verify_checksums=True))
    except BaseException as error:  # noqa: BLE001 - DCP's CheckpointException is no Exception
        try:
            read_manifest(path)
        except FileNotFoundError as manifest_error:
            return "refused", f"{error}\nread_manifest: {manifest_error}"
        return "refused", f"{error}\nread_manifest: no error"
    found, expected = contents(target), contents(state(target["step"], mesh))
    wrong = [name for name in expected if found[name] != expected[name]]
    return ("wrong", f"step {target['step']}: {', '.join(wrong)}") if wrong else ("holds", target["step"])
