"""transformers' Trainer around quantized shards: it trains, and a resumed run ends in the uninterrupted one's bytes."""

from pathlib import Path

import pytest

from tests.sampling import sampled

pytest.importorskip("transformers")

from transformers import LlamaConfig, Trainer, TrainingArguments

from examples.trainers import hf_trainer
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
    for losses in run_ranks(ranks, _run, "--out", str(resumed), "--resume", str(whole / "step-3")):
        assert len(losses) == hf_trainer.STEPS - 3
    held = quantized_in(whole / "step-3")
    assert len(held) == 2 * 7 + 1
    assert set(held.values()) == {"MXFP8BlockScaling"}
    assert hold_the_same(whole / "step-6", resumed / "step-6")
    assert not hold_the_same(whole / "step-3", whole / "step-6")


def _saves_by_itself(out: str) -> None:
    model = hf_trainer.ShardedLlama(LlamaConfig(**hf_trainer.TINY, num_hidden_layers=1))
    with launched():
        Trainer(model, TrainingArguments(out, use_cpu=True, save_strategy="steps", report_to="none"))


def test_the_trainer_refuses_to_save_checkpoints_itself(tmp_path: Path) -> None:
    # as the recipe says; when this fails, transformers has learned to, and the callback may go
    for error in run_ranks_catching(2, _saves_by_itself, str(tmp_path)):
        assert error.startswith("ValueError: Resuming is not supported for models sharded at load time")
