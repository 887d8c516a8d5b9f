"""No kernel costs more than its budget: launches, bytes, instructions, registers, 64-bit divisions, fp64.

What is counted is the machine code that ptxas makes of inductor's Triton code for a GPU that is not there. A kernel
that got cheaper may have a lower budget: see budgets.py.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_offline import budgets
from tests.gpu_offline.budgets import exceeded
from tests.gpu_offline.recipes import RECIPES

EVERYWHERE = ("90", "100")  # the others differ in little; `budgets --write` assembles for them, too


@functools.cache
def meter() -> Any:
    from tests.gpu_offline.measured import Meter

    return Meter()


@functools.cache
def calls(name: str) -> Any:
    return meter().calls(RECIPES[name])


@functools.cache
def allowed() -> dict[str, dict[str, dict[str, Any]]]:
    return budgets.budgets()


@pytest.mark.parametrize("name", RECIPES)
def test_no_kernel_exceeds_its_budget(name: str) -> None:
    for capability in EVERYWHERE:
        budget = allowed()[capability][name]
        assert calls(name).keys() == budget.keys()
        for direction, call in calls(name).items():
            assert not exceeded(budgets.cost_of(call, int(capability)), budget[direction]), (capability, direction)


def test_no_budget_allows_spills_or_denormals_that_are_lost() -> None:
    for recipes in allowed().values():
        for directions in recipes.values():
            for cost in directions.values():
                assert cost["spills"] == cost["flushes"] == 0


def test_a_cost_above_its_budget_is_found() -> None:
    budget = allowed()["90"]["mxfp8_row"]["quantize"]
    assert not exceeded(budget, budget)
    for name in budget:
        assert exceeded({**budget, name: budget[name] + 0.01}, budget) == [
            f"{name}: {budget[name] + 0.01}, budget {budget[name]}"
        ]
        assert not exceeded({**budget, name: budget[name] - 0.01}, budget)


def test_a_kernel_with_one_more_pass_exceeds_its_budget() -> None:
    """NVFP4's global scale takes a pass over the values that MXFP8 does without."""
    cost = budgets.cost_of(calls("nvfp4_row")["quantize"], 90)
    found = exceeded(cost, allowed()["90"]["mxfp8_row"]["quantize"])
    assert any(each.startswith("launches") for each in found)
    assert any(each.startswith("moved") for each in found)


def test_the_page_shows_the_budgets() -> None:
    page = budgets.PAGE.read_text()
    assert budgets.with_tables(page) == page
    assert budgets.HEADER in page


def test_a_page_gets_its_tables_again() -> None:
    page = budgets.PAGE.read_text()
    row = next(line for line in budgets.table() if line.startswith("| mxfp8_row | quantize"))
    assert budgets.with_tables(page.replace(row, "| mxfp8_row | quantize | 7 |")) == page
    with pytest.raises(ValueError, match="has no place for the table 'costs'"):
        budgets.with_tables(page.replace("-->", ""))


def test_the_nan_of_a_bf16_scale_is_stored_as_it_is() -> None:
    """A GPU would make 0x7FFF of it; inductor's code converts to fp32 and back, and Triton's compiler does not."""
    from tests.gpu_offline.assembled import ptx_of
    from tests.gpu_offline.measured import Meter

    blocks = Meter(by_hand=False).calls(RECIPES["int4_32"])["quantize"].launches[0].kernel
    assert ".to(tl.bfloat16, bitcast=True).to(tl.float32)" in blocks.source
    assert "cvt.rn.bf16" not in ptx_of(blocks.source, blocks.name, 90)


TWICE = ("float8_tensor", "nvfp4_row", "nvfp4_square")  # read values for the amax of all of them, then encode


def written(name: str) -> Any:
    """The launches of kernels that were written by hand."""
    launches = [launch for call in calls(name).values() for launch in call.launches]
    return [launch for launch in launches if launch.assembled is not None and launch.kernel is None]


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_written_by_hand_spill_nothing_and_divide_no_64_bits(name: str) -> None:
    """On every kind of GPU, those without fp8 among them; nor do they need fp64."""
    assert {"quantize", "dequantize", "step"} <= allowed()["80"][name].keys()
    for launch in written(name):
        for capability in (80, 90, 100, 120):
            program = launch.assembled(capability)
            found = program.spills, program.divisions, program.fp64, program.flushes
            assert found == (0, 0, 0, 0), (launch.name, capability)
            assert program.registers <= 168  # three programs of 128 threads to a multiprocessor
            if launch.name == "float8._encode":  # which may have 256: two programs
                assert program.registers <= 128


@pytest.mark.parametrize("name", RECIPES)
def test_values_pass_through_memory_once(name: str) -> None:
    """Under an amax that is known, if any; without, they are read once more."""
    for direction in ("encode" if "encode" in calls(name) else "quantize", "dequantize"):
        (launch,) = calls(name)[direction].launches
        assert launch.moved <= calls(name)[direction].needed + 4  # the amax, which is no part
    assert all(budgets.share(cost) >= 0.9 for cost in shares_of(name, "dequantize", "gathered"))
    assert all(budgets.share(cost) >= 0.55 for cost in shares_of(name, "encode"))
    assert all(budgets.share(cost) >= (0.4 if name in TWICE else 0.55) for cost in shares_of(name, "quantize"))


def shares_of(name: str, *directions: str) -> list[Any]:
    return [cost for direction, cost in allowed()[budgets.MODELLED][name].items() if direction in directions]


@pytest.mark.parametrize("name", RECIPES)
def test_where_a_tile_begins_is_counted_in_64_bits(name: str) -> None:
    """A tensor may have more than 2^31 elements. (It has fewer rows, so a row's number may have 32 bits.)"""
    from tests.gpu_offline.assembled import compiled_by_hand

    for launch in written(name):
        ttir = compiled_by_hand(*launch.assembled.__wrapped__.args, 90).asm["ttir"]
        offsets = re.findall(r"tt\.addptr .*, tensor<([\dx]+)x(i\d+)>", ttir)
        assert "i64" in {kind for _, kind in offsets}, launch.name
        assert {kind for shape, kind in offsets if "x" in shape} <= {"i64"}, launch.name


# Local memory that an unknown index reads, a loop, a 64-bit division, fp64 and a sum that flushes: one of each.
PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry counted(.param .u64 at, .param .u64 by, .param .u32 turns)
{
    .local .align 4 .b8 spilled[64];
    .reg .pred %p; .reg .b32 %i, %n, %o; .reg .b64 %a, %b, %q, %l; .reg .f32 %f; .reg .f64 %d;
    ld.param.u64 %a, [at]; ld.param.u64 %b, [by]; ld.param.u32 %n, [turns];
    ld.global.u64 %q, [%a];
    div.s64 %q, %q, %b;
    st.global.u64 [%a], %q;
    ld.global.f64 %d, [%a+8];
    add.f64 %d, %d, %d;
    st.global.f64 [%a+8], %d;
    mov.u64 %l, spilled;
    mov.u32 %i, 0;
again:
    ld.global.f32 %f, [%a+16];
    add.ftz.f32 %f, %f, %f;
    st.global.f32 [%a+16], %f;
    and.b32 %o, %i, 60;
    cvt.u64.u32 %q, %o;
    add.u64 %q, %l, %q;
    st.local.f32 [%q], %f;
    add.u32 %i, %i, 1;
    bar.sync 0;
    setp.lt.u32 %p, %i, %n;
    @%p bra again;
    ld.local.f32 %f, [%q];
    st.global.f32 [%a+20], %f;
    ret;
}
"""


def test_what_a_program_is_made_of_is_counted(tmp_path: Path) -> None:
    from tests.gpu_offline.assembled import TOOLS, program

    source, cubin = tmp_path / "counted.ptx", tmp_path / "counted.cubin"
    source.write_text(PTX)
    subprocess.run([TOOLS / "ptxas", "--gpu-name=sm_90", source, "-o", cubin], check=True)
    found = program(PTX, cubin.read_bytes())
    assert (found.divisions, found.flushes) == (1, 1)
    assert found.spills >= 1
    assert found.fp64 >= 1
    assert 5 <= found.looped < found.straight
    # the subroutine that divides 64 bits is not on the way of most numbers
    assert found.looped_units.issued == found.looped
    assert 0 < found.units.issued < found.straight
    assert found.looped_units.memory >= 3  # a load, a store, and one to local memory
    assert 0 < found.registers <= 255
