"""Loads that convert exactly where the values allow it: on any number of ranks, the bytes of one process.

Whether a scale that shards share is exact is for all of them to decide: one rank holds the rows that forbid it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from qtensor import Float8BlockScaling, Float8CurrentScaling, MXFP4BlockScaling, NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import assert_holds, load, placed, save, values
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from qtensor.tensor.quantized_tensor import QuantizedTensor

TENSOR, NVFP4 = Float8CurrentScaling(granularity="tensor"), NVFP4BlockScaling()
SQUARE = NVFP4BlockScaling(blocks="square")
TARGETS = (NVFP4, SQUARE, TENSOR, Float8CurrentScaling(), Float8BlockScaling(), Float8BlockScaling(blocks="row"))
COLUMNS = 256


def recoded(q: QuantizedTensor, recipe: Any) -> QuantizedTensor:
    """`copy_` of the whole tensor: what conversion is defined by."""
    target = quantize(torch.ones(q.shape, dtype=torch.bfloat16), recipe)
    target.copy_(q)
    return target


def sources() -> dict[str, QuantizedTensor]:
    """Rows that every number of ranks cuts unevenly; square blocks are cut, too."""
    fits = quantize(values((32, COLUMNS), 0).clamp(-4, 4), MXFP4BlockScaling())
    spoiled, nan, none = fits.clone(), fits.clone(), fits.clone()
    spoiled.scale[31, 5] = 50  # far below all others, in the last rank's rows
    nan.scale[0, 0] = 255
    none.payload.zero_()
    one_scale = recoded(quantize(values((32, COLUMNS), 1), TENSOR), Float8CurrentScaling())
    one_off = one_scale.clone()
    one_off.scale[31] *= 1.5
    squares = recoded(quantize(values((32, COLUMNS), 2), SQUARE), NVFP4)
    few = quantize(values((16, COLUMNS), 3).clamp(-4, 4)[:2], MXFP4BlockScaling())  # no rows on the third rank
    return {"fits": fits, "spoiled": spoiled, "nan": nan, "none": none, "one scale": one_scale, "one off": one_off,
            "squares": squares, "few": few}  # fmt: skip


def exact(q: QuantizedTensor, recipe: Any) -> bool:
    x, y = (each.dequantize(torch.float32) for each in (q, recoded(q, recipe)))
    return torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def test_the_sources_are_what_they_are_called() -> None:
    assert {name: exact(q, NVFP4) for name, q in sources().items()} == {
        "fits": True, "spoiled": False, "nan": True, "none": True, "one scale": False, "one off": False,
        "squares": True, "few": True,
    }  # fmt: skip
    assert {name: exact(q, TENSOR) for name, q in sources().items() if name.startswith("one")} == {
        "one scale": True,
        "one off": False,
    }
    assert exact(sources()["squares"], SQUARE)


def every_target(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in TARGETS:
        for dim in (0, 1):
            full = {
                name: recoded(q, recipe)
                for name, q in sources().items()
                if q.recipe != recipe and not (recipe == SQUARE and name == "few")
            }
            if dim == 1 and dist.get_world_size() == 3:
                continue  # columns are cut between blocks
            target: dict[str, Any] = {
                name: placed(quantize(torch.full(q.shape, 7.0, dtype=torch.bfloat16), recipe), mesh, Shard(dim))
                for name, q in full.items()
            }
            load(target, path, on_mismatch="convert", allow_partial_load=True)
            assert_holds(target, full)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_takes_the_decision_of_one_process(world: int, shared_tmp_path: Path) -> None:
    run_ranks(1, save, sources(), shared_tmp_path)
    run_ranks(world, every_target, shared_tmp_path)
