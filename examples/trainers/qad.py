"""Quantization-aware distillation: the quantized student learns the answers of the dense model that it comes from.

    torchrun --nproc-per-node 2 examples/trainers/qad.py --out runs/qad [--format mxfp4] [--checkpoint DIR]

As qat.py, but the loss is the Kullback-Leibler divergence from the teacher's next-token probabilities to the student's,
so that no labels are needed, and what is learned is the dense model, not the text. Both are sharded: the teacher as a
frozen bf16 model, the student as dense fp32 shards whose forwards compute with their quantization.

At the end OUT/trained has the student's dense weights, and OUT/exported the quantized ones, for inference engines.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from qat import batch, deploy, make_checkpoint, optimizer_of, options, sharded
from torch import Tensor
from transformers import PreTrainedModel

from dcp_adapters import import_hf


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """Of every next token, fp32 [rows, tokens, vocabulary]."""
    return F.log_softmax(model(input_ids=tokens).logits.float(), dim=-1)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean over all tokens of KL(teacher || student) in nats, from log-probabilities [.., vocabulary]."""
    return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()


def teacher_and_student(directory: Path, form: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The dense model of a directory, frozen, and the one that learns to be like it in another format."""
    teacher = sharded(directory, form, trained=False).requires_grad_(False)
    student = sharded(directory, form)
    for model in (teacher, student):
        import_hf(directory, model)
    return teacher, student


def main(argv: list[str] | None = None) -> list[float]:
    """Distil and export; returns this rank's divergences before each step, and that of the student's last state."""
    args = options(__doc__ or "").parse_args(argv)
    args.checkpoint = args.checkpoint or make_checkpoint(args.out / "dense")
    teacher, student = teacher_and_student(args.checkpoint, args.format)
    optimizer, losses = optimizer_of(student, 3e-4), []
    for step in range(args.steps + 1):
        with torch.no_grad():
            target = log_probabilities(teacher, batch(step))
        loss = divergence(target, log_probabilities(student, batch(step)))
        losses.append(loss.item())
        if step < args.steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    deploy(student, args.checkpoint, args.out)
    print(f"rank {dist.get_rank()}: divergence from the teacher {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
