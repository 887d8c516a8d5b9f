"""Triton code as machine code: what ptxas, which comes with Triton, makes of a kernel for a GPU that is not there.

What is counted is in the text of the program (SASS), once for each loop and branch, whether it is taken or not. A loop
over a row is multiplied by how often it runs; a branch that only a slow 64-bit division takes is not left out.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from tests.gpu_offline.emitted import TritonKernel
from tests.gpu_offline.model import Units, units_of
from tests.gpu_offline.pretended import CAPABILITY
from tests.gpu_offline.written import WrittenKernel, specialized

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ELEMENTS_A_THREAD = 8
# Address: optional predicate, operation with its modifiers. Labels stand on lines of their own.
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)(.*)")
SUBROUTINE = "\n$__internal"  # a label of ptxas's, behind the body: divisions by numbers that are tiny or huge
LABEL = re.compile(r"(\.L_x_\d+):")
FP64 = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX)\b|MUFU\.(RCP|RSQ)64H?|(F2F|F2I|I2F)\b.*F64")
DIVISION64 = re.compile(r"\b(div|rem)\.[su]64\b")


@dataclass(frozen=True)
class Config:
    """With how many elements and threads a program runs."""

    blocks: tuple[tuple[str, int], ...]  # XBLOCK, and R0_BLOCK where rows are gone through in a loop
    warps: int

    def block(self, name: str) -> int:
        return dict(self.blocks).get(name, 1)


@dataclass(frozen=True)
class Program:
    """What a thread of a kernel is made of."""

    registers: int
    spills: int  # instructions that access a thread's local memory
    straight: int  # instructions outside of loops
    looped: int  # and inside
    divisions: int  # of 64-bit numbers
    fp64: int  # instructions
    flushes: int  # instructions that take denormal numbers for zero
    units: Units  # that execute what is outside of loops and not in a subroutine for numbers that are seldom divided
    looped_units: Units  # likewise, inside


def config_of(kernel: TritonKernel) -> Any:
    """The one of inductor's configs that gives a thread about 8 elements; on a GPU the fastest is found by running."""
    source = re.search(r"R0_BLOCK: tl.constexpr = (\d+)", kernel.source)
    row = int(source[1]) if source else 1

    def distance(config: Any) -> tuple[float, int]:
        elements = row
        for size in config.kwargs.values():
            elements *= size
        each = elements / (config.num_warps * 32)
        return max(each / ELEMENTS_A_THREAD, ELEMENTS_A_THREAD / each), elements

    return min(kernel.tuner.configs, key=distance)


def blocks_of(kernel: TritonKernel) -> Config:
    """The same, as a value."""
    config = config_of(kernel)
    return Config(tuple(sorted(config.kwargs.items())), config.num_warps)


@functools.cache
def assembled(source: str, name: str, capability: int) -> Program:
    """A kernel's program for GPUs of a capability (90: sm_90)."""
    made = _compiled(source, name, capability)
    return program(made.asm["ptx"], made.asm["cubin"])


def ptx_of(source: str, name: str, capability: int) -> str:
    """The text that ptxas makes it of."""
    return _compiled(source, name, capability).asm["ptx"]


def assembled_by_hand(kernel: WrittenKernel, args: tuple[Any, ...], capability: int) -> Program:
    """The program of a kernel written by hand, for such arguments."""
    made = compiled_by_hand(kernel, args, capability)
    return program(made.asm["ptx"], made.asm["cubin"])


def compiled_by_hand(kernel: WrittenKernel, args: tuple[Any, ...], capability: int) -> Any:
    """What Triton makes of it, all stages: "ttir" to "cubin"."""
    types, attributes = specialized(kernel.arguments(args))
    position = {name: (kernel.function.arg_names.index(name),) for name in kernel.function.arg_names}
    source = ASTSource(
        kernel.function,
        {name: types.get(name, "constexpr") for name in kernel.function.arg_names},
        {position[name]: value for name, value in kernel.constants},
        {position[name]: value for name, value in attributes.items()},
    )
    options, target = dict(kernel.options), GPUTarget("cuda", capability, 32)
    # what a kernel asks of the part that it is compiled for, Triton asks of the driver
    with mock.patch.object(driver.active, "get_current_target", return_value=target):
        return triton.compile(source, target=target, options=options)


def _compiled(source: str, name: str, capability: int) -> Any:
    here = CAPABILITY[0] * 10 + CAPABILITY[1]
    there = source.replace(f"cc={here}, major={here // 10}", f"cc={capability}, major={capability // 10}")
    assert there != source or here == capability
    kernel = TritonKernel(name, there)
    config = config_of(kernel)
    meta = kernel.tuner._create_compile_meta(config)
    options = kernel.tuner._create_compile_options(config, meta)
    return triton.compile(
        ASTSource(kernel.tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def program(ptx: str, cubin: bytes) -> Program:
    """What stands in PTX and in the machine code made of it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _printed("cuobjdump", "-res-usage", file.name)
        sass = _printed("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    code = instructions(sass)
    inside = loops(sass)
    body = len(instructions(sass.partition(SUBROUTINE)[0]))
    outside = [op for number, op in enumerate(code[:body], start=1) if number not in inside]
    return Program(
        registers=int(registers[1]),
        spills=sum(op.startswith(("LDL", "STL")) for op in code),
        straight=len(code) - len(inside),
        looped=len(inside),
        divisions=len(DIVISION64.findall(ptx)),
        fp64=sum(bool(FP64.match(op)) for op in code),
        flushes=ptx.count(".ftz"),
        units=units_of(outside),
        looped_units=units_of(code[number - 1] for number in inside),
    )


def instructions(sass: str) -> list[str]:
    """The operations, with their modifiers, without those that only fill up."""
    found = (INSTRUCTION.search(line) for line in sass.splitlines())
    return [each[1] + each[2] for each in found if each is not None and each[1] != "NOP"]


def loops(sass: str) -> set[int]:
    """Which instructions, from 1 on, are in loops: between a label and a branch back to it."""
    labels: Mapping[str, int] = {}
    inside: set[int] = set()
    number = 0
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            labels = {**labels, label[1]: number}
        elif (found := INSTRUCTION.search(line)) and found[1] != "NOP":
            number += 1
            target = re.search(r"\.L_x_\d+", found[3]) if found[1] == "BRA" else None
            start = labels.get(target[0], number) if target else number
            if start < number - 1:  # a branch to itself ends every program, and is never reached
                inside |= set(range(start + 1, number + 1))
    return inside


def first_loop(cubin: bytes) -> tuple[Units, Units]:
    """What stands before the first loop of a program, and what is in it: as far as the first branch back.

    Threads of a warp that came apart exchange values by code of its own, which stands behind that and is no loop.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _printed("nvdisasm", "-c", file.name)
    code, labels, number = instructions(sass), dict[str, int](), 0
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label[1]] = number
        elif (found := INSTRUCTION.search(line)) and found[1] != "NOP":
            number += 1
            target = re.search(r"\.L_x_\d+", found[3]) if found[1] == "BRA" else None
            if target and (start := labels.get(target[0], number)) < number - 1:
                return units_of(code[:start]), units_of(code[start:number])
    raise ValueError("there is no loop")


def _printed(tool: str, *args: str) -> str:
    return subprocess.run([TOOLS / tool, *args], check=True, capture_output=True, text=True).stdout
