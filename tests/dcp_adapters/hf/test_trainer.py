"""`QuantizedTrainer`: a run that is stopped and resumed ends in the bytes of one that was not, whole or in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from dcp_adapters.transformers import QTensorConfig
from dcp_adapters.transformers.trainer import QuantizedTrainer
from examples.trainers import accelerate_fsdp2
from fsdp_hooks.torch_private import local_of
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, QuantizedTensor
from tests.dcp_adapters.cases import bits
from tests.dcp_adapters.hf.exports import llama
from tests.dcp_adapters.hf.test_from_pretrained import load
from tests.examples.trainers.accelerate_state import launched
from tests.examples.trainers.checkpoints import hold_the_same, quantized_in
from tests.ranks import run_ranks

ROWS: Any = [{"input_ids": (torch.arange(8) * (row + 1)) % 128} for row in range(24)]
DATA: Any = [{**row, "labels": row["input_ids"]} for row in ROWS]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(path)
    return path


def trainer(model: Any, out: Path, *, kind: Any = QuantizedTrainer, **options: Any) -> Any:
    """Six steps, shuffled, a checkpoint every two; dropout draws from the generators that checkpoints hold."""
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), lr=1e-2)
    options = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2, **options}
    options |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(out), **options)
    return kind(model, arguments, train_dataset=DATA, eval_dataset=DATA[:4], optimizers=(optimizer, None))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    own, its = dict(one.named_parameters()), dict(other.named_parameters())
    assert own.keys() == its.keys()
    for name, param in own.items():
        mine: Any = local_of(param.detach())
        yours: Any = local_of(its[name].detach())
        parts = mine.parts() if isinstance(mine, QuantizedTensor) else {"": mine}
        others = yours.parts() if isinstance(yours, QuantizedTensor) else {"": yours}
        assert {part: bits(held) for part, held in parts.items()} == {
            part: bits(held) for part, held in others.items()
        }, name


def test_a_resumed_run_in_one_process_ends_in_the_bytes_of_an_uninterrupted_one(dense: Path, tmp_path: Path) -> None:
    config = QTensorConfig(MXFP8BlockScaling())
    whole = trainer(load(dense, config), tmp_path / "whole")
    whole.train()
    assert len(quantized_in(tmp_path / "whole/checkpoint-2/dcp")) == 14
    trainer(load(dense, config), tmp_path / "halved", max_steps=6, save_total_limit=1).train(
        resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2")
    )
    resumed = trainer(load(dense, config), tmp_path / "halved")
    resumed.train(resume_from_checkpoint=True)  # of a run that is over: nothing is left to do
    assert_same(whole.model, resumed.model)
    assert hold_the_same(tmp_path / "whole/checkpoint-6/dcp", tmp_path / "halved/checkpoint-6/dcp")
    assert not hold_the_same(tmp_path / "whole/checkpoint-4/dcp", tmp_path / "halved/checkpoint-6/dcp")
    whole.save_model(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").is_file()


def test_the_best_weights_come_back(dense: Path, tmp_path: Path) -> None:
    run = trainer(
        load(dense, QTensorConfig(MXFP8BlockScaling())),
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first one, so that it is not the last by chance
    )
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    loss = next(entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry)
    assert run.evaluate()["eval_loss"] == loss


def test_what_is_no_such_checkpoint_is_refused(dense: Path, tmp_path: Path) -> None:
    """One of the Trainer's own, which has what engines read in place of weights."""
    config = QTensorConfig(MXFP8BlockScaling())
    trainer(load(dense, config), tmp_path, kind=Trainer, max_steps=2).train()
    model = load(dense, config)
    with pytest.raises(ValueError, match=r"has no dcp/\.metadata: it is not a checkpoint of QuantizedTrainer"):
        trainer(model, tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(model, load(dense, config))


def test_weights_alone_are_no_state_to_go_on_from(dense: Path, tmp_path: Path) -> None:
    config = QTensorConfig(MXFP8BlockScaling())
    trainer(load(dense, config), tmp_path, max_steps=2, save_only_model=True).train()
    model = load(dense, config)
    with pytest.raises(CheckpointException, match="optim"):
        trainer(model, tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(model, load(dense, config))


def _runs_under_accelerate(dense: Path, out: Path, resume: str | None) -> None:
    with launched():
        model = load(dense, QTensorConfig(MXFP8BlockScaling()))
        model = accelerate_fsdp2.fsdp2_prepare_model(accelerate_fsdp2.accelerator(), model)
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    with launched():
        run = trainer(model, out, per_device_train_batch_size=1)
        run.train(resume_from_checkpoint=resume)
        with pytest.raises(ValueError, match="save_model: the model is sharded"):
            run.save_model(str(out / "saved"))


def test_a_resumed_run_in_shards_of_accelerate_ends_in_the_same_bytes(shared_tmp_path: Path) -> None:
    llama().save_pretrained(shared_tmp_path / "dense")
    whole, resumed = shared_tmp_path / "whole", shared_tmp_path / "resumed"
    run_ranks(2, _runs_under_accelerate, shared_tmp_path / "dense", whole, None)
    run_ranks(2, _runs_under_accelerate, shared_tmp_path / "dense", resumed, str(whole / "checkpoint-4"))
    assert len(quantized_in(whole / "checkpoint-4/dcp")) == 14
    assert hold_the_same(whole / "checkpoint-6/dcp", resumed / "checkpoint-6/dcp")
    assert not hold_the_same(whole / "checkpoint-4/dcp", whole / "checkpoint-6/dcp")
