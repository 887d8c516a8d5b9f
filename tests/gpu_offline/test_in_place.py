"""Quantizing again writes into the parts that are there: the launches of `quantize`, and the bytes; or as before.

Kernels run in Triton's interpreter. What they must leave to copies is in the last tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import QuantizedTensor, quantize
from qtensor.numerics.in_place import are_written, writable_parts
from qtensor.optim.batches import write_each
from tests.gpu_offline.interpreted import Interpreter
from tests.gpu_offline.recipes import RECIPES

every_recipe = pytest.mark.parametrize("name", RECIPES)
TWICE = ("float8_tensor", "nvfp4_row", "nvfp4_square")  # read values for the amax of all of them


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def values(rows: int = 256, columns: int = 512) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x[3, 5], x[7, 2] = float("inf"), float("nan")
    return x.to(torch.bfloat16)


def raw(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.reshape(-1).view(torch.uint8).clone() for name, part in parts.items()}


def written(name: str, how: str) -> tuple[Any, ...]:
    """In the interpreter's process: (wanted bytes, bytes, where parts were and are, versions before and behind)."""
    recipe = RECIPES[name]
    wanted, q = raw(quantize(values(), recipe).parts()), quantize(torch.ones(256, 512), recipe)
    before = {part: (own.data_ptr(), own._version) for part, own in q.parts().items()}
    if how == "copy_":
        q.copy_(values())
    else:
        write_each([q], [values()], [None], [None])
    behind = {part: (own.data_ptr(), own._version) for part, own in q.parts().items()}
    return wanted, raw(q.parts()), before, behind


@every_recipe
@pytest.mark.parametrize("how", ["copy_", "step"])
def test_parts_have_the_bytes_of_quantize_where_they_were(interpreter: Interpreter, name: str, how: str) -> None:
    wanted, found, before, behind = interpreter.on_gpu(written, name, how)
    for part, own in wanted.items():
        assert torch.equal(found[part], own), part
        assert before[part][0] == behind[part][0], part
        assert behind[part][1] > before[part][1], "autograd has to hear of a write"


def launches_of(call: Any) -> list[str]:
    from tests.gpu_offline.measured import Meter, on_gpu

    meter = Meter()
    with on_gpu(meter._launching):
        return [launch.name for launch in meter._call(call, 1).launches]


@every_recipe
def test_a_write_takes_the_launches_of_quantize(name: str) -> None:
    x, recipe = values(), RECIPES[name]
    q = quantize(x, recipe)
    quantized = launches_of(lambda: quantize(x, recipe))
    assert len(quantized) == (2 if name in TWICE else 1)
    assert launches_of(lambda: q.copy_(x)) == quantized
    assert launches_of(lambda: write_each([q], [x], [None], [None])) == quantized


# -- what is left to copies --------------------------------------------------------------------------------------------


def parts_and(x: Tensor) -> tuple[QuantizedTensor, dict[str, Tensor]]:
    q = quantize(x, RECIPES["mxfp8_row"])
    return q, q.parts()


def test_parts_that_a_kernel_may_not_write_stay() -> None:
    x = values()
    q, parts = parts_and(x)
    recipe, payload = q.recipe, parts["payload"]
    assert writable_parts(parts, x, x, recipe) is parts
    assert writable_parts(None, x, x, recipe) is None
    strided = torch.empty(512, 256, dtype=torch.uint8).view(payload.dtype).t()
    shifted = torch.empty(256 * 512 + 8, dtype=torch.uint8)[8:].view(payload.dtype).view(256, 512)
    with torch.inference_mode():
        made_there = torch.empty_like(payload)
        assert writable_parts({**parts, "payload": made_there}, x, x, recipe) is not None
    for other in (strided, shifted, made_there, payload[:128], payload.view(torch.uint8), payload.to("meta")):
        assert writable_parts({**parts, "payload": other}, x, x, recipe) is None, other.shape
    assert writable_parts({"payload": payload}, x, x, recipe) is None
    on_the_values = x.view(torch.uint8).view(-1)[: 256 * 512].view(256, 512).view(payload.dtype)
    assert writable_parts({**parts, "payload": on_the_values}, x, x, recipe) is None
    assert not are_written(parts, None)
    assert not are_written({"payload": payload.clone()}, parts)


def test_values_in_the_memory_of_the_parts_are_read_before_they_are_written() -> None:
    q, parts = parts_and(values())
    x = parts["payload"].view(torch.uint8).view(torch.bfloat16)[:, :256].contiguous()
    on_the_parts = torch.empty(0, dtype=torch.bfloat16).set_(parts["payload"].untyped_storage(), 0, (128, 512))
    assert x.shape == (256, 256)
    half = quantize(values(128, 512), q.recipe)
    half_parts = {**half.parts(), "payload": parts["payload"][64:192]}
    assert writable_parts(half_parts, on_the_parts, on_the_parts, q.recipe) is None


def failing(name: str) -> tuple[Any, ...]:
    """In the interpreter's process: what is left of parts whose kernel cannot be launched."""
    from unittest import mock

    from qtensor.numerics.triton_kernels import launching

    q = quantize(values(), RECIPES[name])
    before = raw(q.parts())

    def launch(*args: Any, **constants: Any) -> None:
        raise RuntimeError("no launch")

    modules = ("float8", "launching", "nvfp4")
    patches = [mock.patch(f"{launching.__package__}.{module}.launch", launch) for module in modules]
    try:
        for patch in patches:
            patch.start()
        q.copy_(values() * 2)
    except RuntimeError as error:
        return before, raw(q.parts()), str(error)
    finally:
        for patch in patches:
            patch.stop()
    return ()


@pytest.mark.parametrize("name", ["mxfp8_row", "nvfp4_row", "float8_tensor"])
def test_a_write_that_fails_leaves_all_parts(interpreter: Interpreter, name: str) -> None:
    before, behind, error = interpreter.on_gpu(failing, name)
    assert error == "no launch"
    assert all(torch.equal(behind[part], own) for part, own in before.items())


def some_rows(name: str) -> tuple[Any, ...]:
    q = quantize(values().nan_to_num(0.0, 0.0, 0.0), RECIPES[name])
    before = raw(q.parts())
    try:
        q[:16].copy_(torch.full((16, 512), 100.0, dtype=torch.bfloat16))
    except RuntimeError as error:
        return before, raw(q.parts()), str(error)
    return before, raw(q.parts()), ""


@pytest.mark.parametrize("name", ["nvfp4_row", "float8_tensor", "mxfp8_row"])
def test_some_rows_do_not_change_the_scale_of_all(interpreter: Interpreter, name: str) -> None:
    before, behind, error = interpreter.on_gpu(some_rows, name)
    if name == "mxfp8_row":
        assert not error
        assert not torch.equal(behind["payload"], before["payload"])
        assert torch.equal(behind["payload"][16 * 512 :], before["payload"][16 * 512 :])
        return
    assert "would change its" in error
    assert all(torch.equal(behind[part], own) for part, own in before.items())
