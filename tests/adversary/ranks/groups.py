"""The process groups of simulated ranks: the collectives that are used, between the threads of one world.

torch's own group for threads (multi_threaded_pg) keeps the state of torch.distributed apart for each thread, which is
used here, too; its collectives know no faults, and wait for real.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import _async_thread_executor
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from tests.adversary.ranks.world import NAME, Beside, Call, World


class Work(dist._Work):  # type: ignore[name-defined,misc]
    """A collective under way."""

    def __init__(self, world: World, call: Call, place: int) -> None:
        super().__init__()
        self._parts = world, call, place

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        world, call, place = self._parts
        world.wait(call, place)
        return True

    def is_completed(self) -> bool:
        world, call, place = self._parts
        return world._done(call, place)


class _All(dist._Work):  # type: ignore[name-defined,misc]
    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait(timeout) for work in self._works)


class Group(dist.ProcessGroup):
    """A process group of a world; only the methods that are used."""

    def __init__(self, key: str, place: int, size: int, *, waits: bool = True) -> None:
        super().__init__(place, size)
        self._waits = waits
        self._key, self._place, self._size, self._number = key, place, size, 0
        self._world, _ = World.here()

    @property
    def _device_types(self) -> list[torch.device]:  # asynchronous saves ask for a CPU among them
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._place

    @property
    def pg_name(self) -> str:
        return str(c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _call(self, kind: str, given: Any, sign: Any, move: Any, root: int | None = None, *, to: bool = False) -> Work:
        everybody = range(self._size)

        def needs(place: int) -> Any:
            if root is None:
                return everybody
            if to:
                return everybody if place == root else (place,)
            return (root, place)

        number, self._number = self._number, self._number + 1
        call = Call(self._key, kind, self._size, move, needs, whole=root is None, waits=self._waits)
        sign = (kind, root, sign)
        call = self._world.join(call, self._place, number, given, sign)
        return Work(self._world, call, self._place)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        reduce = _REDUCES[_op(opts)]
        found: list[Tensor] = []

        def move(given: dict[int, Tensor], place: int) -> None:
            if not found:
                found.append(reduce(torch.stack([given[each].detach() for each in sorted(given)])))
            given[place].detach().copy_(found[0])

        return self._call("all_reduce", tensor, (tuple(tensor.shape), tensor.dtype, _op(opts)), move)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return works[-1] if len(works) == 1 else _All(works)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        del opts
        (out,), (own,) = outputs, inputs
        found: list[Tensor] = []

        def move(given: dict[int, Any], place: int) -> None:
            if not found:
                found.extend(given[each][1].detach().clone() for each in sorted(given))
            for into, value in zip(given[place][0], found, strict=True):
                into.detach().copy_(value)

        return self._call("all_gather", (out, own), (tuple(own.shape), own.dtype), move)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.allgather([list(torch.chunk(output, self._size))], [own], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.all_gather_single(out, own, opts) for out, own in zip(outputs, inputs, strict=True)]
        return works[-1] if len(works) == 1 else _All(works)

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        held = tensor.detach().clone() if self._place == opts.rootRank else None

        def move(given: dict[int, Any], place: int) -> None:
            if place != opts.rootRank:
                given[place][0].detach().copy_(given[opts.rootRank][1])

        return self._call("broadcast", (tensor, held), (tensor.numel(), tensor.dtype), move, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        held = [one.detach().clone() for one in inputs[0]] if self._place == opts.rootRank else None
        (out,) = outputs

        def move(given: dict[int, Any], place: int) -> None:
            given[place][0].detach().copy_(given[opts.rootRank][1][place])

        return self._call("scatter", (out, held), (tuple(out.shape), out.dtype), move, opts.rootRank)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        (own,) = inputs
        out = outputs[0] if self._place == opts.rootRank else None

        def move(given: dict[int, Any], place: int) -> None:
            if place == opts.rootRank:
                for number, into in enumerate(given[place][0]):
                    into.detach().copy_(given[number][1])

        return self._call(
            "gather",
            (out, own.detach().clone() if out is None else own),
            (tuple(own.shape), own.dtype),
            move,
            opts.rootRank,
            to=True,
        )

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """To one rank; what the others gave is in no state that counts afterwards, as in gloo."""
        opts = opts or dist.ReduceOptions()
        (own,), combine = tensors, _REDUCES[_op(opts)]

        def move(given: dict[int, Any], place: int) -> None:
            into = given[place][0].detach()
            if place == opts.rootRank:
                into.copy_(combine(torch.stack([given[each][1] for each in sorted(given)])))
            else:
                into.fill_(77)

        sign = (tuple(own.shape), own.dtype, _op(opts))
        return self._call("reduce", (own, own.detach().clone()), sign, move, opts.rootRank, to=True)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        (out,), (own,) = outputs, inputs
        reduce = _REDUCES[_op(opts)]

        def move(given: dict[int, Any], place: int) -> None:
            stacked = torch.stack([given[each][1][place].detach() for each in sorted(given)])
            given[place][0].detach().copy_(reduce(stacked))

        sign = tuple(tuple(one.shape) for one in own), out.dtype, _op(opts)
        return self._call("reduce_scatter", (out, own), sign, move)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter([output], [list(torch.chunk(own, self._size))], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.reduce_scatter_single(out, own, opts) for out, own in zip(outputs, inputs, strict=True)]
        return works[-1] if len(works) == 1 else _All(works)

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Work:
        del opts
        return self._call("barrier", None, (), lambda given, place: None)


def _op(options: Any) -> str:
    return str(getattr(options.reduceOp, "op", options.reduceOp)).removeprefix("RedOpType.")


_REDUCES: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "AVG": lambda stacked: stacked.mean(0),
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
}


class _Executor:
    """The thread in which an asynchronous save uploads: one beside that of its rank."""

    def __init__(self, **_: Any) -> None:
        """One thread for each save, whatever is asked for."""

    def submit(self, work: Callable[..., Any], **given: Any) -> Beside:
        return World.here()[0].beside(partial(work, **given))

    def shutdown(self, *, wait: bool) -> None:
        """Its thread ends by itself."""


def _made(options: Any, _: Any) -> Group:
    """The group of these ranks; its name tells it among those of its world."""
    ranks = options.global_ranks_in_group
    return Group(f"{options.group_id} of {ranks}", options.group_rank, options.group_size)


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """torch.distributed keeps its state apart for each thread."""
    before = c10d._world
    c10d._world = ThreadLocalWorld()
    plugin = dist.Backend._BackendPlugin(_made, True)  # torch's extended options
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        plugins = mock.patch.dict(dist.Backend._plugins, {NAME.upper(): plugin})
        uploads = mock.patch.object(_async_thread_executor, "ThreadPoolExecutor", _Executor)
        logging.disable()  # torch's traces of errors that are meant
        with plugins, uploads, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        c10d._world = before
        debug._clear_sharding_prop_cache()
