"""Distillation: a sharded student comes nearer to its sharded teacher, and so does what is exported of it."""

from pathlib import Path

import pytest

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from examples.trainers import qad, qat
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.dcp_adapters.hf.exports import loaded
from tests.examples.trainers.exported import weights_as_trained
from tests.ranks import run_ranks


def test_the_exported_student_is_as_near_to_the_teacher_as_the_trained_one(shared_tmp_path: Path) -> None:
    every = run_ranks(2, qad.main, ["--out", str(shared_tmp_path), "--format", "mxfp4"])
    for losses in every:
        assert 0 < losses[-1] < 0.9 * losses[0]
    same = weights_as_trained(shared_tmp_path, qat.FORMATS["mxfp4"])
    assert len(same) == 2 * 7
    assert all(same.values())
    teacher = AutoModelForCausalLM.from_pretrained(shared_tmp_path / "dense", dtype=torch.bfloat16).eval()
    student = loaded(shared_tmp_path / "exported", dequantize=True)
    for rank, losses in enumerate(every):
        rows = qat.rows(6)[rank::2]
        with torch.no_grad():
            answers = [qad.log_probabilities(model, rows) for model in (teacher, student)]
        assert qad.divergence(*answers).item() == losses[-1]


def _both_are_sharded(directory: Path) -> None:
    teacher, student = qad.teacher_and_student(qat.make_checkpoint(directory), "nvfp4")
    for model in (teacher, student):
        assert all(isinstance(module, FSDPModule) for module in (model, *model.model.layers))
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.placements == (Shard(0),)
    assert not any(param.requires_grad or param.dtype != torch.bfloat16 for param in teacher.parameters())
    assert all(param.requires_grad and param.dtype == torch.float32 for param in student.parameters())
    assert not any(isinstance(param.to_local(), HighPrecisionWeight) for param in teacher.parameters())
    assert sum(isinstance(param.to_local(), HighPrecisionWeight) for param in student.parameters()) == 2 * 7


def test_teacher_and_student_are_sharded_and_only_the_student_learns(shared_tmp_path: Path) -> None:
    run_ranks(2, _both_are_sharded, shared_tmp_path)


def test_the_divergence_is_that_of_the_definition() -> None:
    p, q = (torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed)).softmax(-1) for seed in (0, 1))
    expected = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(qad.divergence(p.log(), q.log()), expected, rtol=1e-5, atol=0)  # 21 fp32 roundings
    assert qad.divergence(p.log(), p.log()) == 0
