"""The model of an H200: what it says of the kernels that one has timed, and what it is made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.gpu_offline import model
from tests.gpu_offline.model import Units, seconds, timed, units_of


def off() -> float:
    """The root of the mean square of the errors."""
    errors = [each.error for each in timed()]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def test_the_model_is_near_what_was_timed() -> None:
    assert len(timed()) == 10
    assert all(abs(each.error) < 0.09 for each in timed()), timed()
    assert off() < 0.05


@pytest.mark.parametrize(("name", "steps"), [("REACHED", (0.73, 0.93)), ("SHARPNESS", (2, 20))])
def test_its_constants_are_those_that_fit_best(
    name: str, steps: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    best = off()
    for other in steps:
        monkeypatch.setattr(model, name, other)
        assert off() > best + 0.005, other


def test_integers_at_full_rate_would_promise_what_the_gpu_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "LANES", {**model.LANES, "alu": 128})
    (mxfp8,) = (each for each in timed() if each.name == "mxfp8_row quantize")
    assert mxfp8.measured == 0.66
    assert mxfp8.modelled > 0.85


def test_each_instruction_occupies_its_unit() -> None:
    code = {
        "alu": (
            "LOP3.LUT",
            "FMNMX.NAN",
            "FSETP.NE.AND",
            "FSEL",
            "PRMT",
            "SHF.R.U32.HI",
            "F2FP.BF16.F32.PACK_AB",
            "LEA.HI",
        ),
        "fma": ("FFMA", "FMUL.RZ", "HFMA2.BF16_V2"),
        "special": ("MUFU.RCP", "F2I.FTZ.U32.TRUNC.NTZ"),
        "memory": ("LDG.E.128", "STS.64", "SHFL.BFLY", "RED.E.ADD"),
    }
    for unit, operations in code.items():
        assert units_of(operations) == replace(Units(issued=len(operations)), **{unit: len(operations)})
    assert units_of(["IMAD.SHL.U32", "MOV"]) == Units(fma=4, issued=2)
    assert units_of(["BRA", "EXIT", "ULDC.64", "UIMAD", "S2R", "BAR.SYNC.DEFER_BLOCKING"]) == Units(issued=6)


def test_the_busiest_unit_counts() -> None:
    assert Units(alu=64, fma=64, issued=128).clocks() == 1
    assert Units(alu=64, fma=256, issued=128).clocks() == 2
    assert Units(special=32, issued=32).clocks() == 2
    assert (Units(alu=1, issued=2) + Units(alu=2, issued=2)) * 3 == Units(alu=9, issued=12)


def test_a_launch_takes_the_longer_of_both_and_more_where_they_are_alike() -> None:
    memory = seconds(10**9)
    assert memory == pytest.approx(10**9 / model.BANDWIDTH)
    threads = 10**8
    busy = seconds(0, threads, Units(alu=64, issued=64))
    assert busy == pytest.approx(threads / (model.SMS * model.CLOCK * model.REACHED))
    both = seconds(int(busy * model.BANDWIDTH), threads, Units(alu=64, issued=64))
    assert both == pytest.approx(busy * 2 ** (1 / model.SHARPNESS), rel=1e-6)
    assert memory < seconds(10**9, 10**6, Units(alu=64, issued=64)) < memory * 1.01
