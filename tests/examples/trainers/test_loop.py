"""The hand-written loop: it trains, its checkpoints hold raw payloads, and a resumed run ends in the same bytes."""

from pathlib import Path

import pytest

from tests.sampling import sampled

pytest.importorskip("transformers")

import torch
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from examples.trainers import loop
from qtensor import MasterWeightOptimizer
from tests.examples.trainers.checkpoints import hold_the_same, quantized_in
from tests.ranks import agreed, run_ranks


@sampled("ranks", [1, 2], [2])
def test_a_resumed_run_ends_in_the_bytes_of_the_uninterrupted_one(ranks: int, shared_tmp_path: Path) -> None:
    whole, resumed = shared_tmp_path / "whole", shared_tmp_path / "resumed"
    for losses in run_ranks(ranks, loop.main, ["--out", str(whole)]):
        assert losses[-1] < 0.9 * losses[0]
    run_ranks(ranks, loop.main, ["--out", str(resumed), "--resume", str(whole / "step-3")])
    held = quantized_in(whole / "step-3")
    assert set(held.values()) == {"MXFP8BlockScaling"}
    assert len(held) == 2 * 7 + 1  # linear weights of two layers, and the head
    assert hold_the_same(whole / "step-6", resumed / "step-6")
    assert not hold_the_same(whole / "step-3", whole / "step-6")
    assert agreed(not (resumed / "step-3").exists())


def _saves_what_it_loads(source: Path, target: Path) -> None:
    model = loop.sharded_model()
    state = loop.training_state(model, MasterWeightOptimizer(torch.optim.AdamW, model.parameters()), 0)
    dcp.load(state, checkpoint_id=source, planner=QuantizedLoadPlanner())
    dcp.save(state, checkpoint_id=target, planner=QuantizedSavePlanner())


def test_another_number_of_ranks_starts_from_the_same_bytes(shared_tmp_path: Path) -> None:
    run_ranks(2, loop.main, ["--out", str(shared_tmp_path), "--steps", "3"])
    run_ranks(1, _saves_what_it_loads, shared_tmp_path / "step-3", shared_tmp_path / "again")
    assert hold_the_same(shared_tmp_path / "step-3", shared_tmp_path / "again")
