"""The bytes are frozen: every golden case, eager and compiled, whole and in row shards.

The golden files hold `<case>.input` and the parts and the decoded values it must give, as raw bytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from qtensor.spec.blocks import canonical_nan
from qtensor.spec.registry import encode, format_of, shared_amax
from tests.qtensor.recipes_under_test import raw, same_bytes

GOLDEN_RECIPES: dict[str, Any] = {  # spelled out, for the files do not change with the recipes that tests share
    "float8_row": Float8CurrentScaling(element="e4m3", granularity="row", power_of_two=False),
    "float8_tensor": Float8CurrentScaling(element="e4m3", granularity="tensor", power_of_two=False),
    "float8_block_square": Float8BlockScaling(element="e4m3", blocks="square", power_of_two=False),
    "float8_block_row": Float8BlockScaling(element="e4m3", blocks="row", power_of_two=False),
    "float8_block_square_pow2": Float8BlockScaling(element="e4m3", blocks="square", power_of_two=True),
    "mxfp8_row": MXFP8BlockScaling(element="e4m3", blocks="row", scale_rounding="up"),
    "mxfp8_square": MXFP8BlockScaling(element="e4m3", blocks="square", scale_rounding="up"),
    "mxfp4_up": MXFP4BlockScaling(scale_rounding="up"),
    "mxfp4_floor": MXFP4BlockScaling(scale_rounding="floor"),
    "int4_32": Int4GroupScaling(group=32),
    "nvfp4_row": NVFP4BlockScaling(blocks="row"),
    "nvfp4_square": NVFP4BlockScaling(blocks="square"),
}
CASES = [
    "normal_bf16",
    "normal_fp32",
    "heavy_tail_bf16",
    "tiny_fp32",
    "subnormal_fp32",
    "huge_fp32",
    "zeros_bf16",
    "zero_blocks_bf16",
    "experts_3d_bf16",
    "ties_fp32",
    "powers_of_two_fp32",
    "non_finite_fp32",
]
LATER_CASES = ["edges_fp32", "kv_a_proj_fp32"]  # in the files of formats that were added later
LATER = ("float8_block_square", "float8_block_row", "float8_block_square_pow2", "mxfp4_up", "mxfp4_floor", "int4_32")
# Other backends and compiled code may flush subnormal inputs to zero.
NOT_COMPILED = "subnormal_fp32"


def cases_of(name: str) -> list[str]:
    return CASES + LATER_CASES if name in LATER else CASES


golden_recipes = pytest.mark.parametrize("name", GOLDEN_RECIPES)
golden_cases = pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in GOLDEN_RECIPES for case in cases_of(name)]
)
# A compilation takes seconds: of the others test_kernels shows that compiled kernels give the bytes of eager ones.
compiled_recipes = pytest.mark.parametrize(
    "name", ["float8_tensor", "mxfp8_row", "nvfp4_square", "float8_block_square", "mxfp4_up", "int4_32"]
)


class Golden:
    """One golden file."""

    def __init__(self, directory: Path, name: str) -> None:
        self.recipe, self.cases = GOLDEN_RECIPES[name], cases_of(name)
        square = {"mxfp8_square": 32, "nvfp4_square": 16, "float8_block_square": 128, "float8_block_square_pow2": 128}
        self.row_multiple = square.get(name, 1)  # what cuts between rows keep to
        self.tensors = load_file(directory / f"{name}.safetensors")

    def input(self, case: str) -> Tensor:
        return self.tensors[f"{case}.input"]

    def decoded(self, case: str) -> Tensor:
        return self.tensors[f"{case}.dequantized"]

    def parts(self, case: str) -> dict[str, Tensor]:
        """The parts in the dtypes of the format."""
        specs = format_of(self.recipe).parts(self.recipe)
        return {spec.name: self.tensors[f"{case}.{spec.name}"].view(spec.dtype) for spec in specs}


@pytest.fixture
def golden(golden_dir: Path, name: str) -> Golden:
    return Golden(golden_dir, name)


def assert_parts(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert same_bytes(found[name].cpu(), part), f"{where}: {name} differs"


def test_the_cases_are_all_of_the_file(golden_dir: Path) -> None:
    for name in GOLDEN_RECIPES:
        assert {key.split(".")[0] for key in Golden(golden_dir, name).tensors} == set(cases_of(name))


@golden_cases
def test_quantize_gives_the_golden_parts(golden: Golden, case: str) -> None:
    q = quantize(golden.input(case), golden.recipe)
    assert_parts(q.parts(), golden.parts(case), case)
    assert q.dtype == golden.input(case).dtype


@golden_cases
def test_golden_parts_decode_to_the_golden_values(golden: Golden, case: str) -> None:
    q = QuantizedTensor.from_parts(golden.parts(case), golden.recipe, torch.float32)
    assert same_bytes(q.dequantize(), golden.decoded(case))  # NaN bits and signs of zeros included


@golden_cases
def test_shards_quantized_with_the_agreed_amax_are_slices_of_the_whole(golden: Golden, case: str) -> None:
    """For shards of any number of rows; stacks are cut between matrices and within them."""
    whole = golden.input(case)
    as_rows = whole.ndim == 3 and whole.shape[1] % golden.row_multiple == 0  # else blocks would span matrices
    for x in (whole, whole.flatten(0, -2)) if as_rows else (whole,):
        parts = {
            part: value.reshape(*x.shape[:-1], value.shape[-1]) if value.ndim else value
            for part, value in golden.parts(case).items()
        }
        multiple = golden.row_multiple if x.ndim == 2 else 1
        for groups in shard_sizes(-(-x.shape[0] // multiple)):
            assert_shards(golden.recipe, x, parts, groups * multiple)


def shard_sizes(groups: int) -> list[int]:
    """How many groups of rows a shard has: one; few, and a smaller rest; a power of two; half of all; all but one.

    A row's parts come from its own values and the agreed amax, so no other number of rows is another case.
    """
    sizes = {1, 2, 3, 7, 16, groups // 2, groups // 2 + 1, groups - 1}
    return sorted(size for size in sizes if 0 < size < groups)


def test_every_way_to_cut_is_among_the_sizes_of_shards() -> None:
    assert shard_sizes(1) == []
    assert shard_sizes(2) == [1]
    assert shard_sizes(64) == [1, 2, 3, 7, 16, 32, 33, 63]
    rests = {64 % size for size in shard_sizes(64)}
    assert {0, 1, 31} <= rests


def assert_shards(recipe: Any, x: Tensor, parts: dict[str, Tensor], rows: int) -> None:
    dense = x.float()
    shards = dense.split(rows)
    amaxes = [shared_amax(shard, recipe) for shard in shards]
    if amaxes[0] is not None and amaxes[0].ndim == 0:
        amaxes = [torch.stack(amaxes).amax()] * len(shards)
    for start, shard, agreed in zip(range(0, x.shape[0], rows), shards, amaxes, strict=True):
        encoded = encode(shard, recipe, agreed)
        expected = {name: part[start : start + rows] if part.ndim else part for name, part in parts.items()}
        assert_parts(encoded, expected, f"rows {start}:{start + rows}")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(recipe: Any) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """x fp32 -> parts and decoded values, in one graph for all shapes."""
    fmt = format_of(recipe)

    def encode_and_decode(x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = encode(x, recipe, shared_amax(x, recipe))
        return parts, canonical_nan(fmt.decode(parts, recipe))  # as QuantizedTensor.dequantize does

    return torch.compile(encode_and_decode, fullgraph=True, dynamic=True)


def as_matrix(x: Tensor, multiple: int) -> Tensor:
    """fp32 [rows, K]; short cases several times, as two groups of rows or more.

    The compiler makes code of its own for a single group, and for one that is cut. A block that holds a copy of all its
    rows has the amax that it had, so each copy has the same bytes.
    """
    x = x.float().flatten(0, -2)
    groups = 2 * max(multiple, 32)
    return torch.cat([x] * (groups // x.shape[0])) if groups % x.shape[0] == 0 else x


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
@compiled_recipes
def test_compiled_code_gives_the_golden_bytes(golden: Golden) -> None:
    assert_compiled(golden, "cpu")


@pytest.mark.gpu
@golden_cases
def test_cuda_gives_the_golden_bytes(golden: Golden, case: str) -> None:
    if case == NOT_COMPILED:
        return
    q = quantize(golden.input(case).cuda(), golden.recipe)
    assert_parts(q.parts(), golden.parts(case), case)
    assert same_bytes(q.dequantize(torch.float32).cpu(), golden.decoded(case))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@golden_recipes
def test_compiled_cuda_code_gives_the_golden_bytes(golden: Golden) -> None:
    assert_compiled(golden, "cuda")


def assert_compiled(golden: Golden, device: str) -> None:
    run = compiled(golden.recipe)
    for case in golden.cases:
        if case == NOT_COMPILED or (golden.row_multiple > 32 and golden.input(case).ndim > 2):
            continue  # blocks of 128 rows end with each matrix of a stack of smaller ones
        x = as_matrix(golden.input(case), golden.row_multiple)
        parts, values = run(x.to(device))
        rows = golden.input(case).flatten(0, -2).shape[0]
        for name, part in golden.parts(case).items():
            found = parts[name].cpu()
            wanted = part.flatten(0, -2) if part.ndim else part
            assert torch.equal(raw(found[:rows] if part.ndim else found), raw(wanted)), f"{case}: {name} differs"
        assert torch.equal(raw(values[:rows].cpu()), raw(golden.decoded(case))), f"{case}: decoded values differ"


def test_one_block_worked_by_hand() -> None:
    """Codes 0..7 and their negatives: the largest value is 6, so S = 2688/6 and the scale is 448."""
    x = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.25])
    q = quantize(x, NVFP4BlockScaling())
    assert q.payload.numpy().tobytes().hex() == "10325476a9cbed0f"
    assert q.scale.float().tolist() == [448.0]
    assert q.global_scale.item() == torch.tensor(6 / 2688).item()
