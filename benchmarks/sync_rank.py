"""One of the two trainer ranks of benchmarks/sync.py: all ways from shards to an engine live in it and take turns.

The engine is a sink on rank 0 that takes bytes at the speed of a link: a bucket is handed over when the link is free,
and the next one may be made while it is carried.
"""

import json
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import Contender, interleaved
from dcp_adapters import WeightStream, export_hf
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.model.model_init import quantized_model_init

RECIPES: dict[str, Any] = {"mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
BASE = "full_tensor, bf16"
CONFIG = {"model_type": "tiny"}
TMPFS = Path("/dev/shm")


class BytesAlive(TorchDispatchMode):
    """The most bytes alive at once in storages that operations inside have made, and the collectives that they are."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives[func.__name__.split(".")[0]] += 1
        result = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages(args)}
        for storage in _storages([result]):
            key = storage.data_ptr()
            if storage.nbytes() and key not in self.alive and key not in given:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Of the plain tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _storages(value)
        elif isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and not value.is_meta:
            yield value.untyped_storage()


class Block(nn.Module):
    """The linears of a decoder layer, and its norms; nobody runs it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        shapes = {"qkv": (width, width), "o": (width, width), "up": (width, 3 * width), "down": (3 * width, width)}
        for name, (columns, rows) in shapes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))


def model_of(recipe: str | None, width: int, layers: int) -> Any:
    """Layers, each an FSDP module, quantized or in bf16."""
    torch.manual_seed(0)
    with quantized_model_init(RECIPES.get(recipe or "", MXFP8BlockScaling()), enabled=recipe is not None):
        net = nn.Module()
        net.layers = nn.ModuleList(Block(width) for _ in range(layers))
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


class Link:
    """Takes buckets at a speed in Mbit/s; None: at once."""

    def __init__(self) -> None:
        self.mbit_s: float | None = None
        self.sent = 0
        self._free = 0.0

    def send(self, nbytes: int) -> None:
        """Wait until the link is free, then let it carry the bytes while the caller goes on."""
        self.sent += nbytes
        if self.mbit_s is not None:
            now = time.perf_counter()
            time.sleep(max(0.0, self._free - now))
            self._free = max(now, self._free) + nbytes * 8 / (self.mbit_s * 1e6)

    def done(self) -> None:
        """Wait until everything is carried."""
        time.sleep(max(0.0, self._free - time.perf_counter()))


def full_tensors(model: Any, link: Link) -> None:
    """What stacks do: one parameter after the other, whole, on all ranks."""
    for param in model.parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        if dist.get_rank() == 0:
            link.send(whole.nbytes)


def streamed(stream: WeightStream, link: Link) -> None:
    """Bucket by bucket."""
    for bucket in stream:
        if dist.get_rank() == 0:
            link.send(sum(tensor.nbytes for tensor in bucket.values()))


def exported(model: Any, folder: str, link: Link) -> None:
    """Through files in memory, which are then sent."""
    out = Path(folder) / "out"
    export_hf(model, out, config=CONFIG, progress=False)
    if dist.get_rank() == 0:
        link.send(sum(file.stat().st_size for file in out.glob("*.safetensors")))
        shutil.rmtree(out)


def measure(rank: int, store: str, out: str, options: dict[str, Any]) -> None:
    """All ways in turns, without a limit and on the link; rank 0 writes the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    width, layers = options["width"], options["layers"]
    models = {name: model_of(name, width, layers) for name in RECIPES}
    dense, link = model_of(None, width, layers), Link()
    with tempfile.TemporaryDirectory(dir=TMPFS if TMPFS.is_dir() else None) as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        ways: dict[str, Any] = {BASE: lambda: full_tensors(dense, link)}
        for name, model in models.items():
            stream = WeightStream(model, config=CONFIG, bucket_bytes=options["bucket_bytes"])
            ways[f"stream, {name}"] = lambda stream=stream: streamed(stream, link)
            ways[f"export, {name}"] = lambda model=model: exported(model, shared[0], link)
        figures = {name: _counted(way, link) for name, way in ways.items()}
        seconds = {}
        for label, mbit_s in (("no limit", None), ("link", options["mbit_s"])):
            link.mbit_s = mbit_s
            turns = {name: Contender(call=_to_the_end(way, link), before=dist.barrier) for name, way in ways.items()}
            seconds[label] = interleaved(turns, options["rounds"], warm_up=mbit_s is None)
        dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps({"figures": figures, "seconds": seconds}))
    dist.destroy_process_group()


def _to_the_end(way: Any, link: Link) -> Any:
    def call() -> None:
        way()
        link.done()
        dist.barrier()

    return call


def _counted(way: Any, link: Link) -> dict[str, int]:
    link.sent = 0
    with BytesAlive() as alive:
        way()
    gathers = sum(count for name, count in alive.collectives.items() if "gather" in name and name != "allgather_")
    return {"sent": link.sent, "peak": alive.most, "gathers": gathers}
