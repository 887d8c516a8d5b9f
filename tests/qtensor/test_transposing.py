"""Matrices the other way round: the definition, and the same bytes on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel, use_kernels
from qtensor import Float8CurrentScaling, MXFP8BlockScaling
from qtensor.numerics import kernels, transposing
from tests.devices import every_device
from tests.qtensor.recipes_under_test import raw

RECIPES: dict[str, Any] = {
    "e4m3": Float8CurrentScaling(),
    "e5m2": Float8CurrentScaling(element="e5m2"),
    "power_of_two": Float8CurrentScaling(power_of_two=True),
    "mxfp8": MXFP8BlockScaling(),
}
every = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]


def values(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows and columns of very different sizes, zeros, and what is not finite."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * 10.0 ** torch.randint(-3, 3, (columns,), generator=generator)
    x = x * 10.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)
    x[:, columns // 2] = 0
    x[rows // 3, columns // 3], x[rows // 2, 0] = torch.nan, -torch.inf
    return x.to(dtype)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert (found[name].shape, found[name].dtype) == (part.shape, part.dtype), name
        assert torch.equal(raw(found[name].cpu()), raw(part.cpu())), name


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (37, 96), (1, 32), (32, 1), (0, 16)], ids=str)
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_transpose_is_a_copy_with_zeros_behind(
    dtype: Any, shape: tuple[int, int], multiple: int, device: str
) -> None:
    size = shape[0], shape[1] * dtype.itemsize
    x = (
        torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        .view(dtype)
        .to(device)
    )
    with use_kernels("compiled" if x.is_cuda else "eager"):
        found = transposing.turned(x, multiple)
    assert (found.shape, found.dtype) == ((shape[1], shape[0] + -shape[0] % multiple), dtype)
    assert found.is_contiguous()
    assert torch.equal(raw(found[:, : shape[0]].cpu()), raw(x.t().cpu()))
    assert raw(found[:, shape[0] :].cpu()).count_nonzero() == 0
    assert not x.numel() or found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@every_device
@every
@pytest.mark.parametrize("shape", [(64, 128), (37, 96), (160, 33)], ids=str)
def test_columns_are_rows_of_the_transpose(recipe: Any, shape: tuple[int, int], device: str) -> None:
    x = values(*shape)
    wanted = kernels.encode_rows(torch.nn.functional.pad(x.t(), (0, -shape[0] % 32)), recipe)
    with use_kernels("compiled" if device == "cuda" else "eager"):
        assert_same(transposing.encode_columns(x.to(device), recipe, 32), wanted)


@every_device
@every
@pytest.mark.parametrize("each", [0, 1, 96])
def test_both_ways_round_are_each_way_by_itself(recipe: Any, each: int, device: str) -> None:
    x = values(40, 96)
    factors = torch.exp2(torch.arange(each) % 7 - 3.0).unsqueeze(0) if each else None
    scaled = x if factors is None else x.float() * factors
    with use_kernels("compiled" if device == "cuda" else "eager"):
        given = None if factors is None else factors.to(device)
        rows, columns = transposing.encode_both(x.to(device), given, recipe, 32)
    assert_same(rows, kernels.encode_rows(scaled, recipe))
    assert_same(columns, transposing.encode_columns(x, recipe, 32))


@every
def test_large_matrices_on_a_cpu_go_where_rows_go(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the kernels of `encode_rows`: a CPU has nothing written by hand, and compiles no second definition."""
    called: list[str] = []
    monkeypatch.setattr(
        Kernel, "__call__", lambda kernel, *args: called.append(kernel.eager.__name__) or kernel.eager(*args)
    )
    with use_kernels("compiled"):
        transposing.encode_both(values(64, 64), None, recipe)
    assert called
    assert not {"encode_columns", "encode_both", "transpose"} & set(called)


def test_what_takes_the_place_of_a_kernel_that_failed_has_the_same_bytes() -> None:
    x = values(40, 96)
    recipe = RECIPES["e4m3"]
    factors = torch.full((1, 1), 0.5)
    assert torch.equal(raw(transposing._transpose_kernel().eager(x, 48)), raw(transposing.turned(x, 16)))
    assert_same(transposing._columns_kernel(recipe, x.dtype, 16).eager(x), transposing.encode_columns(x, recipe, 16))
    found = transposing._both_kernel(recipe, x.dtype, 16).eager(x, factors)
    for mine, wanted in zip(found, transposing.encode_both(x, factors, recipe, 16), strict=True):
        assert_same(mine, wanted)
