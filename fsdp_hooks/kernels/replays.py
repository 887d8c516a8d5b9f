"""Calls that do the same again: new tensors, and launches of code that is known.

What stands around a launch (dtypes, shapes, tiles, grids, constants) follows from how the given tensors lie in memory,
never from their values. So a call whose tensors lie as those of an earlier one launches the same code with the same
numbers, and only addresses are new. The earlier call is heard: which launches it made, with what, and which operations
of torch. If its launches took tensors that were given and tensors that it made, and torch did nothing but make these
and look at memory in other ways, later calls are a `Replay`: the same tensors made, the same code launched, in order.

    kernels.decode(parts)    layout of the parts known?  -> replay
                             else: the format's function, heard, and kept if it can be replayed

Anything else (a fill, a copy, memory that came from elsewhere) is never kept.
"""

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel
from fsdp_hooks.torch_private import TorchDispatchMode

MOST = 512  # layouts of a kernel that are kept; weights have a handful, inputs may have any number of rows
ALIGNED = 16  # bytes; Triton compiles other code for other addresses

aten = torch.ops.aten
MAKE = {aten.empty.memory_format}
LOOK = {getattr(aten, name).default for name in ("view", "_unsafe_view", "expand", "detach", "unsqueeze")}
LOOK |= {aten.view.dtype, aten.slice.Tensor}
Layout = tuple[Any, ...]


class Launch(NamedTuple):
    """A launch as it was made: compiled code, its grid, the arguments, and the constants behind them."""

    code: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: tuple[Any, ...]


class Heard:
    """What a call did, so far."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.made: list[Tensor] = []  # held, so that no two of them have the same address
        self.others = False  # whether it did what can not be repeated


_hearing = threading.local()


def hear(launch: Launch | None) -> None:
    """Note a launch, if somebody listens in this thread; None: one that can not be repeated."""
    heard = getattr(_hearing, "heard", None)
    if heard is None:
        return
    if launch is None:
        heard.others = True
    else:
        heard.launches.append(launch)


class _Listening(TorchDispatchMode):
    def __init__(self, heard: Heard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what changes nothing (`to` the dtype that it has) arrives here whole
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        if func in MAKE:
            self.heard.made.append(result)
        self.heard.others |= func not in MAKE | LOOK
        return result


@contextmanager
def listening() -> Iterator[Heard]:
    """Hear what the call inside does: its launches, and torch's operations where it is `attended`."""
    before, heard = getattr(_hearing, "heard", None), Heard()
    _hearing.heard = heard
    try:
        yield heard
    finally:
        _hearing.heard = before


def attended() -> AbstractContextManager[object]:
    """Have torch's operations inside heard, if somebody listens in this thread.

    Code written by hand enters it, and nothing else does: where that code fails, the compiler takes its place, which
    must not be watched.
    """
    heard = getattr(_hearing, "heard", None)
    return nullcontext() if heard is None else _Listening(heard)


def replayed(kernel: Kernel, given: Sequence[Tensor], call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return new tensors as `call` makes them from `given` by the code of a kernel written by hand.

    Args:
        kernel: keeps what is known of it.
        given: all that the call reads.
        call: what is heard and, from the second time on, replayed.
    """
    layout = layout_of(given)
    if layout is None:
        return call()
    known = kernel.known.get(layout)
    if known is not None:
        again = known.again(given)
        if again is not None:
            return again  # type: ignore[no-any-return]
    if layout in kernel.known or len(kernel.known) >= MOST:
        return call()
    tries = kernel.tries
    with listening() as heard:
        made = call()
    # a call in which the code was tried made other launches, too: the next one is heard again
    if kernel.tries != tries:
        return made
    kernel.known[layout] = replay_of(heard, given, made)
    return made


class Again(NamedTuple):
    """A launch of a call that was heard."""

    code: Any
    grid: tuple[int, int, int]
    order: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # its tensors, of those given and made
    rest: tuple[Any, ...]  # numbers and constants


class Replay(NamedTuple):
    """A call that was heard."""

    launches: tuple[Again, ...]
    made: tuple[tuple[torch.Size, torch.dtype], ...]
    returned: int  # how many of those made; others are read and written by the launches alone

    def again(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """Return what the call returns for tensors of the same layout; None if new tensors are not aligned."""
        device = given[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.made]
        for tensor in made:
            if tensor.data_ptr() % ALIGNED:
                return None
        tensors = [*given, *made]
        for code, grid, order, rest in self.launches:
            code[grid](*order(tensors), *rest)
        return made[: self.returned]


def layout_of(given: Sequence[Tensor]) -> Layout | None:
    """Return how tensors lie in memory; None unless all are plain, contiguous and aligned, on the current device."""
    device = given[0].get_device()
    if device != torch.cuda.current_device():
        return None
    found: list[Any] = [device]
    for tensor in given:
        if (
            type(tensor) is not Tensor
            or tensor.data_ptr() % ALIGNED
            or not tensor.is_contiguous()
            or tensor.get_device() != device
        ):
            return None
        found += (tensor.shape, tensor.dtype)
    return tuple(found)


def replay_of(heard: Heard, given: Sequence[Tensor], made: Sequence[Tensor]) -> Replay | None:
    """Return the replay of a call that took `given` and returned `made`; None if it can not be replayed."""
    if heard.others or not heard.launches:
        return None
    returned = {_memory(tensor) for tensor in made}
    between = [tensor for tensor in heard.made if _memory(tensor) not in returned]
    known = [_memory(tensor) for tensor in (*given, *made, *between)]
    # which of two that share memory a launch was given, nobody could tell
    if len({*known}) != len(known) or any(address % ALIGNED for address, _ in known):
        return None
    found, reached = [], set()
    for code, grid, args, constants in heard.launches:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        numbers = args[len(tensors) :]
        if any(isinstance(arg, Tensor) for arg in numbers) or any(_memory(each) not in known for each in tensors):
            return None
        places = [known.index(_memory(tensor)) for tensor in tensors]
        reached |= {*places}
        # operator.itemgetter of one place returns no tuple; a launch has two tensors at least
        found.append(Again(code, grid, operator.itemgetter(*places), (*numbers, *constants)))
    # each new tensor is what the launches wrote, and begins where it was made
    if not {*range(len(given), len(known))} <= reached or not all(tensor.is_contiguous() for tensor in made):
        return None
    return Replay(tuple(found), tuple((tensor.shape, tensor.dtype) for tensor in (*made, *between)), len(made))


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes
