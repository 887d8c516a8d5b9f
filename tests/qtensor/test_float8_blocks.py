"""Float8 in blocks of 128: smaller blocks at the ends of rows and columns, wherever a shape comes from."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.algorithms.solvers.clipping import round_trip
from qtensor import Float8BlockScaling, Float8CurrentScaling, Float8Tensor, QuantizedTensor, quantize, use_kernels
from qtensor.spec.registry import encode, format_of
from tests.qtensor.recipes_under_test import same_bytes, same_parts, weight

RECIPES = {
    "square": Float8BlockScaling(),
    "row": Float8BlockScaling(blocks="row"),
    "power of two": Float8BlockScaling(power_of_two=True),
    "e5m2": Float8BlockScaling(element="e5m2"),
}
SHAPES = [(576, 320), (576, 256), (1, 320), (300, 1), (1, 1), (0, 320), (130, 0), (2, 40, 200), (2, 0, 3)]
every_kind = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def by_definition(x: Tensor, recipe: Any) -> tuple[np.ndarray, np.ndarray]:
    """(payload, scale) of a matrix, block by block."""
    dense, height = x.float(), 128 if recipe.blocks == "square" else 1
    rows, columns = dense.shape
    payload = np.zeros((rows, columns), dtype=np.uint8)
    scale = np.zeros((rows, -(-columns // 128)), dtype=np.float32)
    whole = Float8CurrentScaling(element=recipe.element, granularity="tensor", power_of_two=recipe.power_of_two)
    for top in range(0, rows, height):
        for left in range(0, columns, 128):
            q = quantize(dense[top : top + height, left : left + 128], whole)
            payload[top : top + height, left : left + 128] = q.payload.view(torch.uint8).numpy()
            scale[top : top + height, left // 128] = q.scale.item()
    return payload, scale


@every_kind
@pytest.mark.parametrize("shape", [(200, 331), (128, 256), (130, 100), (1, 129)])
def test_each_block_is_a_tensor_under_a_scale_of_its_own(recipe: Any, shape: tuple[int, int]) -> None:
    x = weight(*shape, torch.float32)
    x[0, 0] = float("nan")
    q = quantize(x, recipe)
    payload, scale = by_definition(x, recipe)
    assert np.array_equal(q.payload.view(torch.uint8).numpy(), payload)
    assert np.array_equal(q.scale.numpy(), scale)
    assert isinstance(q, Float8Tensor)


@every_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_fits(recipe: Any, shape: tuple[int, ...]) -> None:
    x = weight(600, 400).flatten()[: torch.Size(shape).numel()].view(shape)
    q = quantize(x, recipe)
    assert q.scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert q.dequantize().shape == shape
    assert same_parts(QuantizedTensor.from_parts(q.parts(), recipe, q.dtype), q)
    assert same_parts(q.clone(), q)
    if len(shape) == 3:  # blocks end with each matrix
        for one, dense in zip(q, x, strict=True):
            assert same_parts(one, quantize(dense, recipe))
    elif shape[-1]:
        q.copy_(x * 3)
        assert same_parts(q, quantize(x * 3, recipe))


def test_one_row_has_no_square_blocks() -> None:
    with pytest.raises(ValueError, match=r"shape \(64,\) is one row, and the square blocks of .* need \[.., N, K\]"):
        quantize(torch.ones(64), Float8BlockScaling())
    assert quantize(torch.ones(64), Float8BlockScaling(blocks="row")).scale.shape == (1,)


def test_cuts_along_k_fall_between_blocks_or_at_the_end() -> None:
    x = weight(130, 320)
    q = quantize(x, Float8BlockScaling())
    for columns in (slice(0, 128), slice(128, 320), slice(256, 320)):
        assert same_parts(q[:, columns], quantize(x[:, columns], q.recipe))
    with pytest.raises(ValueError, match="cuts along K must be multiples of 128"):
        q[:, 64:]


def test_a_view_regroups_where_no_block_spans_two_matrices() -> None:
    q = quantize(weight(256, 40), Float8BlockScaling())
    assert q.view(2, 128, 40).scale.shape == (2, 128, 1)
    assert q.view(1, 256, 40).scale.shape == (1, 256, 1)
    assert q.view(4, 64, 40).scale.shape == (256, 1)  # only seen so
    stack = quantize(weight(256, 40).view(4, 64, 40), q.recipe)
    assert stack.view(256, 40).scale.shape == (4, 64, 1)
    assert same_bytes(stack.view(256, 40).dequantize(), stack.dequantize().view(256, 40))


@every_kind
def test_a_quantizer_rounds_values_as_storing_them_does(recipe: Any) -> None:
    """What calibration computes on: smaller last blocks have scales of their own there, too."""
    x, fmt = weight(200, 331, torch.float32), format_of(recipe)
    quantizer = fmt.quantizer(x, recipe, None)
    assert same_bytes(round_trip(x, recipe, quantizer), fmt.decode(fmt.encode_with(x, recipe, quantizer), recipe))


@pytest.fixture
def compiled() -> Iterator[None]:
    with use_kernels("compiled"):
        yield


@pytest.mark.full
@pytest.mark.usefixtures("compiled")
def test_compiled_kernels_give_the_same_bytes_for_smaller_last_blocks() -> None:
    """Smaller last blocks both ways, of other sizes without compiling anew; one block a row; less than one of rows."""
    recipe = Float8BlockScaling()
    for rows, columns in ((576, 320), (640, 448), (384, 60), (7, 320)):
        x = weight(rows, columns)
        q, wanted = quantize(x, recipe), encode(x.float(), recipe, None)
        for name, part in wanted.items():
            assert same_bytes(q.parts()[name], part), (rows, columns, name)
        assert same_bytes(q.dequantize(torch.float32), format_of(recipe).decode(wanted, recipe)), (rows, columns)
