"""What inductor's Triton code computes, run in Triton's interpreter: the golden bytes, and those of eager kernels.

The interpreter does what the code says, in the code's own dtypes. It cannot tell what a GPU's units do otherwise:
denormals that are flushed (test_budgets.py finds the instructions that would) and inexact divisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qtensor import kernels
from qtensor.formats import encode, shared_amax, specs_of
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
every_recipe = pytest.mark.parametrize("name", RECIPES)


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


@every_recipe
def test_emitted_kernels_give_the_golden_bytes(interpreter: Interpreter, golden_dir: Path, name: str) -> None:
    recipe, golden = RECIPES[name], load_file(golden_dir / f"{name}.safetensors")
    for case in CASES:
        parts = {spec.name: golden[f"{case}.{spec.name}"].view(spec.dtype) for spec in specs_of(recipe)}
        before = interpreter.launches()
        assert_same(interpreter.encode(golden[f"{case}.input"], recipe), parts, case)
        assert interpreter.launches() > before
        before = interpreter.launches()
        values = interpreter.decode(parts, recipe, torch.float32)
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


@every_recipe
def test_emitted_kernels_give_the_bytes_of_eager_ones(interpreter: Interpreter, name: str) -> None:
    """Rows that fill no program; where the format has them, rows and square blocks that end in a smaller block."""
    recipe = RECIPES[name]
    ragged = any(spec.ragged for spec in specs_of(recipe))
    group = 1 if ragged else kernels.row_multiple(recipe)
    rows, columns = 37 + -37 % group, 200 if ragged else 416
    x = awkward(rows, columns, torch.bfloat16)
    values = x.to(torch.float32)
    parts = encode(values, recipe, shared_amax(values, recipe))
    assert_same(interpreter.encode(x, recipe), parts, f"{rows} x {columns}")
    for dtype in (torch.float32, torch.bfloat16):
        found = interpreter.decode(parts, recipe, dtype)
        wanted = kernels.decode(parts, recipe, dtype)  # below the size from which kernels are compiled
        if dtype == torch.bfloat16:  # which NaN a bf16 NaN is, is up to the conversion
            assert torch.equal(found.isnan(), wanted.isnan())
            found, wanted = found.nan_to_num(7.0), wanted.nan_to_num(7.0)
        assert torch.equal(raw(found), raw(wanted))


@pytest.mark.parametrize("name", ["float8_tensor", "nvfp4_row"])
def test_a_gathered_weight_decodes_to_what_its_shards_do(interpreter: Interpreter, name: str) -> None:
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
    assert torch.equal(raw(interpreter.decode(parts, recipe, torch.bfloat16)), raw(wanted))
