"""The ranks of a stream: trainers whose weights follow from the version alone, a receiver that compares all bytes."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.soak_jobs import GROUP_TIMEOUT, Receive, Send
from dcp_adapters import SharedMemoryReceiver, SharedMemorySender, WeightStream, WeightStreamError, apply_deltas
from qtensor import Float8CurrentScaling, QuantizedTensor, quantize

RECIPE = Float8CurrentScaling()
SHAPE = (160, 128)
NAMES = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(4)]
CONFIG = {"model_type": "tiny"}
BUCKET = 30_000  # bytes: more than one bucket, each of more than one tensor


def weights(version: int) -> dict[str, QuantizedTensor]:
    """Whole: those of the version before, but for one column in nine."""
    found = {}
    for number, name in enumerate(NAMES):
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
        x[:, version % 9 :: 9] *= -1.5
        found[name] = quantize(x.bfloat16(), RECIPE)
    return found


def send(conn: Connection, job: Send) -> None:
    """A trainer: version 1 whole, the others as deltas."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) for name, full in weights(1).items()
    }
    stream = WeightStream(state, config=CONFIG, keep_last=True, bucket_bytes=BUCKET)
    listening = SharedMemorySender(job.address, timeout=GROUP_TIMEOUT) if dist.get_rank() == 0 else None
    with listening or contextlib.nullcontext() as sender:
        dist.barrier()
        conn.send(("go", ""))
        started = time.perf_counter()
        stream.send(sender)
        conn.send(("version", 1))
        for version in range(2, job.versions + 1):
            for name, full in weights(version).items():
                state[name].copy_(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
            stream.send_since(sender, version - 1)
            conn.send(("version", version))
    conn.send(("streamed", str(time.perf_counter() - started)))


def receive(conn: Connection, job: Receive) -> None:
    """An engine: what it holds is a version at any moment, or it says where it is not."""
    held: dict[str, Tensor] = {}
    started, version = time.perf_counter(), 0
    conn.send(("go", ""))
    try:
        with SharedMemoryReceiver(job.address, timeout=GROUP_TIMEOUT, patience=GROUP_TIMEOUT) as receiver:
            while version < job.versions:
                with receiver.receive() as incoming:
                    came = {name: tensor.clone() for name, tensor in held.items()}
                    if incoming.base is None:
                        for bucket in incoming:
                            came |= {name: tensor.clone() for name, tensor in bucket.items()}
                    else:
                        apply_deltas(came, [incoming.delta()])
                held, version = came, receiver.version
                conn.send(_compared(held, version))
    except WeightStreamError as error:
        if held:
            conn.send(_compared(held, version))
        conn.send(("raised", f"{type(error).__name__}: {error}"))
        return
    conn.send(("streamed", str(time.perf_counter() - started)))


def _compared(held: dict[str, Tensor], version: int) -> tuple[str, Any]:
    """("version", number) if every byte is that version's, else ("wrong", names)."""
    expected: dict[str, Tensor] = {}
    for name, full in weights(version).items():
        expected[name] = full.payload
        expected[f"{name}_scale"] = full.scale
    wrong = [name for name, part in expected.items() if name not in held or _bytes(held[name]) != _bytes(part)]
    wrong += sorted(held.keys() - expected.keys())
    return ("wrong", f"version {version}: {', '.join(wrong)}") if wrong else ("version", version)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
