"""Many small weights written at once: the bytes of one write each, in operations that do not grow with their number."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, use_kernels
from qtensor.optim import batches
from qtensor.scales.agreement import flat_amax
from qtensor.tensor.contents import preserve, write
from tests.qtensor.recipes_under_test import RECIPES, every_recipe, same_parts, weight
from tests.recipes import facts

SHAPES = [(64, 96), (32, 64), (64, 96), (45, 96), (64, 96), (32, 64), (2, 32, 64), (0, 64)]


def weights(recipe: Any, seed: int) -> list[Tensor]:
    shapes = [shape for shape in SHAPES if not (facts(recipe).square and shape[-2] % 32)]
    scales = [10.0 ** (n % 5 - 2) for n in range(len(shapes))]
    return [
        (weight(256, 96, torch.float32, seed=seed + n).flatten()[: torch.Size(shape).numel()] * scale).reshape(shape)
        for n, (shape, scale) in enumerate(zip(shapes, scales, strict=True))
    ]


def shards_of(recipe: Any) -> list[QuantizedTensor]:
    """Shards of several shapes; among them a view of rows, where scales allow it, and one with a preserved value."""
    shards = [quantize(value, recipe) for value in weights(recipe, 0)]
    if facts(recipe).tensor_wide is None and not facts(recipe).square:
        shards[2] = quantize(weight(96, 96), recipe)[:64]
    preserve(shards[4], torch.zeros(shards[4].shape, dtype=shards[4].dtype))
    return shards


@every_recipe
@pytest.mark.parametrize("agreed", [False, True])
def test_written_at_once_or_one_by_one_the_bytes_are_the_same(
    recipe: Any, agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = weights(recipe, 100)
    one_by_one, at_once = shards_of(recipe), shards_of(recipe)
    amaxes: list[Tensor | None] = [None] * len(values)
    whole = [None] * len(values)  # no square block is cut
    if agreed and flat_amax(values[0], one_by_one[0].recipe) is not None:
        amaxes = [amax * 1.5 for amax in batches.claims_of(at_once, values, whole)]
        amaxes[2] = None  # as of a weight that tensor parallelism has not cut
    for shard, value, amax in zip(one_by_one, values, amaxes, strict=True):
        write(shard, value, amax, step=True)
    for stack in (batches.STACK, 2 * 64 * 96):
        monkeypatch.setattr(batches, "STACK", stack)
        batches.write_each(at_once, values, amaxes, whole)
        for number, (mine, other) in enumerate(zip(at_once, one_by_one, strict=True)):
            assert same_parts(mine, other), number
        at_once = shards_of(recipe)


@pytest.mark.full
def test_compiled_kernels_write_many_to_the_same_bytes() -> None:
    """Of the recipe with all that batches mind: packed elements, square blocks and a scale of the tensor."""
    recipe = RECIPES["nvfp4_square"]
    # Two of one shape. One of another shape would be written alone, as without batches, and cost two kernels more.
    values, one_by_one, at_once = (some[:3:2] for some in (weights(recipe, 100), shards_of(recipe), shards_of(recipe)))
    assert values[0].shape == values[1].shape
    with use_kernels("eager"):
        for shard, value in zip(one_by_one, values, strict=True):
            write(shard, value, step=True)
    with use_kernels("compiled"):
        batches.write_each(at_once, values, [None] * len(values), [None] * len(values))
    assert all(same_parts(mine, other) for mine, other in zip(at_once, one_by_one, strict=True))


@every_recipe
def test_amaxes_of_many_are_those_of_each(recipe: Any) -> None:
    values, shards = weights(recipe, 5), shards_of(recipe)
    values[0][3, 3] = float("inf")
    if flat_amax(values[0], shards[0].recipe) is None:
        return  # nobody asks for them
    for found, shard, value in zip(
        batches.claims_of(shards, values, [None] * len(shards)), shards, values, strict=True
    ):
        expected = flat_amax(value, shard.recipe)
        assert expected is not None
        assert torch.equal(found, expected)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not any(issubclass(kind, QuantizedTensor) for kind in types):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.budget
@every_recipe
def test_a_step_of_many_small_weights_takes_the_operations_of_one_of_a_few(recipe: Any) -> None:
    if facts(recipe).history:
        return  # a history develops weight by weight
    counts = []
    for n in (4, 32):
        params = [nn.Parameter(quantize(weight(seed=number), recipe)) for number in range(n)]
        optimizer = MasterWeightOptimizer(torch.optim.SGD, params, lr=0.1, foreach=True)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(param.shape, dtype=torch.bfloat16)
            with Calls() as calls:
                optimizer.step()
        counts.append(calls.count)
    assert counts[1] - counts[0] <= 28 * 2  # 28 gradients to fp32, and little else
