"""diff: which tensors differ, by how many bytes, and by how much - whatever number of ranks wrote either side."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcp_adapters.cli.diff import Diff, Difference, diff
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import models, reference, save, values
from tests.dcp_adapters.live_storages import LiveStorages
from tests.ranks import run_ranks
from tests.recipes import ROW

SHAPE = (48, 64)


def compared(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> Diff:
    save(a, tmp_path / "a")
    save(b, tmp_path / "b")
    return diff(StoredCheckpoint(tmp_path / "a"), StoredCheckpoint(tmp_path / "b"))


def only(found: Diff) -> Difference:
    (difference,) = found.differences
    return difference


def save_models(path: Path) -> None:
    save(models(), path)


def test_checkpoints_of_other_world_sizes_are_equal(tmp_path: Path, shared_tmp_path: Path) -> None:
    run_ranks(2, save_models, shared_tmp_path / "2")
    save(reference(), tmp_path / "1")
    two, one = StoredCheckpoint(shared_tmp_path / "2"), StoredCheckpoint(tmp_path / "1")
    assert two.chunks("mxfp8.layers.0.weight") == 2
    assert one.chunks("mxfp8.layers.0.weight") == 1
    found = diff(two, one)
    assert found.differences == []
    assert found.compared == len(one.entries) > 40
    assert found.render() == f"no differences ({found.compared} entries compared)"


def test_each_kind_of_difference_is_named(tmp_path: Path) -> None:
    q = quantize(values(SHAPE, 0), MXFP8BlockScaling())
    a = {
        "same": q, "a only": values((3,), 0), "shape": values((3,), 0), "dtype": torch.ones(3), "step": 3,
        "recipe": q, "looks": q, "tensor or not": torch.ones(1), "bytes": values(SHAPE, 1), "object": "text",
    }  # fmt: skip
    b = {
        "same": q, "b only": values((3,), 0), "shape": values((4,), 0), "dtype": torch.ones(3).bfloat16(), "step": 3,
        "recipe": quantize(values(SHAPE, 0), NVFP4BlockScaling()),
        "looks": quantize(values(SHAPE, 0).float(), MXFP8BlockScaling()),
        "tensor or not": 1, "bytes": values(SHAPE, 2), "object": "Text",
    }  # fmt: skip
    found = {(d.name, d.kind): (d.a, d.b) for d in compared(tmp_path, a, b).differences}
    assert found == {
        ("a only", "only_in_a"): ("bfloat16 [3]", None),
        ("b only", "only_in_b"): (None, "bfloat16 [3]"),
        ("shape", "shape"): ("bfloat16 [3]", "bfloat16 [4]"),
        ("dtype", "dtype"): ("float32 [3]", "bfloat16 [3]"),
        ("recipe", "recipe"): ("mxfp8 as bfloat16 [48, 64]", "nvfp4 as bfloat16 [48, 64]"),
        ("looks", "dtype"): ("mxfp8 as bfloat16 [48, 64]", "mxfp8 as float32 [48, 64]"),
        ("tensor or not", "only_in_a"): ("float32 [1]", None),
        ("tensor or not", "only_in_b"): (None, "bytes"),
        ("bytes", "bytes"): ("bfloat16 [48, 64]", "bfloat16 [48, 64]"),
        ("object", "blob"): (found["object", "blob"][0], found["object", "blob"][1]),
    }


def test_bytes_that_differ_are_counted_over_all_parts(tmp_path: Path) -> None:
    a = quantize(values(SHAPE, 0), NVFP4BlockScaling())
    b = a.clone()
    b.payload[3, :5] ^= 0x11
    b.scale.view(torch.uint8)[7, 1] ^= 1
    found = only(compared(tmp_path, {"w": a, "v": a}, {"w": b, "v": a}))
    assert (found.name, found.kind, found.differing_bytes) == ("w", "bytes", 6)


def expected(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """(max abs, relative Frobenius, SNR in dB) in float64."""
    a, b = a.double(), b.double()
    relative = float(torch.linalg.vector_norm(b - a) / torch.linalg.vector_norm(a))
    return float((b - a).abs().max()), relative, 10 * math.log10(float(a.square().sum() / (b - a).square().sum()))


RECIPES = {"dense": None, **ROW}


@pytest.mark.parametrize("b", ["float8_row", "nvfp4", "dense"])
@pytest.mark.parametrize("a", ["dense", "mxfp8"])
def test_the_error_is_that_of_the_dequantized_values(a: str, b: str, tmp_path: Path) -> None:
    sides = []
    for seed, recipe in enumerate((RECIPES[a], RECIPES[b])):
        dense = values(SHAPE, seed if a == b else 0, torch.float32)
        sides.append(dense if recipe is None else quantize(dense, recipe))
    found = only(compared(tmp_path, {"w": sides[0]}, {"w": sides[1]}))
    assert found.kind == ("bytes" if a == b else "recipe")
    assert found.error is not None
    x, y = (side.dequantize() if recipe else side for side, recipe in zip(sides, (RECIPES[a], RECIPES[b]), strict=True))
    assert (found.error.max_abs, found.error.relative, found.error.snr_db) == pytest.approx(expected(x, y), rel=1e-12)
    assert found.error.not_finite == 0


def test_values_that_are_not_finite_are_counted_apart(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([1.0, 2.0, inf, nan, nan, inf, 3.0])
    b = torch.tensor([1.0, 4.0, inf, nan, 5.0, -inf, inf])
    error = only(compared(tmp_path, {"w": a}, {"w": b})).error
    assert error is not None
    assert (error.not_finite, error.max_abs, error.relative) == (3, 2.0, 2 / math.sqrt(5))


def test_equal_values_in_other_bytes_and_errors_without_a_reference(tmp_path: Path) -> None:
    zero, minus, one = torch.zeros(4), -torch.zeros(4), torch.ones(4)
    found = compared(tmp_path, {"sign": zero, "from zero": zero}, {"sign": minus, "from zero": one})
    from_zero, sign = found.differences
    assert (sign.differing_bytes, sign.error.max_abs, sign.error.relative, sign.error.snr_db) == (4, 0.0, 0.0, None)
    assert (from_zero.error.max_abs, from_zero.error.relative, from_zero.error.snr_db) == (1.0, None, None)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(text)["differences"][0]["relative"] is None
    assert "inf" in found.render()


def test_squares_that_overflow_are_no_number(tmp_path: Path) -> None:
    huge = torch.full((2,), 1e200, dtype=torch.float64)
    found = compared(tmp_path, {"w": huge}, {"w": -huge})
    assert (only(found).error.max_abs, only(found).error.relative) == (2e200, None)
    json.dumps(found.to_json(), allow_nan=False)


def test_dense_tensors_of_all_kinds_are_compared(tmp_path: Path) -> None:
    a = {"int": torch.tensor([5, -3]), "bool": torch.tensor([True, False]), "complex": torch.tensor([1 + 2j])}
    b = {"int": torch.tensor([5, 4]), "bool": torch.tensor([True, True]), "complex": torch.tensor([1 + 5j])}
    found = compared(tmp_path, a | {"scalar": torch.tensor(2.0)}, b | {"scalar": torch.tensor(2.5)})
    assert {d.name: d.error.max_abs for d in found.differences if d.error} == {
        "int": 7.0, "bool": 1.0, "complex": 3.0, "scalar": 0.5,
    }  # fmt: skip


def test_memory_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    peaks = {}
    for count in (2, 10):
        names = [str(i) for i in range(count)]
        save(
            {name: quantize(values(SHAPE, i), MXFP8BlockScaling()) for i, name in enumerate(names)},
            tmp_path / f"a{count}",
        )
        save({name: values(SHAPE, i) for i, name in enumerate(names)}, tmp_path / f"b{count}")
        a, b = StoredCheckpoint(tmp_path / f"a{count}"), StoredCheckpoint(tmp_path / f"b{count}")
        with LiveStorages() as live:
            assert len(diff(a, b).differences) == count
        peaks[count] = live.peak
    assert peaks[10] == peaks[2] < 20 * SHAPE[0] * SHAPE[1] * 4


def test_remainders_are_compared_as_whole_numbers(tmp_path: Path) -> None:
    """As float16 these two are 65504 and not a number."""
    name = "optim.state.weight.master_remainder"
    a, b = (torch.full((2, 32), number, dtype=torch.int16).view(torch.float16) for number in (0x7BFF, 0x7E00))
    found = only(compared(tmp_path, {name: a}, {name: b}))
    assert (found.kind, found.a, found.b) == ("bytes", "remainder [2, 32]", "remainder [2, 32]")
    assert found.error is not None
    assert (found.error.max_abs, found.error.not_finite) == (0x7E00 - 0x7BFF, 0)
