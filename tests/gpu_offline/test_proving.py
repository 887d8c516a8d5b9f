"""Each kernel written by hand is tried before it runs: a right one passes, a broken one is refused, and results stay.

In a process in which Triton interprets. Kernels are broken one piece of text at a time, so that the numbers that they
are tried with are shown to reach each branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import qtensor as qt
from qtensor.numerics import kernels, transposing, triton_kernels
from qtensor.probes.calls import LONG, WIDE, _Encoding
from qtensor.spec.registry import format_of, registrations, tensor_wide
from tests.gpu_offline import proving
from tests.gpu_offline.interpreted import Interpreter
from tests.gpu_offline.recipes import RECIPES
from tests.gpu_offline.test_interpreted import OPTIONS
from tests.sampling import sampled

if TYPE_CHECKING:
    from fsdp_hooks.kernels.compiled import Kernel
    from qtensor.spec.recipes import Recipe

NUMERICS = "qtensor.numerics"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8 = qt.Float8CurrentScaling()
ALL = {**RECIPES, **OPTIONS}


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def kinds(recipe: Recipe) -> list[_Encoding]:
    """Of calls that encode, but for those that find an amax of all values: 512 programs take seconds."""
    wide, unblocked = tensor_wide(recipe) is not None, kernels.block_multiple(recipe) == 1
    dims = ([] if wide else [None]) + ([0, 2] if wide else [2] if kernels.shares_amax(recipe) else [])
    return [_Encoding(lanes, each) for each in dims for lanes in ((5, WIDE) if unblocked else (0,))]


def encoding(recipe: Recipe, dtype: torch.dtype, kind: _Encoding) -> tuple[Any, ...]:
    own = kind.dims is None and kernels.shares_amax(recipe)
    return f"{NUMERICS}.kernels._encode_kernel", (recipe, dtype), {"own": own}, kind


def decoding(recipe: Recipe, dtype: torch.dtype, *, per_row: bool = False) -> tuple[Any, ...]:
    dims = None if tensor_wide(recipe) is None else 2 if per_row else 0
    kind = _Encoding(WIDE if kernels.block_multiple(recipe) == 1 else 0, dims)
    return f"{NUMERICS}.kernels._decode_kernel", (recipe, dtype), {"per_row": per_row}, kind


# -- right ones --------------------------------------------------------------------------------------------------------


DTYPES = (BF16, FP16, FP32)
CASES = [(name, dtype) for name in ALL for dtype in DTYPES]


@sampled(("name", "dtype"), CASES, kept=[(name, DTYPES[number % 3]) for number, name in enumerate(ALL)])
def test_right_kernels_prove_themselves(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    recipe = ALL[name]
    for kind in kinds(recipe):
        assert interpreter.run(proving.proofs, *encoding(recipe, dtype, kind)) == "", kind
    for per_row in (False, True) if tensor_wide(recipe) else (False,):
        assert interpreter.run(proving.proofs, *decoding(recipe, dtype, per_row=per_row)) == ""


def test_rows_of_any_length_and_amaxes_of_all_values_prove_themselves(interpreter: Interpreter) -> None:
    for lanes in (4, 14, LONG):
        assert interpreter.run(proving.proofs, *encoding(FLOAT8, BF16, _Encoding(lanes, None))) == ""
    assert interpreter.run(proving.proofs, *encoding(RECIPES["nvfp4_row"], BF16, _Encoding(0, None))) == ""
    assert interpreter.run(proving.proofs, f"{NUMERICS}.kernels._amax_kernel", (FP32,), {"rows": False}, None) == ""


def test_integers_for_fp8_of_older_gpus_prove_themselves(interpreter: Interpreter) -> None:
    how = (f"{NUMERICS}.triton_kernels.fp8", *OLDER)
    for recipe in (FLOAT8, OPTIONS["float8_e5m2"], RECIPES["nvfp4_row"]):
        for kind in kinds(recipe)[:1]:
            assert interpreter.run(proving.proofs, *encoding(recipe, FP32, kind), how) == ""


def test_transposes_prove_themselves(interpreter: Interpreter) -> None:
    for dtype in (torch.float8_e4m3fn, BF16, torch.int64):
        assert interpreter.run(proving.proofs, *TRANSPOSE, dtype) == ""
    for recipe in (FLOAT8, OPTIONS["float8_e5m2"]):
        for dtype in (BF16, FP32):
            columns, both = turning("columns", recipe, dtype), turning("both", recipe, dtype)
            assert interpreter.run(proving.proofs, *columns, None) == ""
            for factors in (None, 1, 2):
                assert interpreter.run(proving.proofs, *both, factors) == ""


TRANSPOSE: tuple[Any, ...] = (f"{NUMERICS}.transposing._transpose_kernel", (), {})


def turning(what: str, recipe: Recipe, dtype: torch.dtype) -> tuple[Any, ...]:
    return f"{NUMERICS}.transposing._{what}_kernel", (recipe.stored, dtype, 16), {}


# -- none goes untried -------------------------------------------------------------------------------------------------


def test_every_kernel_of_every_format_comes_with_what_it_is_tried_with() -> None:
    """Kernels take code written by hand together with its probes; and each format's have some, for every dtype."""
    seen = 0
    recipes = [*ALL.values(), *(kind() for kind in registrations())]
    recipes += [recipe for each in registrations().values() for recipe in each.names.values()]
    made: list[Kernel] = []
    for recipe in recipes:
        if format_of(recipe).by_hand(recipe) is None:
            continue
        for dtype in triton_kernels.DTYPES:
            made += [kernels._encode_kernel(recipe.stored, dtype, own=own) for own in (False, True)]
            made += [kernels._decode_kernel(recipe.stored, dtype, per_row=per_row) for per_row in (False, True)]
            made += [transposing._columns_kernel(recipe.stored, dtype, 16)]
            made += [transposing._both_kernel(recipe.stored, dtype, 16)]
    made += [kernels._amax_kernel(BF16, rows=False), transposing._transpose_kernel()]
    for kernel in made:
        seen += kernel.by_hand is not None
        assert (kernel.by_hand is None) == (kernel.probes is None)
    assert seen > 100
    for recipe in RECIPES.values():
        for kind in kinds(recipe):
            probes = kernels._encode_kernel(recipe, BF16, own=kind.dims is None and kernels.shares_amax(recipe)).probes
            assert probes is not None
            calls = list(probes.calls(kind))
            assert calls
            assert {probes.kind(*args) for args in calls} == {kind}


# -- broken ones -------------------------------------------------------------------------------------------------------

OLDER = (("return converted(x, enc, E4M3) if cuda_capability_geq(9, 0) else", "return"),)
MX, MX5, FLOOR = RECIPES["mxfp8_row"], OPTIONS["mxfp8_e5m2"], OPTIONS["mxfp8_floor"]
MX4, NV, INT4 = RECIPES["mxfp4_up"], RECIPES["nvfp4_row"], RECIPES["int4_32"]
ROW, TENSOR, POWER = FLOAT8, RECIPES["float8_tensor"], OPTIONS["float8_power_of_two"]
KERNELS = f"{NUMERICS}.triton_kernels"
ENCODERS: dict[str, tuple[Recipe, torch.dtype, int | None, str, tuple[str, str]]] = {
    # ties
    "ties of MXFP4 below": (MX4, BF16, None, "e2m1", ("tl.fma(scaled, 0.5, -1.0)", "tl.fma(scaled, 0.4999999, -1.0)")),
    "ties of MXFP4 above": (MX4, BF16, None, "e2m1", ("tl.fma(scaled, 0.5, -2.0)", "tl.fma(scaled, 0.5000001, -2.0)")),
    "ties of MXFP4 at 0": (MX4, FP32, None, "e2m1", ("(scaled * 0.5), 4.0", "(scaled * 0.5000001), 4.0")),
    "ties of E4M3 down": (MX, BF16, None, "fp8", ("tl.fma(x, 0.0, x * enc)", "tl.fma(x, 0.0, x * enc * 0.9999999)")),
    "ties of E4M3 up": (MX, FP32, None, "fp8", ("tl.fma(x, 0.0, x * enc)", "tl.fma(x, 0.0, x * enc * 1.0000002)")),
    "ties of E5M2": (MX5, BF16, None, "fp8", ("(x * enc).to(tl.float8e5)", "(x * enc * 0.9999999).to(tl.float8e5)")),
    "ties of Float8": (ROW, FP16, None, "fp8", ("tl.fma(x, 0.0, x * enc)", "tl.fma(x, 0.0, x * enc * 0.9999999)")),
    "ties of INT4": (INT4, BF16, None, "int4", ("maximum(y, -8.0), 7.0)", "maximum(y * 0.9999999, -8.0), 7.0)")),
    "quotients of INT4": (INT4, FP32, None, "int4", ("y = tl.fma(tl.fma(y, 0.0 - dec, x), enc, y)", "y = y")),
    "ties of NVFP4's scales": (
        *(NV, BF16, 0, "nvfp4"),
        (
            "number_amax_of(whole_low, whole_high, SQUARE) *",
            "number_amax_of(whole_low, whole_high, SQUARE) * 0.9999999 *",
        ),
    ),
    "ties of INT4's scales": (INT4, FP32, None, "int4", ("((bits >> 16) & 1)", "0")),
    # scales
    "a code too many": (
        MX,
        BF16,
        None,
        "mxfp8",
        ("marked.to(tl.uint8)", "tl.where(marked < 255, marked + 1, marked).to(tl.uint8)"),
    ),
    "up only from 2 bits on": (MX, FP32, None, "e8m0", ("(mantissa > 0)", "(mantissa > 2)")),
    "the smallest scale": (MX4, FP32, None, "e8m0", ("(bits > SMALLEST_BITS)", "(bits > 0)")),
    "no least code": (
        FLOOR,
        BF16,
        None,
        "e8m0",
        ("tl.maximum((bits_of(amax) >> 23) - EXPONENT, 0)", "(bits_of(amax) >> 23) - EXPONENT"),
    ),
    "no mark": (MX4, BF16, None, "mxfp4", ("code, e8m0.NAN_CODE)", "code, code)")),
    "no mark for INT4": (INT4, BF16, None, "int4", ("code, NAN_CODE)", "code, code)")),
    "no scale of zeros": (INT4, BF16, None, "int4", ("tl.where(code == 0, ONE_BITS, code)", "code")),
    "tiny scales": (INT4, FP32, None, "int4", ("tl.where(dec < TINY, LARGER, 1.0)", "1.0 + 0.0 * dec")),
    "Float8 of zeros": (ROW, BF16, None, "float8", ("tl.where(amax == 0.0, 1.0, enc)", "enc")),
    "the largest scale": (
        ROW,
        FP32,
        None,
        "float8",
        (
            "tl.minimum(tl.math.div_rn(448.0 if E4M3 else 57344.0, amax), FLT_MAX)",
            "tl.math.div_rn(448.0 if E4M3 else 57344.0, amax)",
        ),
    ),
    "powers of two": (POWER, BF16, None, "float8", ("& INF_BITS", "& 0x7F000000")),
    "an amax of all": (TENSOR, BF16, 0, "float8", ("else tl.load(amax)", "else tl.load(amax) * 1.0000002")),
    "an amax a row": (
        TENSOR,
        BF16,
        2,
        "float8",
        ("tl.load(amax + own, mask=there, other=0.0)", "tl.load(amax + own * 0, mask=there, other=0.0)"),
    ),
    "NVFP4 of zeros": (NV, BF16, 0, "nvfp4", ("tl.where(amax == 0.0, 1.0,", "tl.where(amax < 0.0, 1.0,")),
    "NVFP4's largest scale": (
        NV,
        FP32,
        0,
        "nvfp4",
        ("tl.minimum(tl.math.div_rn(LARGEST, amax), FLT_MAX)", "tl.math.div_rn(LARGEST, amax)"),
    ),
    "NVFP4's largest block": (
        NV,
        FP32,
        0,
        "nvfp4",
        ("tl.minimum(tl.math.div_rn(1.0, rounded * dec), FLT_MAX)", "tl.math.div_rn(1.0, rounded * dec)"),
    ),
    "NVFP4's rows": (
        NV,
        FP32,
        2,
        "nvfp4",
        ("wide + row, mask=there, other=1.0", "wide + row * 0, mask=there, other=1.0"),
    ),
    # values that are not finite, and signs
    "infinities count": (MX, BF16, None, "pairs", ("return tl.fma(x, 0.0, x)", "return x")),
    "NaN of E5M2": (MX5, BF16, None, "fp8", ("tl.uint8, bitcast=True), NAN_CODE)", "tl.uint8, bitcast=True), 0x7E)")),
    "no sign of 0": (
        MX4,
        BF16,
        None,
        "e2m1",
        ("(bits_of(low) >> 28) & 8 | (bits_of(high) >> 24)", "(bits_of(low + 0.0) >> 28) & 8 | (bits_of(high) >> 24)"),
    ),
    "no sign above": (MX4, BF16, None, "e2m1", ("| (bits_of(high) >> 24) & 0x80", "")),
    # lanes
    "one lane": (
        MX,
        BF16,
        None,
        "mxfp8",
        (
            "[:, None], E4M3)\n    tl.store(payload",
            "[:, None], E4M3)\n    byte ^= (tl.arange(0, LANES)[None, :] == 9).to(tl.uint8)\n    tl.store(payload",
        ),
    ),
    "a block's last lane": (
        MX4,
        BF16,
        None,
        "mxfp4",
        (
            "byte = e2m1.byte(whole_low, whole_high, enc)",
            "byte = e2m1.byte(whole_low, tl.where(tl.arange(0, PAIRS)[None, :] == 15, 0.0, whole_high), enc)",
        ),
    ),
    "fp16": (MX4, FP16, None, "pairs", ("high = (word >> 16).to(tl.int16)", "high = (word >> 15).to(tl.int16)")),
    "fp32": (MX4, FP32, None, "pairs", ("(word >> 32).to(tl.int32)", "((word >> 32) & -2).to(tl.int32)")),
    "square blocks": (
        RECIPES["mxfp8_square"],
        BF16,
        None,
        "pairs",
        ("tl.reduce(rows, 0, _larger)[None, :], rows.shape", "rows, rows.shape"),
    ),
}
DECODERS: dict[str, tuple[Recipe, torch.dtype, bool, str, tuple[str, str]]] = {
    "the least power": (MX4, FP32, False, "e8m0", ("tl.where(code == 0, SMALLEST_BITS, code << 23)", "code << 23")),
    "halves of E2M1": (MX4, BF16, False, "e2m1", ("((code & 7) << 22)", "((code & 6) << 22)")),
    "a sign": (MX4, FP32, False, "e2m1", ("| ((code & 8) << 28)", "")),
    "no NaN of scales": (
        MX4,
        BF16,
        False,
        "e8m0",
        ("tl.where(code == NAN_CODE, NAN_BITS, power_bits(code))", "power_bits(code)"),
    ),
    "no NaN of E4M3": (MX, BF16, False, "fp8", ("tl.abs(value) > 448.0", "tl.abs(value) > 1000.0")),
    "E4M3": (ROW, FP32, False, "fp8", ("& -0x78100000", "& -0x78200000")),
    "E5M2": (
        OPTIONS["float8_e5m2"],
        FP32,
        False,
        "fp8",
        ("(code.to(tl.int16) << 8)", "((code & 0xFE).to(tl.int16) << 8)"),
    ),
    "INT4": (INT4, BF16, False, "int4", ("8388616.0", "8388615.0")),
    "NaN that differ": (
        INT4,
        FP32,
        False,
        "pairs",
        ("x = number_of(tl.where((bits & 0x7FFFFFFF) > INF_BITS, NAN_BITS, bits))", "x = number_of(bits)"),
    ),
    "columns": (
        NV,
        BF16,
        False,
        "nvfp4",
        (
            "joined(e2m1.value(byte) * dec, e2m1.value(byte >> 4)",
            "joined(e2m1.value(byte >> 4) * dec, e2m1.value(byte)",
        ),
    ),
    "scales of shards": (
        NV,
        BF16,
        True,
        "nvfp4",
        (
            "(first.to(tl.int32) + at) // columns, mask=there, other=0.0",
            "(first.to(tl.int32) + at) // (columns + 1), mask=there, other=0.0",
        ),
    ),
    "one scale": (
        TENSOR,
        BF16,
        False,
        "float8",
        ("if BY_ROW else tl.load(scale)", "if BY_ROW else tl.load(scale) + 1e-7"),
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_kernels_that_encode_otherwise_are_found(interpreter: Interpreter, name: str) -> None:
    recipe, dtype, dims, module, change = ENCODERS[name]
    kind = _Encoding(WIDE if kernels.block_multiple(recipe) == 1 else 0, dims)
    found = interpreter.run(proving.proofs, *encoding(recipe, dtype, kind), (f"{KERNELS}.{module}", change))
    assert "expected 0x" in found


@pytest.mark.parametrize("name", DECODERS)
def test_kernels_that_decode_otherwise_are_found(interpreter: Interpreter, name: str) -> None:
    recipe, dtype, per_row, module, change = DECODERS[name]
    found = interpreter.run(proving.proofs, *decoding(recipe, dtype, per_row=per_row), (f"{KERNELS}.{module}", change))
    assert "expected 0x" in found


TURNED = {
    "a tile's last column": (
        "columns",
        None,
        (
            "known & (row == 0)",
            "known & (row == 0) & (lane != 127)",
        ),
    ),
    "amaxes of columns": (
        "columns",
        None,
        (
            "bits_of(tl.max(tl.abs(finite(values)), axis=0))\n    tl.atomic_max(found + (column + lane)",
            "bits_of(tl.max(tl.abs(values), axis=0))\n    tl.atomic_max(found + (column + lane)",
        ),
    ),
    "factors of all": ("both", 1, ("values = values * tl.load(factors)\n", "values = values * tl.load(factors + 1)\n")),
    "factors of columns": ("both", 2, ("tl.load(factors + (column + lane), mask", "tl.load(factors + lane, mask")),
    "codes of rows": ("both", 2, ("fp8.code(scaled, enc[:, None], E4M3)", "fp8.code(values, enc[:, None], E4M3)")),
}


@pytest.mark.parametrize("name", TURNED)
def test_kernels_that_turn_otherwise_are_found(interpreter: Interpreter, name: str) -> None:
    what, kind, change = TURNED[name]
    how = (f"{NUMERICS}.triton_transposes", change)
    assert "expected 0x" in interpreter.run(proving.proofs, *turning(what, FLOAT8, FP32), kind, how)


def test_numbers_that_are_moved_otherwise_are_found(interpreter: Interpreter) -> None:
    how = (f"{NUMERICS}.triton_transposes", ("tl.trans(values), mask=there)", "tl.trans(values) & 127, mask=there)"))
    found = interpreter.run(proving.proofs, *TRANSPOSE, torch.int64, how)
    assert "of 0x" in found
    assert "expected 0x" in found
    change = (
        "tl.abs(whole(values)))\n    tl.store(found + tl.program_id(0), tl.max(amax, axis=0))\n\n\n",
        "tl.abs(values))\n    tl.store(found + tl.program_id(0), tl.max(amax, axis=0))\n\n\n",
    )
    amax = f"{NUMERICS}.kernels._amax_kernel", (FP32,), {"rows": False}, None
    assert "expected 0x" in interpreter.run(proving.proofs, *amax, (f"{KERNELS}.reductions", change))


# -- what follows ------------------------------------------------------------------------------------------------------

WRONG = (f"{KERNELS}.mxfp8", ENCODERS["one lane"][4])
TIES = (f"{KERNELS}.fp8", ENCODERS["ties of E4M3 down"][4])


def test_a_right_kernel_is_tried_once(interpreter: Interpreter) -> None:
    found = interpreter.run(proving.used, MX, BF16, ())
    assert (found["said"], found["warned"]) == (["right"] * 2, [])
    assert found["launches"][1] == 2
    assert found["launches"][0] > 2


@pytest.mark.parametrize("how", [WRONG, TIES], ids=["one lane", "ties"])
def test_a_broken_kernel_is_refused_with_one_warning(interpreter: Interpreter, how: Any) -> None:
    found = interpreter.run(proving.used, MX, BF16, how)
    assert found["said"] == ["right"] * 2
    (said,) = found["warned"]
    for piece in ("encode_MXFP8BlockScaling", "on cpu, Triton 3.", " of 0x", ", expected 0x", "Please report"):
        assert piece in said
    # what decodes is right, and is tried alone
    assert found["launches"][1] == 1


def test_a_broken_kernel_raises_where_code_by_hand_is_asked_for(interpreter: Interpreter) -> None:
    found = interpreter.run(proving.used, MX, BF16, WRONG, "compiled")
    assert len(found["said"]) == 2
    for said in found["said"]:
        assert "computes other bytes than the format defines" in said
        assert "QTENSOR_KERNELS=auto" in said
    assert found["warned"] == []


def test_nothing_is_tried_while_a_graph_is_captured(interpreter: Interpreter) -> None:
    """The definition runs then; what was proven before is launched."""
    (first, right), (tried, also), (again, still) = interpreter.run(proving.used_while_captured, MX)
    assert (first, right, also, still, again) == (0, True, True, True, 1)
    assert tried > 1


STEPS: dict[str, tuple[Any, str, torch.dtype, int, tuple[str, str, str]]] = {
    "weights of the mean": (
        MX,
        "ADAM",
        BF16,
        256,
        ("kernel", "tl.fma(tl.load(own + 6), g * g, v", "tl.fma(tl.load(own + 6), g * g * 1.00001, v"),
    ),
    "betas from 0.5 down": (
        None,
        "ADAM",
        BF16,
        256,
        ("kernel", "small = tl.abs(weight) < 0.5", "small = tl.abs(weight) < 0.7"),
    ),
    "no decay": (torch.bfloat16, "ADAM", FP16, 256, ("kernel", "p = p * tl.load(own + 2)", "p = p * 1.0")),
    "no l2": (None, "ADAM", FP32, 17, ("kernel", "g = tl.where(l2 != 0.0, tl.fma(l2, p, g), g)", "g = g + l2 * 0.0")),
    "nesterov": (None, "MOMENTUM", FP32, 256, ("kernel", "tl.load(own + 4) != 0.0", "tl.load(own + 4) != 1.0")),
    "dampening": (
        MX4,
        "MOMENTUM",
        FP32,
        256,
        ("kernel", "b = tl.fma(tl.load(own + 3), g, b * keep)", "b = tl.fma(1.0, g, b * keep)"),
    ),
    "maximize": (None, "PLAIN", FP32, 256, ("kernel", "g = g * tl.load(own + 0)", "g = g * 1.0")),
    "ties": (MX, "ADAM", BF16, 256, ("kernel", "byte = fp8.code(p, e8m0", "byte = fp8.code(p * 0.9999999, e8m0")),
    "a scale": (
        MX,
        "ADAM",
        BF16,
        256,
        ("kernel", "code = e8m0.code_up(amax * (mxfp8", "code = 1 + e8m0.code_up(amax * (mxfp8"),
    ),
    "no mark": (MX4, "PLAIN", BF16, 256, ("kernel", "code, e8m0.NAN_CODE).to(tl.uint8)", "code, code).to(tl.uint8)")),
    "INT4": (INT4, "ADAM", BF16, 256, ("kernel", "(bits >> 16) & 1", "(bits >> 16) & 0")),
    "a long row": (
        ROW,
        "ADAM",
        BF16,
        5008,
        ("kernel", "largest_yet = tl.maximum(largest_yet, ", "largest_yet = tl.maximum(largest_yet * 0.0, "),
    ),
    "an amax": (
        NV,
        "ADAM",
        BF16,
        256,
        ("kernel", "tl.max(tl.max(tl.abs(finite(p)), 1), 0)", "tl.max(tl.max(tl.abs(finite(p)), 1), 0) * 0.9999999"),
    ),
    "under an amax": (
        NV,
        "ADAM",
        BF16,
        256,
        (
            "kernel",
            "wide = tl.load(amax + tl.load(words + SLOT))",
            "wide = tl.load(amax + tl.load(words + SLOT)) * 0.99",
        ),
    ),
    "the scale of all": (
        TENSOR,
        "ADAM",
        BF16,
        256,
        (
            "kernel",
            "code = fp8.code(p, enc, (E5M2 & OPTIONS) == 0)\n",
            "code = fp8.code(p * 1.0000002, enc, (E5M2 & OPTIONS) == 0)\n",
        ),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_right_steps_prove_themselves(interpreter: Interpreter, name: str) -> None:
    for rule, grads, aligned in (("ADAM", BF16, True), ("MOMENTUM", FP32, False)):
        found = interpreter.run(proving.step_proofs, ALL[name], (rule, grads, aligned))
        assert found == [""] * len(found)


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_step_otherwise_are_found(interpreter: Interpreter, name: str) -> None:
    recipe, rule, grads, columns, (module, old, new) = STEPS[name]
    how = (f"qtensor.optim.fused.{module}", (old, new))
    found = interpreter.run(proving.step_proofs, recipe, (rule, grads, True), columns, how)
    assert any("expected 0x" in each and "of the master 0x" in each for each in found)


def test_a_broken_step_leaves_the_general_way(interpreter: Interpreter) -> None:
    found, wanted, warned = interpreter.run(proving.steps_by_a_broken_kernel, MX, STEPS["a scale"][4][1:])
    assert found["tried"]
    assert found["launched"] == []
    assert all(
        torch.equal(after[name], value)
        for after, other in zip(found["after"], wanted["after"], strict=True)
        for name, value in other.items()
    )
    (said,) = warned
    assert "the kernel of the fused step failed (OtherBytesError: on cpu" in said
    assert "take the general way" in said


def test_a_broken_digest_is_refused(interpreter: Interpreter) -> None:
    assert interpreter.run(proving.digests_of, ()) == {"found": ["True"] * 2, "warned": []}
    changes = [
        ("value.to(tl.int64) << (8 * number)", "value.to(tl.int64) << (8 * number % 56)"),
        ("(nbytes + 7) // 8)", "nbytes // 8)"),
        ("* GOLDEN) | 1", "* GOLDEN) | 3"),
    ]
    for change in changes:
        found = interpreter.run(proving.digests_of, (change,))
        assert found["found"] == ["True"] * 2, change
        (said,) = found["warned"]
        assert "kernel written by hand for digests" in said
        assert ", expected 0x" in said
    found = interpreter.run(proving.digests_of, (changes[0],), "compiled")
    assert ["Please report" in said for said in found["found"]] == [True, True]
    assert found["warned"] == []
