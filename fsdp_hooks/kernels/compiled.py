"""Pure tensor functions that run eagerly or compiled, with the same bytes either way.

A `Kernel` is one definition in torch ops. For large inputs inductor compiles it (to C++ on the CPU, Triton on a GPU)
and fuses what eager ops do in a dozen passes over memory. Small inputs run it eagerly, since a compiled call checks its
guards first. `use_kernels` chooses between the two for the whole process:

    auto       compiled from COMPILED_FROM elements on. Eager for fewer elements, inside somebody else's torch.compile
               (whose graph the definition joins), under a mode that sees operations, and on devices without a
               compiler. Once the compiler failed: eager from then on, with one warning
    compiled   compiled wherever that is possible, and a failed compilation raises
    eager      never compiled

Every kernel has its own code object, so that dynamo gives it a cache and a recompilation limit of its own. On the CPU
shapes are dynamic: one compilation serves all shapes, or two if the dims of the first tensor were equal, and one more
for a dim of size 1. On a GPU only the number of rows (dim 0) is: a dynamic row length makes inductor divide 64-bit
numbers for each element, and load and store one element at a time. So there each row length is compiled once, up to
LAYOUTS of them, and the dynamic code serves those that come later. inductor stores compiled code in its cache on disk,
where other processes and ranks find it. The code is for vectors of one width, which inductor leaves out of the key: a
machine with other vectors that shares the cache would write beyond the output, or only half of it. As an option the
width is part of the key, so it is always said, even where inductor would choose the same.

A kernel may come with code written by hand for a GPU, which then runs in place of what inductor would make, under the
same policy. If it fails, inductor's takes its place, with one warning for each such kernel; in mode "compiled" it
raises. So it does on one device where its bytes are not those of the definition, which is tried there before its first
call of each kind (probes.py).
"""

import logging
import os
import threading
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_hooks.kernels.probes import Written, can_try, where
from fsdp_hooks.torch_private import below_autograd, is_tracing, is_watched, mark_rows_dynamic, one_dispatch_state

LOG = logging.getLogger(__name__)

MODES = ("auto", "compiled", "eager")
COMPILED_FROM = 2**18  # elements
COMPILED_ON = frozenset({"cpu", "cuda", "xpu"})
BY_HAND_ON = frozenset({"cuda"})
LAYOUTS = 16  # for which a kernel is compiled on a GPU; a model has a handful of row lengths
VARIABLE = "QTENSOR_KERNELS"
VECTORS = {"AVX512": 512, "AVX2": 256}  # bits that inductor takes by itself, by what torch says of an x86 CPU


class use_kernels:  # noqa: N801 - reads as a statement: use_kernels("eager")
    """Choose, for this process, whether numeric kernels are compiled; the bytes are the same.

    Args:
        mode: "auto" (the default: compiled for large tensors, if there is a compiler), "compiled" (compiled for
            tensors of any size, and a failing compiler raises) or "eager". The environment variable QTENSOR_KERNELS
            sets the mode that a process begins with.

    Raises:
        ValueError: another mode.

    Example:
        ```python
        >>> with use_kernels("eager"):  # until the end of the block; use_kernels("eager") alone: from here on
        ...     q = quantize(torch.randn(4, 64), MXFP8BlockScaling())
        ```
    """

    mode: ClassVar[str] = "auto"

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"use_kernels({mode!r}): expected one of {', '.join(map(repr, MODES))}")
        self._before = use_kernels.mode
        use_kernels.mode = mode

    def __enter__(self) -> None:
        """Do nothing: the constructor has set the mode."""

    def __exit__(self, *exception: object) -> None:
        """Go back to the mode before."""
        use_kernels.mode = self._before


def _for_cpu(*, narrow: bool) -> dict[str, Any]:
    """Return what torch.compile is told of the CPU's vectors."""
    bits = VECTORS.get(torch.backends.cpu.get_cpu_capability())
    return {} if bits is None else {"options": {"cpp.simdlen": min(bits, 256) if narrow else bits}}


def _begin_as_told() -> None:
    mode = os.environ.get(VARIABLE, "auto")
    if mode not in MODES:
        raise ValueError(f"{VARIABLE}={mode!r}: expected one of {', '.join(map(repr, MODES))}")
    use_kernels.mode = mode


_begin_as_told()


_alone = threading.RLock()  # the filters of warnings belong to the whole process


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Compile inside: torch warns about its own code, and the caller may have turned warnings into errors."""
    with _alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def _layout(args: tuple[Any, ...]) -> Layout:
    """Return what compiled code for a GPU may count on: the strides, and all sizes but the number of rows."""
    return tuple((arg.shape[1:], arg.stride()) for arg in args if isinstance(arg, Tensor))


class Kernel:
    """One function of plain tensors, called eager or compiled.

    Args:
        fn: takes tensors, the large one first, and returns tensors; no side effects.
        name: tells kernels apart in profiles and logs.
        written: what runs in place of compiled code on a GPU, for the same arguments, and `out` if a call has one; it
            returns the same bytes, and proves it on each device. None if nobody wrote it.
        elements: how many of them an entry of the large tensor holds.
        narrow: on a CPU with vectors of 512 bits use those of 256, because the code would not fill the wider ones.
    """

    works: ClassVar[bool] = False  # whether any kernel was compiled
    failed: ClassVar[str | None] = None  # name of what the compiler raised, if it failed before any kernel was compiled

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        written: Written | None = None,
        *,
        elements: int = 1,
        narrow: bool = False,
    ) -> None:
        self._elements, self._narrow = elements, narrow
        code = fn.__code__.replace(co_name=name)
        self.eager = types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)
        self.by_hand = self._given = None if written is None else written.run
        self.probes = None if written is None else written.probes
        # of code written by hand: (device, kind of call) that it was tried for, devices where its bytes were others
        self._proven: set[tuple[torch.device, Hashable]] = set()
        self._refused: set[torch.device] = set()
        self.tries = 0  # how often a call did not run it at once
        # by layout of the arguments; None: any
        self._compiled: dict[Layout | None, Callable[..., Any]] = {}
        self._failed = False
        # what callers know of code written by hand, by how arguments lie in memory
        self.known: dict[Any, Any] = {}
        # ids of functions in _compiled that have run: the next call compiles little
        self._worked: set[int] = set()

    def __call__(self, *args: Any, out: Any = None) -> Any:
        """Return `fn(*args)`; code written by hand may write it into `out`, and then returns that."""
        return self.run(*args, out=out) if self.compiles(args[0]) else self.eager(*args)

    def run(self, *args: Any, out: Any = None) -> Any:
        """Do the same, after `compiles` or `would_compile` has just said yes to the first argument."""
        for arg in args:
            # subclasses are somebody's way of watching or faking tensors
            if type(arg) is not Tensor and isinstance(arg, Tensor):
                return self.eager(*args)
        # it reads memory, whatever the state; the tensors that it makes are to have no base and no history
        if self.has_by_hand(args[0]):
            if self._is_proven(args):
                with below_autograd():
                    return self._run(args, self.by_hand, out)
            # not tried yet, while a graph is captured: nor could it be compiled now
            if self.has_by_hand(args[0]):
                return self.eager(*args)
        # dynamo would compile again for each state in which it is called
        with one_dispatch_state(args[0].device.type):
            # detach() in this state makes aliases without a base; dynamo would also guard on a base's shape
            detached = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
            return self._run(detached)

    def compiled_for(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function that compiles, or has compiled, for such arguments; it may mark them for the compiler."""
        if self.has_by_hand(args[0]):
            return self.by_hand  # type: ignore[return-value]
        layout = None if args[0].device.type == "cpu" else _layout(args)
        # a model has fewer row lengths: one that goes on making them gets the dynamic code
        if layout is not None and layout not in self._compiled and len(self._compiled) >= LAYOUTS:
            layout = None
        if layout not in self._compiled:
            fn: Callable[..., Any] = self.eager
            dynamic: bool | None = True
            if layout is not None:
                # what dynamo learns of sizes that vary, it notes by the name of the code: each layout has its own
                sizes = ("_".join(map(str, (*shape, *strides))) for shape, strides in layout)
                code = fn.__code__.replace(co_name="__".join((fn.__name__, *sizes)))
                fn = types.FunctionType(code, fn.__globals__, code.co_name, fn.__defaults__, fn.__closure__)
                dynamic = None
            on_cpu = args[0].device.type == "cpu"
            options: dict[str, Any] = _for_cpu(narrow=self._narrow) if on_cpu else {}
            self._compiled[layout] = torch.compile(fn, dynamic=dynamic, fullgraph=True, **options)
        if layout is not None:
            for arg in args:
                if isinstance(arg, Tensor) and arg.ndim:
                    mark_rows_dynamic(arg)
        return self._compiled[layout]

    def runs_by_hand(self, large: Tensor) -> bool:
        """Return whether such a call runs what was written by hand, if that does not fail."""
        return self.has_by_hand(large) and self.compiles(large)

    def compiles(self, large: Tensor) -> bool:
        """Return whether a call with `large` as its first argument runs compiled, under the current policy."""
        # in this order: a trace cannot answer the last question
        return self._is_worth_it(large) and not is_tracing() and not is_watched()

    def has_by_hand(self, large: Tensor) -> bool:
        """Return whether what runs compiled for `large` is code written by hand."""
        if self.by_hand is None or large.device.type not in BY_HAND_ON:
            return False
        return not self._refused or large.device not in self._refused

    def would_compile(self, large: Tensor) -> bool:
        """Return whether such a call `compiles` if nobody traces."""
        return self._is_worth_it(large) and not is_watched()

    def _is_worth_it(self, large: Tensor) -> bool:
        mode = use_kernels.mode
        if mode == "eager" or type(large) is not Tensor:
            return False
        elements = large.numel() * self._elements
        if mode == "auto" and (elements < COMPILED_FROM or self._failed or Kernel.failed is not None):
            return False
        return elements > 0 and large.device.type in COMPILED_ON

    def _is_proven(self, args: tuple[Any, ...]) -> bool:
        """Return whether code written by hand has the definition's bytes for such a call, tried once on each device."""
        assert self.probes is not None
        device = args[0].device
        key = device, self.probes.kind(*args)
        if key in self._proven:
            return True
        with _alone:
            if key not in self._proven and self.has_by_hand(args[0]):
                self.tries += 1
                if can_try(device):
                    self._prove(*key)
            return key in self._proven

    def _prove(self, device: torch.device, kind: Hashable) -> None:
        """Try code written by hand, and note what came of it."""
        assert self.by_hand is not None
        assert self.probes is not None
        began = time.perf_counter()
        try:
            with below_autograd(), _without_warnings():
                why = self.probes.difference(self.by_hand, device, kind)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if use_kernels.mode == "compiled":
                raise
            LOG.info("%s failed, so other code takes its place", self.eager.__name__, exc_info=error)
            self._drop_by_hand(error)
            return
        if not why:
            self._proven.add((device, kind))
            took = time.perf_counter() - began
            LOG.info("%s: written by hand, proved itself on %s in %.3f s", self.eager.__name__, device, took)
            return
        wrong = (
            f"The kernel written by hand for {self.eager.__name__} computes other bytes than the format defines on "
            f"{where(device)}: of the numbers that it is tried with, {why}"
        )
        if use_kernels.mode == "compiled":
            raise RuntimeError(
                f"{wrong}. No tensor was written. Other versions of Triton or of the driver may be right; "
                f"{VARIABLE}=auto runs torch.compile's code in its place. Please report this text."
            )
        self._refused.add(device)
        warnings.warn(
            f"{wrong}. So torch.compile's code runs on this device in its place: the right bytes, slower. Other "
            "versions of Triton or of the driver may be right. Please report this text.",
            stacklevel=5,
        )

    def _drop_by_hand(self, error: Exception) -> None:
        """Run other code in its place from here on, and say so."""
        self.by_hand = None
        warnings.warn(
            f"The kernel written by hand for {self.eager.__name__} failed ({type(error).__name__}), so "
            f"torch.compile's runs from here on: the same bytes. {VARIABLE}=compiled shows the error.",
            stacklevel=4,
        )

    def _run(self, args: tuple[Any, ...], compiled: Callable[..., Any] | None = None, out: Any = None) -> Any:
        try:
            if compiled is None:
                compiled = self.compiled_for(args)
            given = {"out": out} if out is not None and compiled is self._given else {}
            if id(compiled) in self._worked:
                return compiled(*args, **given)
            began = time.perf_counter()
            with _without_warnings():
                result = compiled(*args, **given)
        except torch.OutOfMemoryError:  # eager code would need more
            raise
        except Exception as error:  # a compiler may raise anything; the eager call raises for bad input
            if use_kernels.mode == "compiled":
                raise
            LOG.info("%s failed, so other code takes its place", self.eager.__name__, exc_info=error)
            # by_hand may be None by now, if it failed in another thread
            if compiled is not None and compiled is self._given:
                self._drop_by_hand(error)
                return self.run(*args)
            result = self.eager(*args)
            # this kernel only: it had too many kinds of inputs, for example
            alone = Kernel.works
            if alone:
                self._failed = True
            else:
                # the error itself would keep its frames, and their tensors, alive
                Kernel.failed = type(error).__name__
            warnings.warn(
                f"torch.compile failed on {self.eager.__name__} ({type(error).__name__}), so "
                f"{'it runs' if alone else 'quantization kernels run'} eagerly from here on: the same bytes, "
                f"several times slower. {VARIABLE}=compiled shows the error, {VARIABLE}=eager silences this.",
                stacklevel=3,
            )
        else:
            self._worked.add(id(compiled))
            by_hand = compiled is self._given
            Kernel.works |= not by_hand
            LOG.info(
                "%s: its first call, on %s, took %.1f s (%s)",
                *(self.eager.__name__, args[0].device, time.perf_counter() - began),
                "written by hand" if by_hand else "compiled by torch.compile",
            )
        return result
