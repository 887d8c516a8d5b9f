"""What saving a checkpoint asks of a GPU that is not there: reads of values, and copies to the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem

import qtensor as qt
from dcp_adapters import QuantizedSavePlanner
from dcp_adapters.records import checksums
from dcp_adapters.save.steps import checksum_table
from tests.gpu_offline.ordering import Entry, copies_to_host, faults_of, waits_of_host
from tests.gpu_offline.recording import recorded

WEIGHTS = 4
RECIPES: dict[str, Any] = {
    "mxfp8": qt.MXFP8BlockScaling(),
    "nvfp4": qt.NVFP4BlockScaling(),
    "delayed": qt.Float8DelayedScaling(amax_history_len=4),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def planner_of(recipe: Any) -> QuantizedSavePlanner:
    """With weights of several sizes, of which other ranks hold the amax histories, too."""
    state = {f"w{i}": qt.quantize(torch.empty(64 * (i + 1), 64, device="cuda"), recipe) for i in range(WEIGHTS)} | {
        "dense": torch.empty(1000, device="cuda")
    }
    planner = QuantizedSavePlanner()
    planner.set_up_planner(state, None, True)
    planner.leaves.watched |= {name for name in planner.leaves.parts if name.endswith("amax_history")}
    return planner


@every_recipe
def test_planning_reads_scales_at_once_and_histories_at_once(recipe: Any) -> None:
    with FakeTensorMode(), recorded() as log:
        planner = planner_of(recipe)
        planner.create_local_plan()
    wide = recipe != RECIPES["mxfp8"]
    history = recipe == RECIPES["delayed"]
    read = "aten._local_scalar_dense.default in steps/coordinator.py of"
    assert waits_of_host(log) == [read] * wide + [read] * history
    assert copies_to_host(log) == []


def saved(recipe: Any) -> tuple[list[Entry], list[str]]:
    """Resolve all items as DCP's writer does where there is CUDA; the log, and the names in the order of writing.

    Planning copies nothing to the CPU.
    """
    with recorded() as log:
        with FakeTensorMode():
            planner = planner_of(recipe)
            plans, _ = planner.create_global_plan([planner.create_local_plan()])
            plan = planner.finish_plan(plans[0])
        assert copies_to_host(log) == []
        loader = filesystem._OverlappingCpuLoader(planner.resolve_data, inflight_threshhold=10_000_000)
        for item in plan.items:
            loader.add(filesystem._item_size(item), item)
        with patch.object(checksums, "elements_of", lambda data: (data, b"")):  # there is no memory
            return log, [item.index.fqn for _, item in loader.values()]


@every_recipe
def test_a_save_copies_each_tensor_once(recipe: Any) -> None:
    log, names = saved(recipe)
    parts = WEIGHTS * len(qt.quantize(torch.zeros(32, 64), recipe).parts())
    assert names.index("qtensor.checksums") < names.index("dense") < len(names) - 1  # the table is asked for early
    assert len(copies_to_host(log)) == parts + 1
    assert faults_of(log) == []


def test_a_copy_that_there_is_no_room_for_is_made_again() -> None:
    once = Counter(saved(RECIPES["mxfp8"])[1])
    with patch.object(checksum_table, "KEPT", 5000):
        log, names = saved(RECIPES["mxfp8"])
    assert Counter(names) == once
    assert len(copies_to_host(log)) > 2 * WEIGHTS + 1
