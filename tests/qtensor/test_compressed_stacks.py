"""Small weights that step as one, and large ones in pieces, have the bytes that each has by itself."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    MasterWeightOptimizer,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from qtensor.optim.compressed import stacks
from qtensor.optim.compressed.step import CompressedStep

RECIPES: dict[str, Any] = {
    "bf16": None,
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 square": MXFP8BlockScaling(blocks="square"),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "int4": Int4GroupScaling(),
    "float8 row": Float8CurrentScaling(),
    "float8 tensor": Float8CurrentScaling(granularity="tensor"),
}
SHAPES = [(8, 64), (5, 64), (1, 64), (8, 96), (8, 64), (0, 64)]
SMALL: dict[str, Any] = {"masters": "remainder", "moments": "float8", "lr": 0.05}


def weights(recipe: Any) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, shape in enumerate(SHAPES):
        if "square" in repr(recipe):
            shape = (32 * shape[0], shape[1])  # noqa: PLW2901
        value = torch.randn(shape, generator=generator).mul_(10.0**-number).to(torch.bfloat16)
        found.append(nn.Parameter(value if recipe is None else quantize(value, recipe)))
    return found


def held(params: list[nn.Parameter], optimizer: MasterWeightOptimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, param in enumerate(params):
        for name, value in {"": param.detach(), **optimizer.state[param]}.items():
            parts = value.parts() if isinstance(value, QuantizedTensor) else {"": value}
            for part, own in parts.items():
                bytes_of = own.reshape(1) if not own.ndim else own
                found[f"{number} {name} {part}"] = bytes_of.detach().contiguous().view(torch.uint8).clone()
    return found


def trained(
    recipe: Any, kind: Any = torch.optim.AdamW, *, small: int = stacks.SMALL, piece: int = 2**20, **options: Any
) -> tuple[Any, list[tuple[int, int]]]:
    """What is held after some steps, in one of which some gradients are missing or not finite.

    With it (weights, pieces) of each stack.
    """
    sizes: list[tuple[int, int]] = []
    step = CompressedStep._step_stack

    def counted(self: Any, params: list[Tensor], pieces: list[slice]) -> None:
        sizes.append((len(params), len(pieces)))
        step(self, params, pieces)

    params = weights(recipe)
    optimizer = MasterWeightOptimizer(
        kind, [(f"w{number}", one) for number, one in enumerate(params)], **SMALL | options
    )
    with (
        patch.object(stacks, "SMALL", small),
        patch.dict(stacks.PIECE, {"cpu": piece}),
        patch.object(CompressedStep, "_step_stack", counted),
    ):
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            for index, param in enumerate(params):
                param.grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
                if number == 2 and index == 1:
                    param.grad = None
                if number == 2 and index == 4:
                    param.grad[2, 3], param.grad[7, 40] = float("nan"), float("inf")
            optimizer.step()
    return held(params, optimizer), sizes


OPTIONS: list[dict[str, Any]] = [{}, {"rounding": "nearest"}, {"moments": "bfloat16"}, {"moments": "fp32"}]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_stacks_have_the_bytes_of_each_weight(name: str, options: dict[str, Any]) -> None:
    expected, none = trained(RECIPES[name], small=0, **options)
    assert not none
    found, sizes = trained(RECIPES[name], **options)
    # w0, w1, w2 and w4; w1 pauses in the third step and has another count from then on
    assert sizes == [(4, 1), (3, 1), (3, 1)]
    assert same(found, expected)
    pieces, sizes = trained(RECIPES[name], small=0, piece=3 * 64, **options)
    wide = name in {"nvfp4", "float8 tensor"}
    assert bool(sizes) != wide
    assert wide or max(count for _, count in sizes) == (8 if name == "mxfp8 square" else 4)
    assert same(pieces, expected)


def test_so_do_other_optimizers() -> None:
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.RMSprop, {})):
        expected, _ = trained(RECIPES["mxfp8"], kind, small=0, **options)
        for own in ({}, {"small": 0, "piece": 100}):
            found, sizes = trained(RECIPES["mxfp8"], kind, **own, **options)
            assert sizes, kind
            assert same(found, expected), kind


def test_states_that_are_no_moments_step_alone() -> None:
    assert trained(RECIPES["mxfp8"], amsgrad=True)[1] == []


@pytest.mark.parametrize("moments", ["fp32", "bfloat16", "float8"])
def test_who_stands_where_decides_no_byte_with_a_fused_inner_step(moments: str) -> None:
    """torch's fused AdamW rounds what is left of a vector otherwise than the vector."""
    found = []
    for order in ((0, 1, 2), (2, 0, 1), (1,)):
        params = [nn.Parameter(torch.full((7, 33), 0.5 + number, dtype=torch.bfloat16)) for number in range(3)]
        named = [(f"p{number}", params[number]) for number in order]
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, named, fused=True, masters="remainder", moments=moments)
        for step in range(5):
            for number, param in enumerate(params):
                generator = torch.Generator().manual_seed(10 * step + number)
                param.grad = torch.randn(7, 33, generator=generator).to(torch.bfloat16)
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is True
        found.append(held([params[1]], optimizer))
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
        assert torch.equal(value, found[2][name]), name
