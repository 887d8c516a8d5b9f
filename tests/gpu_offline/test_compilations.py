"""How often a kernel is compiled for a GPU: once for each row length, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fsdp_hooks.kernels import compiled
from fsdp_hooks.kernels.compiled import Kernel
from tests.gpu_offline.emitted import Launching, TritonKernel

seen: list[TritonKernel] = []


@pytest.fixture
def launching(_gpu_that_is_not_there: None) -> Iterator[Launching]:
    seen.clear()
    before, Launching.compilations = Launching.compilations, 0
    yield Launching(lambda kernel, args: seen.append(kernel))
    Launching.compilations = before


def scaled_by_rows() -> Kernel:
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    return Kernel(scaled, "scaled_by_rows")


def call(launching: Launching, kernel: Kernel, rows: int, columns: int) -> None:
    x = torch.ones(rows, columns, dtype=torch.float32)
    launching(kernel, x, torch.ones(rows, 1, dtype=torch.float32))


def test_a_row_length_is_compiled_once(launching: Launching) -> None:
    kernel = scaled_by_rows()
    for rows in (64, 96, 64, 128, 33):  # 64 x 64 first: rows stay a variable where they equal a row's length
        call(launching, kernel, rows, 64)
    assert Launching.compilations == 1
    for rows in (64, 96):
        call(launching, kernel, rows, 96)
    assert Launching.compilations == 2
    call(launching, kernel, 1, 64)  # torch takes a single row for a constant
    assert Launching.compilations == 3


def test_a_row_length_is_a_constant_of_the_code(launching: Launching) -> None:
    kernel = scaled_by_rows()
    call(launching, kernel, 64, 96)
    assert "xindex // 96" in seen[0].source
    assert "i64" not in seen[0].source  # no variable to divide by


def test_too_many_row_lengths_share_dynamic_code(launching: Launching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LAYOUTS", 2)
    kernel = scaled_by_rows()
    for columns in (64, 96, 128, 160, 192, 64, 96):
        call(launching, kernel, 32, columns)
    assert Launching.compilations == 3
    assert [("ks0" in each.source) for each in seen] == [False, False, True, True, True, False, False]
