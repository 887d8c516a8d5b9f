"""What FSDP does on a GPU alone, and calibration goes through, done on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _to_kwargs

from layerwise import AWQ, GPTQ, Max, calibrate, search_formats
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling
from tests.layerwise.algorithm_table import ALGORITHMS
from tests.layerwise.families import batches_for, family, parts
from tests.layerwise.models import fingerprints
from tests.ranks import run_ranks_each

MENU = [NVFP4BlockScaling(), MXFP8BlockScaling()]


@contextmanager
def inputs_moved() -> Iterator[list[nn.Module]]:
    """Inside, a root moves what it is called with, as torch 2.11 does on a GPU; what was called is listed."""
    called: list[nn.Module] = []
    original = FSDPState._root_pre_forward

    def root_pre_forward(self: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        begins = self._state_ctx.iter_forward_root is None
        args, kwargs = original(self, module, args, kwargs)
        if begins and self._is_root:
            called.append(module)
            moved, named = _to_kwargs(args, kwargs, torch.device("cpu"), False)
            args, kwargs = moved[0], named[0]
        return args, kwargs

    with patch.object(FSDPState, "_root_pre_forward", root_pre_forward):
        yield called


def sharded() -> nn.Module:
    model = family("llama").to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _calibrated(algorithm: Any) -> list[dict[str, str]]:
    """The bytes of the result for inputs as they are, and for moved ones."""
    options: dict[str, Any] = {"recipe": NVFP4BlockScaling(), "algorithm": algorithm, "progress": False}
    found = [calibrate(sharded(), batches_for("llama"), **options)]
    with inputs_moved() as called:
        found.append(calibrate(sharded(), batches_for("llama"), **options))
    assert called
    return [fingerprints(parts(result.state_dict())) for result in found]


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_inputs_that_a_root_moves_change_nothing(world_size: int) -> None:
    cases = [*ALGORITHMS.values()] if world_size == 1 else [GPTQ(smoothing=AWQ())]
    for on_rank in run_ranks_each(world_size, cases, _calibrated):
        for found, moved in on_rank:
            assert found == moved


def _searched(algorithm: Any) -> dict[str, Any]:
    with inputs_moved() as called:
        found = search_formats(sharded(), batches_for("llama"), recipes=MENU, bits_per_weight=6.0, algorithm=algorithm)
    assert called
    return found.to_json()


def test_a_search_of_formats_goes_through_them_too() -> None:
    assert run_ranks_each(1, [Max()], _searched)[0][0]
