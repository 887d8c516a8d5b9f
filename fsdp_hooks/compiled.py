"""Pure tensor functions that run eagerly or compiled, with the same bytes either way.

A `Kernel` is one definition in torch ops. Large inputs run it compiled by inductor (C++ on the CPU, Triton on a GPU),
which fuses what eager ops do in a dozen passes over memory; small ones run it as it stands, since a compiled call
checks its guards first. Which of the two is a policy of the process, `use_kernels`:

    auto       compiled from COMPILED_FROM elements on; eager below, inside somebody else's torch.compile (whose graph
               the definition joins), under a mode that sees operations, on devices without a compiler, and for good
               once the compiler failed, with one warning
    compiled   compiled wherever that is possible, and a failed compilation raises
    eager      never compiled

Every kernel has a code object of its own, and with it dynamo's cache and limit of recompilations. Shapes are dynamic:
one compilation serves all, or two where the first tensor's dims were equal, and one more for a dim of size 1. Compiled
code lands in inductor's cache on disk, so another process, or rank, finds it there.
"""

import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing, is_watched, one_dispatch_state

MODES = ("auto", "compiled", "eager")
COMPILED_FROM = 2**18  # elements
COMPILED_ON = frozenset({"cpu", "cuda", "xpu"})
VARIABLE = "QTENSOR_KERNELS"


class use_kernels:  # noqa: N801 - reads as a statement: use_kernels("eager")
    """Choose, for this process, whether numeric kernels are compiled; the bytes are the same.

        use_kernels("eager")            # from here on
        with use_kernels("compiled"):   # until the end of the block
            ...

    Args:
        mode: "auto" (large tensors, where there is a compiler; the default), "compiled" (all, and a failing compiler
            raises) or "eager". The environment variable QTENSOR_KERNELS says with which of them a process begins.

    Raises:
        ValueError: another mode.
    """

    mode: ClassVar[str] = "auto"

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"use_kernels({mode!r}): expected one of {', '.join(map(repr, MODES))}")
        self._before = use_kernels.mode
        use_kernels.mode = mode

    def __enter__(self) -> None:
        """The mode holds already."""

    def __exit__(self, *exception: object) -> None:
        """Back to the mode before."""
        use_kernels.mode = self._before


def _begin_as_told() -> None:
    mode = os.environ.get(VARIABLE, "auto")
    if mode not in MODES:
        raise ValueError(f"{VARIABLE}={mode!r}: expected one of {', '.join(map(repr, MODES))}")
    use_kernels.mode = mode


_begin_as_told()


_alone = threading.RLock()  # filters of warnings are those of the process


@contextmanager
def _without_warnings() -> Iterator[None]:
    """For a compilation: torch warns of what it does itself, and the caller may have made errors of warnings."""
    with _alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Kernel:
    """One function of plain tensors, called eager or compiled.

    Args:
        fn: takes tensors, the large one first, and returns tensors; no side effects.
        name: tells kernels apart in profiles and logs.
    """

    works: ClassVar[bool] = False  # whether any kernel was compiled
    failed: ClassVar[str | None] = None  # what the compiler raised, where none was before

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        code = fn.__code__.replace(co_name=name)
        self.eager = types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)
        self._compiled: Callable[..., Any] | None = None
        self._worked = self._failed = False

    def __call__(self, *args: Any) -> Any:
        """Fn(*args)."""
        # subclasses among the arguments are somebody's way of watching or faking tensors
        if not self.compiles(args[0]) or any(isinstance(arg, Tensor) and type(arg) is not Tensor for arg in args):
            return self.eager(*args)
        if self._compiled is None:
            self._compiled = torch.compile(self.eager, dynamic=True, fullgraph=True)
        with one_dispatch_state(args[0].device.type):
            # in this state an alias knows no base, of which dynamo would guard the shape, too
            return self._run(self._compiled, tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))

    def compiles(self, large: Tensor) -> bool:
        """Whether a call with this as its large argument runs compiled, under the policy of now."""
        mode = use_kernels.mode
        if mode == "eager":
            return False
        if mode == "auto" and (large.numel() < COMPILED_FROM or self._failed or Kernel.failed is not None):
            return False
        if large.device.type not in COMPILED_ON or large.numel() == 0 or type(large) is not Tensor:
            return False
        return not is_tracing() and not is_watched()

    def _run(self, compiled: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        quietly = nullcontext() if self._worked else _without_warnings()
        if use_kernels.mode == "compiled":
            with quietly:
                result = compiled(*args)
            self._worked = Kernel.works = True
            return result
        try:
            with quietly:
                result = compiled(*args)
        except torch.OutOfMemoryError:  # eager code would need more
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises; the eager call tells if it is the input
            result = self.eager(*args)
            alone = Kernel.works  # too many kinds of inputs, say: nothing that concerns the others
            if alone:
                self._failed = True
            else:
                Kernel.failed = type(error).__name__  # the error itself would keep its frames, and their tensors, alive
            warnings.warn(
                f"torch.compile failed on {self.eager.__name__} ({type(error).__name__}), so "
                f"{'it runs' if alone else 'quantization kernels run'} eagerly from here on: the same bytes, "
                f"several times slower. {VARIABLE}=compiled shows the error, {VARIABLE}=eager silences this.",
                stacklevel=3,
            )
        else:
            self._worked = Kernel.works = True
        return result
