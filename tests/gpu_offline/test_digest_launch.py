"""Digests of a GPU's tensors by one launch: the values of the definition, and a table that can not be stale.

In a process in which Triton interprets, where tensors of the CPU are taken for those of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp_hooks.kernels import digest
from fsdp_hooks.kernels.compiled import use_kernels
from tests.gpu_offline.interpreted import Interpreter

CPU = torch.device("cpu")
TILE = 8 * 8192  # bytes of a program
SIZES = (0, 1, 7, 8, 9, 511, 512, 513, TILE - 1, TILE, TILE + 1, 3 * TILE + 5, 2**18 - 1, 2**18, 2**18 + 8195)
FORMATS = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.bool, torch.bfloat16, torch.int64)


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def some_bytes(size: int, offset: int = 0) -> Tensor:
    """Bytes that begin so many of them behind an address that can be divided by 64."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size + offset,), generator=generator, dtype=torch.uint8)[offset:]


# -- in the interpreter's process --------------------------------------------------------------------------------------


@contextlib.contextmanager
def taken_for_gpu() -> Iterator[None]:
    with mock.patch.multiple(
        digest,
        BY_HAND_ON=frozenset({"cpu"}),
        ENOUGH=0,
        _stream_to_launch_on=mock.Mock(return_value=0),
        _proven={CPU},  # test_proving.py is about the first one
    ):
        yield


def by_launch(groups: list[list[Tensor]]) -> Tensor:
    with taken_for_gpu():
        return digest.digests(groups)


def defined(groups: list[list[Tensor]]) -> Tensor:
    with use_kernels("eager"):
        return digest.digests(groups)


def differing(groups: list[list[Tensor]]) -> list[int]:
    """The groups whose digest by a launch is not the defined one."""
    return (by_launch(groups) != defined(groups)).nonzero().flatten().tolist()


def of_bytes(offset: int) -> list[int]:
    tensors = [some_bytes(size, offset) for size in SIZES]
    return differing([*([tensor] for tensor in tensors), tensors, tensors[::-1], [], tensors[4:2:-1]])


def of_formats() -> list[int]:
    data = some_bytes(48 * TILE // 16)
    values = [(data % 2 if dtype == torch.bool else data).view(dtype) for dtype in FORMATS]
    numbers = torch.randn(6, 40, dtype=torch.complex64)
    zeros = torch._efficientzerotensor(4)
    awkward = [numbers.conj(), numbers.conj().imag, zeros, numbers.real.t(), torch.tensor(3.0), numbers[:, 1:]]
    return differing([values, *([one] for one in values), awkward, [nn.Parameter(torch.ones(3, 5))]])


def end_of_a_large_tensor() -> tuple[int, int]:
    """By the programs of its last bytes alone: zeros before them add nothing to a digest."""
    from fsdp_hooks.kernels import digest_triton

    large = torch.zeros(2**31 + 2**20 + 3, dtype=torch.uint8)
    large[-9:] = 7
    table = digest_triton.make_table((((large.data_ptr(), large.nbytes),),), CPU)
    last = table.programs - 2
    assert last * TILE > 2**31
    numbers = table.numbers.clone()
    numbers[2] = -last  # the first program stands that far into the tensor
    found = numbers[-1:].clone()
    digest_triton.launch(table._replace(numbers=numbers, programs=2), found)
    return int(found), int(digest.digest([large]))


def after_changes() -> dict[str, bool]:
    """Whether the digest is right after each change of a tensor whose table is kept."""
    found = {}
    values = torch.arange(4096, dtype=torch.int32).view(64, 64)
    tensor = values.clone()

    def check(name: str) -> None:
        found[name] = not differing([[tensor, values]])

    check("as it was")
    tensor[3, 5] = 7
    check("written")
    address = tensor.data_ptr()
    tensor.t_()
    assert tensor.data_ptr() == address
    check("transposed in place")
    tensor.t_()
    tensor.resize_(32, 64)
    assert tensor.data_ptr() == address
    check("made smaller in place")
    tensor.data = values.flip(0)
    assert tensor.data_ptr() != address
    check("moved")
    tensor.data = torch.complex(torch.ones(32, 64), torch.ones(32, 64)).conj().imag
    check("negated lazily")
    kept = tensor.data_ptr()
    tensor.set_(torch.empty(0))  # type: ignore[call-overload]
    check("emptied")
    assert kept
    return found


def tables_made() -> list[int]:
    """How many tables were made after each call."""
    from fsdp_hooks.kernels import digest_triton

    tensors = [some_bytes(size) for size in (700, 9, 3 * TILE)]
    made: list[int] = []
    make = digest_triton.make_table
    counts = mock.Mock(side_effect=make)
    with mock.patch.object(digest_triton, "make_table", counts), mock.patch.object(digest_triton, "KEPT", 3):
        digest_triton._tables.clear()
        for groups in ([tensors], [tensors], [tensors[:2], tensors[2:]], [tensors], [tensors[::-1]]):
            by_launch(groups)
            made.append(counts.call_count)
        tensors[1].data = tensors[1].clone()
        by_launch([tensors])
        made.append(counts.call_count)
        with taken_for_gpu(), mock.patch.object(digest, "_stream_to_launch_on", return_value=1):
            digest.digests([tensors])
        made.append(counts.call_count)
        assert len(digest_triton._tables) == 3
    return made


def launches_of(count: int) -> None:
    by_launch([[some_bytes(size), some_bytes(size + 1)] for size in range(count)])


# -- here --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 8, 1, 2, 4, 7])
def test_digests_by_a_launch_are_the_defined_ones(interpreter: Interpreter, offset: int) -> None:
    """Of no bytes up to several programs, in narrow and wide blocks, wherever they begin, alone and in groups."""
    assert interpreter.interpret(of_bytes, offset) == []


def test_digests_by_a_launch_take_any_dtype_and_layout(interpreter: Interpreter) -> None:
    assert interpreter.interpret(of_formats) == []


def test_addresses_beyond_two_gigabytes_are_reached(interpreter: Interpreter) -> None:
    found, wanted = interpreter.interpret(end_of_a_large_tensor)
    assert found == wanted


def test_a_tensor_that_changed_is_read_as_it_is_now(interpreter: Interpreter) -> None:
    found = interpreter.interpret(after_changes)
    assert len(found) == 7
    assert [name for name, right in found.items() if not right] == []


def test_a_table_is_made_once_for_the_same_memory_and_stream(interpreter: Interpreter) -> None:
    assert interpreter.interpret(tables_made) == [1, 1, 2, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [2, 60])
def test_one_launch_reads_all_tensors(interpreter: Interpreter, count: int) -> None:
    before = interpreter.launches()
    interpreter.interpret(launches_of, count)
    assert interpreter.launches() == before + 1


def test_the_kernel_spills_nothing_and_divides_no_long_numbers() -> None:
    from fsdp_hooks.kernels import digest_triton
    from tests.gpu_offline.assembled import assembled_by_hand
    from tests.gpu_offline.written import launches_go_to

    seen: list[Any] = []
    with launches_go_to(lambda *launch: seen.append(launch)):
        digest_triton.digests((((some_bytes(2**18).data_ptr(), 2**18),),), CPU, 0)
    ((kernel, args),) = seen
    for capability in (80, 90, 100):
        program = assembled_by_hand(kernel, args, capability)
        assert (program.spills, program.divisions) == (0, 0)
        assert program.registers <= 128  # 16 warps of an SM, each with 16 words under way in every thread
