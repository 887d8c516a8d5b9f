"""What Triton code computes, run in Triton's interpreter: the golden bytes, and those of eager kernels.

Both inductor's code and kernels written by hand, of which that of inductor takes the place where they fail.

The interpreter does what the code says, in the code's own dtypes. It cannot tell what a GPU's units do otherwise:
denormals that are flushed (test_budgets.py finds the instructions that would) and inexact divisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qtensor import Float8BlockScaling, Float8CurrentScaling, Int4GroupScaling, MXFP4BlockScaling, MXFP8BlockScaling
from qtensor.numerics import kernels
from qtensor.spec.blocks import row_amax
from qtensor.spec.registry import encode, shared_amax, specs_of
from tests.gpu_offline.interpreted import Interpreter
from tests.gpu_offline.recipes import RECIPES

CASES = (
    "normal_bf16",
    "tiny_fp32",
    "subnormal_fp32",
    "huge_fp32",
    "zero_blocks_bf16",
    "ties_fp32",
    "powers_of_two_fp32",
    "non_finite_fp32",
)
INF, NAN = float("inf"), float("nan")
every_kernel = pytest.mark.parametrize(("name", "by_hand"), [(name, own) for name in RECIPES for own in (False, True)])
every_written = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def raw(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert found[name].shape == part.shape, f"{where}: {name}"
        assert found[name].dtype == part.dtype, f"{where}: {name}"
        assert torch.equal(raw(found[name]), raw(part)), f"{where}: {name} differs"


@every_kernel
def test_kernels_give_the_golden_bytes(interpreter: Interpreter, golden_dir: Path, name: str, by_hand: bool) -> None:
    recipe, golden = RECIPES[name], load_file(golden_dir / f"{name}.safetensors")
    for case in CASES:
        parts = {spec.name: golden[f"{case}.{spec.name}"].view(spec.dtype) for spec in specs_of(recipe)}
        before = interpreter.launches()
        assert_same(interpreter.encode(golden[f"{case}.input"], recipe, by_hand=by_hand), parts, case)
        assert interpreter.launches() > before
        before = interpreter.launches()
        values = interpreter.decode(parts, recipe, torch.float32, by_hand=by_hand)
        assert interpreter.launches() > before
        assert torch.equal(raw(values), raw(golden[f"{case}.dequantized"])), f"{case}: values differ"


def awkward(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values of all magnitudes, denormal ones too, zeros of both signs, blocks of zeros, and what is not finite."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
    x *= torch.exp2(-torch.randint(0, 24, x.shape, generator=generator).float())
    x[:, 3], x[:, 4] = 0.0, -0.0
    x[1] = 0.0
    x[2] *= 1e-38  # denormal, most of them
    x[3] *= -1e30
    x[5, 7], x[7, 10], x[7, 20] = NAN, INF, -INF
    return x.to(dtype)


@every_kernel
def test_kernels_give_the_bytes_of_eager_ones(interpreter: Interpreter, name: str, by_hand: bool) -> None:
    """Rows that fill no program; where the format has them, rows and square blocks that end in a smaller block."""
    recipe = RECIPES[name]
    ragged = any(spec.ragged for spec in specs_of(recipe))
    group = 1 if ragged else kernels.row_multiple(recipe)
    rows, columns = 37 + -37 % group, 200 if ragged else 416
    x = awkward(rows, columns, torch.bfloat16)
    values = x.to(torch.float32)
    parts = encode(values, recipe, shared_amax(values, recipe))
    assert_same(interpreter.encode(x, recipe, by_hand=by_hand), parts, f"{rows} x {columns}")
    for dtype in (torch.float32, torch.bfloat16):
        found = interpreter.decode(parts, recipe, dtype, by_hand=by_hand)
        assert_same_values(found, kernels.decode(parts, recipe, dtype))  # too small for kernels that are compiled


def assert_same_values(found: Tensor, wanted: Tensor) -> None:
    if wanted.dtype != torch.float32:  # which NaN a NaN becomes, is up to the conversion
        assert torch.equal(found.isnan(), wanted.isnan())
        found, wanted = found.nan_to_num(7.0), wanted.nan_to_num(7.0)
    assert torch.equal(raw(found), raw(wanted))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", ["float8_tensor", "nvfp4_row"])
def test_a_gathered_weight_decodes_to_what_its_shards_do(interpreter: Interpreter, name: str, by_hand: bool) -> None:
    """Each row under the tensor-wide scale of the rank that sent it."""
    recipe = RECIPES[name]
    wide = kernels.tensor_wide(recipe)
    assert wide is not None
    shards = []
    for factor in (1.0, 100.0, 0.01):
        values = awkward(8, 64, torch.float32).nan_to_num(1.0, 1.0, -1.0) * factor
        shards.append(encode(values, recipe, shared_amax(values, recipe)))
    parts = {
        part: torch.cat([shard[part].reshape(1, 1).expand(8, 1) if part == wide else shard[part] for shard in shards])
        for part in shards[0]
    }
    wanted = torch.cat([kernels.decode(shard, recipe, torch.bfloat16) for shard in shards])
    assert torch.equal(raw(interpreter.decode(parts, recipe, torch.bfloat16, by_hand=by_hand)), raw(wanted))


# -- written by hand ---------------------------------------------------------------------------------------------------


def parts_of(x: Tensor, recipe: Any, amax: Tensor | None = None) -> dict[str, Tensor]:
    """As the format defines them."""
    values = x.to(torch.float32)
    return encode(values, recipe, shared_amax(values, recipe) if amax is None else amax)


@every_written
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 8224), (528, 128)])
def test_every_dtype_and_tile_has_the_bytes_of_the_definition(
    interpreter: Interpreter, name: str, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """A tile that is filled in part, rows longer than tiles, and rows of which a tile has several."""
    recipe, x = RECIPES[name], awkward(rows, columns, dtype)
    parts = parts_of(x, recipe)
    assert_same(interpreter.encode(x, recipe), parts, f"{rows} x {columns}")
    assert_same_values(interpreter.decode(parts, recipe, dtype), kernels.decode(parts, recipe, dtype))


@every_written
def test_stacks_strided_values_and_shards_have_the_bytes_of_the_definition(interpreter: Interpreter, name: str) -> None:
    recipe, group = RECIPES[name], kernels.row_multiple(RECIPES[name])
    x = awkward(96, 128, torch.bfloat16)
    behind = x.flatten()[1 : 1 + 64 * 128].view(64, 128)  # begins between two words
    shard = x[: group + 3]  # ends within a square block
    for values in (x.view(3, 32, 128), x.t(), x[:, 32:64], behind, shard, x[0]):
        if values.ndim > 1 or group == 1:
            parts = parts_of(values, recipe)
            assert_same(interpreter.encode(values, recipe), parts, str(values.shape))
            assert_same_values(interpreter.decode(parts, recipe, torch.bfloat16), decoded(parts, recipe))
    empty = x[:0]
    assert_same(interpreter.encode(empty, recipe), parts_of(empty, recipe), "empty")
    assert interpreter.decode(parts_of(empty, recipe), recipe, torch.bfloat16).shape == (0, 128)


OPTIONS = {
    "float8_e5m2": Float8CurrentScaling(element="e5m2"),
    "float8_power_of_two": Float8CurrentScaling(power_of_two=True),
    "float8_tensor_e5m2": Float8CurrentScaling(granularity="tensor", element="e5m2", power_of_two=True),
    "float8_block_e5m2": Float8BlockScaling(element="e5m2", blocks="row", power_of_two=True),
    "mxfp8_e5m2": MXFP8BlockScaling(element="e5m2"),
    "mxfp8_floor": MXFP8BlockScaling(scale_rounding="floor"),
    "mxfp8_e5m2_floor": MXFP8BlockScaling(element="e5m2", scale_rounding="floor"),
    "mxfp4_floor": MXFP4BlockScaling(scale_rounding="floor"),
    "int4_64": Int4GroupScaling(group=64),
    "int4_128": Int4GroupScaling(group=128),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_the_bytes_of_the_definition(interpreter: Interpreter, name: str) -> None:
    recipe, x = OPTIONS[name], awkward(37, 384, torch.bfloat16)
    parts = parts_of(x, recipe)
    assert_same(interpreter.encode(x, recipe), parts, name)
    assert_same_values(interpreter.decode(parts, recipe, torch.bfloat16), decoded(parts, recipe))


@every_written
def test_numbers_beside_ties_have_the_bytes_of_the_definition(interpreter: Interpreter, name: str) -> None:
    """Each half between two elements times a scale, and the fp32 numbers before and after it."""
    generator = torch.Generator().manual_seed(0)
    numbers = [0.25, 0.5, 0.75, 1.25, 1.5, 1.75, 2.5, 3.5, 4.5, 5.0, 5.5, 6.5, 7.5, 0.0]
    halves = torch.tensor(numbers, dtype=torch.float32)
    for exponent in (0, 100, -100, -136):  # of INT4's scales, the last in denormal numbers
        mantissas = torch.randint(128, 256, (64, 1), generator=generator).float()
        x = torch.cat([halves * (mantissas * 2.0**-7), halves * (mantissas * 2.0**-7)], 1)
        x = (x * 2.0 ** (exponent // 2)) * 2.0 ** (exponent - exponent // 2)
        x = torch.nn.functional.pad(x, (2, 2))  # two blocks of 16, one of 32
        x[:, 0] = x[:, 14]  # 7.5 scales are the largest
        bits = x.view(torch.int32)
        bits[:, 2:16] += torch.tensor([-1, 0, 1], dtype=torch.int32).repeat(5)[:14] * (bits[:, 2:16] > 0)
        bits[32:, 16:30] += torch.tensor([1, -1, 0], dtype=torch.int32).repeat(5)[:14] * (bits[32:, 16:30] > 0)
        x[::2] *= -1
        assert_same(interpreter.encode(x, RECIPES[name]), parts_of(x, RECIPES[name]), str(exponent))


def test_tensor_wide_scales_may_stand_once_for_all_rows(interpreter: Interpreter) -> None:
    recipe, x = RECIPES["nvfp4_row"], awkward(40, 64, torch.bfloat16)
    one = shared_amax(x.to(torch.float32), recipe)
    assert one is not None
    parts = parts_of(x, recipe, one.expand(40, 1))
    assert_same(interpreter.encode(x, recipe, one.reshape(1, 1).expand(40, 1)), parts, "one amax for all rows")
    spread = {**parts, "global_scale": parts["global_scale"][:1].expand(40, 1)}
    assert_same_values(interpreter.decode(spread, recipe, torch.bfloat16), decoded(parts, recipe))


def test_every_row_may_have_an_amax_of_its_own(interpreter: Interpreter) -> None:
    recipe, x = RECIPES["nvfp4_row"], awkward(40, 2096, torch.bfloat16)  # 131 blocks a row
    amax = row_amax(x.to(torch.float32)) * torch.linspace(0.5, 2.0, 40, dtype=torch.float32).unsqueeze(1)
    parts = parts_of(x, recipe, amax)
    assert_same(interpreter.encode(x, recipe, amax), parts, "an amax a row")
    assert_same_values(interpreter.decode(parts, recipe, torch.float32), kernels.decode(parts, recipe, torch.float32))


def decoded(parts: dict[str, Tensor], recipe: Any) -> Tensor:
    return kernels.decode(parts, recipe, torch.bfloat16)


def test_tiles_that_32_bits_do_not_count_are_left_to_inductor() -> None:
    from qtensor.numerics.triton_kernels import float8, launching  # which import Triton

    assert launching.tiles(16, 2**24, 16, 64, 8) == 2**24 // 4
    with pytest.raises(OverflowError, match=r"^square blocks of 16 rows of 16777217 blocks each"):
        launching.tiles(16, 2**24 + 1, 16, 64, 8)
    with pytest.raises(OverflowError, match=r"^square blocks of 128 .* more than the 16777216 that"):
        launching.tiles(128, 2**17 + 1, 128, 128, 128)
    assert launching.tiles(16, 2**24 + 1, 1, 64, 8) == 2**22 + 1
    with pytest.raises(OverflowError, match=r"^2147483648 blocks"):
        launching.tiles(2, 2**30, 1, 64, 8)
    assert float8.tile_of_rows(torch.Size([9, 2**28]), 64) == (8, 1024, 2 * 2**18)
    with pytest.raises(OverflowError, match=r"^8 rows of 268435457 elements"):
        float8.tile_of_rows(torch.Size([9, 2**28 + 1]), 64)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_code_and_every_tie_of_float8_has_the_bytes_of_the_definition(
    interpreter: Interpreter, element: str
) -> None:
    """All 256 codes are decoded; each half between two elements is encoded, and the fp32 numbers beside it."""
    recipe = Float8CurrentScaling(element=element, power_of_two=True)
    dtype = specs_of(recipe)[0].dtype
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(3, 256).contiguous().view(dtype)
    scale = torch.tensor([[1.0], [2.0**-120], [3.0]], dtype=torch.float32)
    parts = {"payload": codes, "scale": scale}
    for to in (torch.float32, torch.bfloat16):
        assert_same_values(interpreter.decode(parts, recipe, to), kernels.decode(parts, recipe, to))
    values = codes[0].float()
    values = values[values.isfinite() & (values >= 0)]  # in order
    ties = (values[1:] + values[:-1]) / 2
    numbers = torch.cat([ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0), values])
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.numel() % 16), value=float(values[-1]))
    x = torch.stack([numbers, -numbers, numbers * 2.0**-40])
    assert_same(interpreter.encode(x, recipe), parts_of(x, recipe), element)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_any_length_have_the_bytes_of_the_definition(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Shorter than what a program holds, no power of two, odd; for more warps, and too long for any."""
    recipe = RECIPES["float8_row"]
    for rows, columns in ((9, 24), (40, 33), (9, 1500), (8, 8200), (8, 2**15 + 8)):
        x = awkward(rows, columns, dtype)
        parts = parts_of(x, recipe)
        before = interpreter.launches()
        assert_same(interpreter.encode(x, recipe), parts, f"{rows} x {columns}")
        assert interpreter.launches() - before == (2 if columns > 2**15 else 1)
        amax = row_amax(x.to(torch.float32)) * 0.75  # of a piece that has not the row's largest
        assert_same(interpreter.encode(x, recipe, amax), parts_of(x, recipe, amax), "an amax that is given")
