"""peft's adapters on a frozen quantized base: exact gradients, a base that stays, checkpoints of adapters alone."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_adapters import expand
from examples.trainers import qlora_peft
from qtensor import QuantizedTensor
from tests.examples.trainers.checkpoints import hold_the_same
from tests.qtensor.recipes_under_test import raw
from tests.ranks import run_ranks


@contextmanager
def _old_names() -> Iterator[None]:
    """peft asks transformers for an attribute by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _run(argv: list[str]) -> list[float]:
    with _old_names():
        return qlora_peft.main(argv)


def test_adapters_resume_in_the_bytes_of_an_uninterrupted_run(shared_tmp_path: Path) -> None:
    whole, halved = shared_tmp_path / "whole", shared_tmp_path / "halved"
    for losses in run_ranks(2, _run, ["--out", str(whole)]):
        assert losses[-1] < 0.95 * losses[0]
    base = ["--base", str(whole / "base")]
    run_ranks(2, _run, ["--out", str(halved), *base, "--steps", "3"])
    run_ranks(2, _run, ["--out", str(halved), *base, "--resume", str(halved / "step-3")])
    assert hold_the_same(whole / "step-6", halved / "step-6")
    for losses in run_ranks(1, _run, ["--out", str(halved), *base, "--resume", str(whole / "step-6"), "--steps", "7"]):
        assert len(losses) == 1
    names = dcp.FileSystemReader(whole / "step-6").read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("adapters.")]
    assert len(weights) == 2 * 7 * 2
    assert all(".lora_" in name for name in names if name not in {"step"} and not name.startswith("optim.param_groups"))


def _base(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all bytes of this rank that are no adapter's."""
    parts = expand({name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name})
    return {name: raw(t.to_local() if isinstance(t, DTensor) else t).clone() for name, t in parts.items()}


def _adapters_learn_as_on_the_dequantized_base(directory: Path) -> tuple[int, int]:
    with _old_names():
        model = qlora_peft.adapted_model(directory)
        dense = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        reference = get_peft_model(dense, LoraConfig(**qlora_peft.LORA))
    held, quantized = _base(model), 0
    for (name, param), (its_name, its) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == its_name
        assert param.requires_grad == its.requires_grad == (".lora_" in name)
        if ".lora_B" in name:  # zeros at first, under which lora_A learns nothing
            torch.nn.init.constant_(param, 0.01)
        full = param.detach().full_tensor()
        quantized += isinstance(full, QuantizedTensor)
        its.data.copy_(full.dequantize() if isinstance(full, QuantizedTensor) else full)
    tokens = torch.arange(16)[None] * (dist.get_rank() + 1)
    for each in (model, reference):
        each(input_ids=tokens, labels=tokens).loss.backward()
    learned = 0
    for param, its in zip(model.parameters(), reference.parameters(), strict=True):
        if not param.requires_grad:
            assert param.grad is None
            continue
        dist.all_reduce(its.grad)
        assert torch.equal(param.grad.full_tensor(), its.grad / dist.get_world_size())  # halves are exact
        learned += bool(its.grad.any())
    torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1).step()
    assert all(torch.equal(before, after) for before, after in zip(held.values(), _base(model).values(), strict=True))
    return quantized, learned


def test_adapters_learn_as_on_the_dequantized_base_and_leave_it_alone(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**qlora_peft.TINY, num_hidden_layers=1)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert run_ranks(2, _adapters_learn_as_on_the_dequantized_base, tmp_path) == [(7 + 1, 7 * 2)] * 2
