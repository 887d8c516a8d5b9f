"""Matrices that a GPU writes the other way round: the bytes of the definition, and what the kernels cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import Float8CurrentScaling
from qtensor.numerics import transposing
from tests.gpu_offline.interpreted import Interpreter
from tests.gpu_offline.test_interpreted import assert_same, awkward, raw

RECIPES = {
    "e4m3": Float8CurrentScaling(),
    "e5m2": Float8CurrentScaling(element="e5m2"),
    "power_of_two": Float8CurrentScaling(power_of_two=True),
}
every = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
SHAPES = [(64, 128), (37, 416), (130, 33), (16, 48), (200, 272)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def factors_of(columns: int, each: int) -> Tensor | None:
    """None, one factor of all columns, or one of each; some products overflow, others are denormal."""
    if not each:
        return None
    exponents = torch.arange(columns if each == 2 else 1).remainder(5).float() - 2
    return (torch.exp2(exponents * 20) * 1.3).unsqueeze(0)


# -- what they compute -------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("multiple", [1, 16])
def test_bytes_are_turned(interpreter: Interpreter, shape: tuple[int, int], dtype: Any, multiple: int) -> None:
    generator = torch.Generator().manual_seed(1)
    size = (shape[0], shape[1] * dtype.itemsize)
    x = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)
    before, found = interpreter.launches(), interpreter.transposing("turned", x, multiple)
    assert interpreter.launches() == before + 1
    assert (found.dtype, found.shape) == (dtype, (shape[1], shape[0] + -shape[0] % multiple))
    assert torch.equal(raw(found[:, : shape[0]]), raw(x.t()))
    assert raw(found[:, shape[0] :]).count_nonzero() == 0


@every
@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_columns_are_quantized_as_rows_of_the_transpose_are(
    interpreter: Interpreter, recipe: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = awkward(*shape, dtype)
    before, found = interpreter.launches(), interpreter.transposing("encode_columns", x, recipe, 16)
    assert interpreter.launches() == before + 2
    assert_same(found, transposing.encode_columns(x, recipe, 16), str(shape))


@every
@shapes
@pytest.mark.parametrize("each", [0, 1, 2])
def test_one_read_gives_the_codes_of_rows_and_of_columns(
    interpreter: Interpreter, recipe: Any, shape: tuple[int, int], each: int
) -> None:
    x, factors = awkward(*shape, torch.bfloat16), factors_of(shape[1], each)
    before, found = interpreter.launches(), interpreter.transposing("encode_both", x, factors, recipe, 16)
    assert interpreter.launches() == before + 2
    for mine, wanted in zip(found, transposing.encode_both(x, factors, recipe, 16), strict=True):
        assert_same(mine, wanted, str(shape))


def test_values_that_are_no_matrix_in_memory_are_copied_first(interpreter: Interpreter) -> None:
    x = awkward(96, 128, torch.bfloat16)
    for values in (x.t(), x[:, 32:64], x[::2]):
        found = interpreter.transposing("encode_columns", values, RECIPES["e4m3"])
        assert_same(found, transposing.encode_columns(values, RECIPES["e4m3"]), str(values.stride()))
        assert torch.equal(raw(interpreter.transposing("turned", values)), raw(values.t()))


# -- what they cost ----------------------------------------------------------------------------------------------------

SIDE = 4096


@functools.cache
def launches(name: str) -> tuple[Any, ...]:
    """Those of a call on a 4096 x 4096 matrix, those of torch among them."""
    from tests.gpu_offline.measured import Meter

    x = torch.empty(SIDE, SIDE, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "turned": lambda: transposing.turned(x.view(torch.uint8)[:, :SIDE].contiguous(), 16),
        "columns": lambda: transposing.encode_columns(x, RECIPES["e4m3"], 16),
        "both": lambda: transposing.encode_both(x, torch.empty(1, SIDE), RECIPES["e5m2"], 16),
    }
    return Meter().launches(calls[name])


def test_a_pass_finds_all_amaxes_and_another_writes_all_codes() -> None:
    assert [each.name for each in launches("columns")] == [
        "zeros",
        "triton_transposes._column_amax",
        "triton_transposes._encode_columns",
    ]
    assert [each.name for each in launches("both")] == [
        "zeros",
        "triton_transposes._both_amax",
        "triton_transposes._encode_both",
    ]
    assert [each.name for each in launches("turned")][-1] == "triton_transposes._transpose"


@pytest.mark.parametrize(
    ("name", "kernel", "needed", "share"),
    [("turned", "_transpose", 2, 0.9), ("columns", "_encode_columns", 3, 0.9), ("both", "_encode_both", 4, 0.7)],
)
def test_bytes_pass_once_and_instructions_do_not_stand_in_their_way(
    name: str, kernel: str, needed: int, share: float
) -> None:
    """Of a copy's speed, by the model of docs/speed.md; both makes two codes of each value."""
    from tests.gpu_offline import model

    (launch,) = [each for each in launches(name) if each.name == f"triton_transposes.{kernel}"]
    elements = SIDE * SIDE
    assert launch.moved <= (needed + 0.01) * elements
    program = launch.assembled(90)
    modelled = model.seconds(launch.moved, launch.threads, program.units)
    assert model.seconds(needed * elements) / modelled >= share
    assert program.looped == 0


@pytest.mark.parametrize("name", ["turned", "columns", "both"])
def test_they_run_on_every_gpu_and_spill_nothing(name: str) -> None:
    for launch in launches(name):
        for capability in (80, 90, 100, 120) if launch.assembled is not None else ():
            program = launch.assembled(capability)
            assert (program.spills, program.divisions, program.fp64, program.flushes) == (0, 0, 0, 0), launch.name
            assert program.registers <= 168


@pytest.mark.parametrize("name", ["turned", "columns", "both"])
def test_both_sides_are_read_and_written_in_wide_words(name: str) -> None:
    """16 bytes a thread where rows have whole words: a transpose that stores byte by byte reaches a tenth of a copy."""
    from tests.gpu_offline.assembled import compiled_by_hand

    for launch in launches(name):
        if launch.assembled is None or launch.name.endswith("amax"):
            continue
        ptx = compiled_by_hand(*launch.assembled.__wrapped__.args, 90).asm["ptx"]
        assert "ld.global.v4.b32" in ptx, launch.name
        assert "st.global.v4.b32" in ptx, launch.name
        assert "st.global.b8" not in ptx, launch.name


def test_matrices_that_32_bits_do_not_count_are_refused() -> None:
    from qtensor.numerics import triton_transposes

    assert triton_transposes._programs(2**24, 128) == 2**18
    with pytest.raises(OverflowError, match=r"^16777217 x 128 elements, more than kernels written by hand count"):
        triton_transposes._programs(2**24 + 1, 128)
