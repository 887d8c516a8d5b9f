"""transformers' Trainer around quantized shards: it trains, and a resumed run ends in the uninterrupted one's bytes."""

from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled

pytest.importorskip("transformers")

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from examples.trainers import hf_trainer
from qtensor import MXFP8BlockScaling, quantize_
from tests.examples.trainers.accelerate_state import launched
from tests.examples.trainers.checkpoints import hold_the_same, quantized_in
from tests.ranks import run_ranks, run_ranks_catching


def _run(*argv: str) -> list[float]:
    with launched():
        return hf_trainer.main(list(argv))


@sampled("ranks", [1, 2], [2])
def test_a_resumed_run_ends_in_the_bytes_of_the_uninterrupted_one(ranks: int, shared_tmp_path: Path) -> None:
    whole, resumed = shared_tmp_path / "whole", shared_tmp_path / "resumed"
    for losses in run_ranks(ranks, _run, "--out", str(whole)):
        assert len(losses) == hf_trainer.STEPS
        assert losses[-1] < 0.95 * losses[0]
    for losses in run_ranks(ranks, _run, "--out", str(resumed), "--resume", str(whole / "checkpoint-3")):
        assert len(losses) == hf_trainer.STEPS  # three of them out of the checkpoint
    held = quantized_in(whole / "checkpoint-3/dcp")
    assert len(held) == 2 * 7 + 1
    assert set(held.values()) == {"MXFP8BlockScaling"}
    assert hold_the_same(whole / "checkpoint-6/dcp", resumed / "checkpoint-6/dcp")
    assert not hold_the_same(whole / "checkpoint-3/dcp", whole / "checkpoint-6/dcp")


def _trains_as_it_is(out: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**hf_trainer.TINY, num_hidden_layers=1)).to(torch.bfloat16)
    quantize_(model, MXFP8BlockScaling())
    fully_shard(model)
    options: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "max_steps": 1}
    data: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    with launched():
        Trainer(model, TrainingArguments(out, **options), train_dataset=data).train()


def test_the_trainer_as_it_is_wraps_shards(tmp_path: Path) -> None:
    # as the recipe says; when this fails, transformers has learned to leave them alone
    for error in run_ranks_catching(2, _trains_as_it_is, str(tmp_path)):
        assert "DistributedDataParallel" in error or "DTensor" in error, error
