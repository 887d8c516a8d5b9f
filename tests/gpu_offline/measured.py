"""What a recipe's kernels cost on a GPU that is not there: launches, bytes, instructions.

Each direction is a call of the product on a 4096 x 4096 weight. All that it launches is counted: the Triton kernels
that inductor makes (emitted.py, assembled.py) or somebody wrote (written.py), and every operation of torch around them.

    quantize      bf16 values -> parts
    encode        likewise, under an amax that is known
    dequantize    parts -> bf16 values
    gathered      likewise, parts that two ranks sent, each with a tensor-wide scale of its own
    step          fp32 masters -> parts, as an optimizer writes them

Bytes that a launch moves: each load and each store in the kernel's text goes through its tensor once. Caches may spare
some of it; nothing counts on them. Needed are the bytes of the input and of the output, once.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_hooks.kernels.compiled import Kernel, use_kernels
from qtensor import QuantizedTensor, quantize
from qtensor.numerics import kernels
from qtensor.spec.registry import tensor_wide
from qtensor.tensor.contents import write
from tests.gpu_offline.assembled import Program, assembled, assembled_by_hand, blocks_of
from tests.gpu_offline.emitted import Launching, TritonKernel
from tests.gpu_offline.model import CAPABILITY, Units, seconds
from tests.gpu_offline.written import WrittenKernel

ROWS = COLUMNS = 4096
ELEMENTS = ROWS * COLUMNS
ACCESS = re.compile(r"tl\.(load|store)\((\w+) \+ ")
ALLOCATIONS = ("empty", "new_empty", "resize_")


@dataclass(frozen=True)
class Launch:
    """One launch: what of, and what it reads and writes. `assembled` is None for an operation of torch."""

    name: str
    moved: int  # bytes
    assembled: Callable[[int], Program] | None = None  # for GPUs of a capability
    kernel: TritonKernel | None = None  # where inductor made it
    threads: int = 1  # of all programs
    turns: int = 1  # of the loop over a row, in each program


@dataclass(frozen=True)
class Cost:
    """What a direction of a recipe costs, all launches together; bytes and instructions are those an element."""

    launches: int
    moved: float
    needed: float
    instructions: float  # of threads, not of warps
    registers: int  # of the kernel with most
    spills: int
    divisions: int  # of 64-bit numbers, in the text of all kernels
    fp64: int  # instructions, likewise
    flushes: int  # likewise


@dataclass(frozen=True)
class Call:
    """A call of the product: what it launched, and the bytes that it could not have done without."""

    launches: tuple[Launch, ...]
    needed: int

    def cost(self, capability: int) -> Cost:
        """On GPUs of a capability. Raises what Triton does where it has no such types."""
        programs = [(each, each.assembled(capability)) for each in self.launches if each.assembled is not None]
        return Cost(
            launches=len(self.launches),
            moved=round(sum(each.moved for each in self.launches) / ELEMENTS, 3),
            needed=round(self.needed / ELEMENTS, 3),
            instructions=round(sum(_instructions(each, program) for each, program in programs) / ELEMENTS, 2),
            registers=max(program.registers for _, program in programs),
            **{
                name: sum(asdict(program)[name] for _, program in programs)
                for name in ("spills", "divisions", "fp64", "flushes")
            },
        )

    def seconds(self) -> float:
        """On the GPU of model.py, by its model: one launch after the other."""
        return sum(seconds(each.moved, each.threads, units) for each, units in self.units())

    def units(self) -> list[tuple[Launch, Units]]:
        """Of each launch, what a thread of it occupies there; an operation of torch is taken for a copy."""
        found = []
        for each in self.launches:
            program = each.assembled(CAPABILITY) if each.assembled is not None else None
            found.append((each, program.units + program.looped_units * each.turns if program else Units()))
        return found


def _instructions(launch: Launch, program: Program) -> int:
    return launch.threads * (program.straight + launch.turns * program.looped)


def launch_of(kernel: TritonKernel | WrittenKernel, args: tuple[Any, ...]) -> Launch:
    """What a call of a kernel with these arguments does."""
    if isinstance(kernel, WrittenKernel):
        given = kernel.arguments(args)
        moved = sum(given[pointer].nbytes for _, pointer in ACCESS.findall(kernel.source))
        program = functools.cache(functools.partial(assembled_by_hand, kernel, args))
        looped = re.search(r"^ +for \w+ in range", kernel.source, re.MULTILINE)
        tile = kernel.programs * dict(kernel.constants)["TILE"] if looped else 1  # elements of all programs, a turn
        turns = -(-args[0].numel() // tile) if looped else 1
        return Launch(kernel.name, moved, program, threads=kernel.programs * kernel.warps * 32, turns=turns)
    meta = kernel.tuner.inductor_meta
    assert meta["grid_type"] == "Grid1D", meta["grid_type"]
    blocks = blocks_of(kernel)
    names = [name for name in kernel.tuner.triton_meta["signature"] if not name.endswith("BLOCK")]
    given = dict(zip(names, args, strict=True))
    programs = -(-given["xnumel"] // blocks.block("XBLOCK"))
    turns = -(-given["r0_numel"] // blocks.block("R0_BLOCK")) if "R0_BLOCK" in dict(blocks.blocks) else 1
    moved = sum(given[pointer].nbytes for _, pointer in ACCESS.findall(kernel.source))
    program = functools.partial(assembled, kernel.source, kernel.name)
    return Launch(kernel.short, moved, program, kernel, programs * blocks.warps * 32, turns)


class _Operations(TorchDispatchMode):
    """Operations of torch outside of kernels: each that is no view and allocates more than memory is a launch."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(ALLOCATIONS) or name in ("_unsafe_view", "detach")):
            read = args[1:] if name in ("copy_", "fill_", "zero_") else args
            self.launches.append(Launch(name, sum(each.nbytes for each in (*_tensors(read), *_tensors([out])))))
        return out


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextlib.contextmanager
def on_gpu(launching: Launching) -> Iterator[None]:
    """Inside, kernels go through `launching` whatever the device of their arguments is."""

    def call(kernel: Kernel, *args: Any, out: Any = None) -> Any:
        if launching.takes_by_hand(kernel):  # with what torch does around it
            return launching(kernel, *args, out=out)
        with _disable_current_modes():
            return launching(kernel, *args)

    with (
        use_kernels("compiled"),
        mock.patch.object(Kernel, "run", call),
        mock.patch.object(Kernel, "compiles", return_value=True),
        mock.patch.object(Kernel, "would_compile", return_value=True),
        mock.patch.object(Kernel, "runs_by_hand", lambda kernel, large: launching.takes_by_hand(kernel)),
    ):
        yield


class Meter:
    """Counts what calls of the product launch; each kernel is compiled once.

    `by_hand` says whether kernels are taken that were written by hand, where there are such; `grad`, whether calls are
    differentiated.
    """

    def __init__(self, *, by_hand: bool = True, grad: bool = False) -> None:
        self.grad = grad
        self._launches: list[Launch] = []
        self._launching = Launching(lambda kernel, args: self._launches.append(launch_of(kernel, args)))
        self._launching.by_hand = by_hand

    def calls(self, recipe: Any) -> dict[str, Call]:
        """The directions of a recipe."""
        dense, master = (torch.empty(ROWS, COLUMNS, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        with on_gpu(self._launching):
            q = quantize(dense, recipe)
            parts = sum(part.nbytes for part in q.parts().values())
            found = {
                "quantize": self._call(lambda: quantize(dense, recipe), dense.nbytes + parts),
                "dequantize": self._call(q.dequantize, dense.nbytes + parts),
                "step": self._call(lambda: write(q, master, step=True), master.nbytes + parts),
            }
            if tensor_wide(recipe):
                amax = kernels.shared_amax(dense, recipe)
                found["encode"] = self._call(lambda: kernels.encode(dense, recipe, amax), dense.nbytes + parts)
                gathered = gathered_of(recipe)
                found["gathered"] = self._call(gathered.dequantize, dense.nbytes + parts)
        return found

    def launches(self, call: Callable[[], object]) -> tuple[Launch, ...]:
        """All that a call launches."""
        with on_gpu(self._launching):
            return self._call(call, 0).launches

    def _call(self, call: Callable[[], object], needed: int) -> Call:
        self._launches.clear()
        with torch.set_grad_enabled(self.grad), _Operations(self._launches):
            call()
        return Call(tuple(self._launches), needed)


def gathered_of(recipe: Any) -> QuantizedTensor:
    """A weight that two ranks hold halves of, gathered."""
    half = quantize(torch.empty(ROWS // 2, COLUMNS, dtype=torch.bfloat16), recipe)
    inputs, metadata = half.fsdp_pre_all_gather(None)
    gathered = half.fsdp_post_all_gather([torch.cat([each] * 2) for each in inputs], metadata, torch.bfloat16)
    assert gathered is not None
    return gathered[0].as_strided((ROWS, COLUMNS), (COLUMNS, 1))
