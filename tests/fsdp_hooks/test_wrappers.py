"""Names are those of the plain model, whatever torch, peft and transformers put around it or around its modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from fsdp_hooks.wrappers import (
    PlainNames,
    merged,
    plain_modules,
    plain_name,
    plain_parameters,
    plain_state_dict,
    unmerged,
    unwrap,
    without_replication,
)
from tests.ranks import run_ranks
from tests.wrapped import adapted, llama

MODEL = llama()
MODULES, TENSORS = [name for name, _ in MODEL.named_modules()], list(MODEL.state_dict())


def in_layers(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = llama()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = wrap(layer)
    return model


def nested(layer: Any) -> nn.Module:
    layer.mlp = checkpoint_wrapper(torch.compile(layer.mlp))
    return torch.compile(checkpoint_wrapper(offload_wrapper(layer)))  # type: ignore[no-any-return]


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "nothing": llama,
    "compile": lambda: torch.compile(llama()),
    "compiled layers": lambda: in_layers(torch.compile),
    "checkpointed layers": lambda: in_layers(checkpoint_wrapper),
    "nested": lambda: torch.compile(DataParallel(in_layers(nested))),
    "average": lambda: AveragedModel(llama()),
    "average of adapters": lambda: AveragedModel(adapted(peft.LoraConfig(target_modules=["q_proj"]))),
    "lora": lambda: adapted(peft.LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"])),
    "dora": lambda: adapted(peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], use_dora=True)),
    "tokens": lambda: adapted(peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2])),
    "ia3": lambda: adapted(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": lambda: adapted(peft.LoHaConfig(target_modules=["q_proj"])),
    "vera": lambda: adapted(peft.VeraConfig(target_modules=["q_proj"])),
    "prompt": lambda: adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "adaption prompt": lambda: adapted(
        peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    ),
    "compiled lora": lambda: torch.compile(adapted(peft.LoraConfig(target_modules=["q_proj"]))),
}
ADAPTED = [name for name in WRAPPED if list(WRAPPED).index(name) >= list(WRAPPED).index("average of adapters")]


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_are_those_of_the_plain_model(kind: str) -> None:
    model = WRAPPED[kind]()
    state = plain_state_dict(model, adapters=False)
    assert sorted(state) == sorted(TENSORS)
    assert list(dict(plain_modules(model))) == MODULES
    for name, module in plain_modules(model):
        for attribute, param in module._parameters.items():
            if param is not None and name in dict(MODEL.named_modules()) and f"{name}.{attribute}" in state:
                assert state[f"{name}.{attribute}"].data_ptr() == param.data_ptr()
    assert bool(unmerged(model)) == (kind in ADAPTED)
    assert type(unwrap(model)).__name__ == "LlamaForCausalLM"
    others = plain_state_dict(model).keys() - state.keys()
    assert bool(others) == (kind in ADAPTED)
    assert {name for name, _ in plain_parameters(model)} <= plain_state_dict(model).keys()


def test_an_adapter_that_is_merged_is_in_the_weights() -> None:
    model = adapted(peft.LoraConfig(target_modules=["q_proj"]))
    assert unmerged(model) == [f"model.layers.{number}.self_attn.q_proj" for number in range(2)]
    assert merged(model) == []
    model.merge_adapter()
    assert unmerged(model) == []
    assert len(merged(model)) == 2
    with model.disable_adapter():
        assert len(unmerged(model)) == 2
    saved = adapted(peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    saved.merge_adapter()
    assert unmerged(saved) == ["lm_head"]  # whose trained copy no merge puts back


def test_a_model_may_have_attributes_of_these_names() -> None:
    """Only what a class or an impossible name shows is taken away."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.Linear(2, 2)})})

    names = ["module.base_model.model.weight", "module.base_model.model.bias"]
    assert list(plain_state_dict(Holder())) == names
    assert list(plain_state_dict(DataParallel(Holder()))) == names
    assert [plain_name(name) for name in names] == names
    assert plain_name("a._orig_mod._checkpoint_wrapped_module.b_orig_mod.c") == "a.b_orig_mod.c"
    names_of = PlainNames(DataParallel(Holder()))
    assert names_of.plain(f"module.{names[0]}") == names[0]
    assert not names_of.is_adapter(f"module.{names[0]}")


def test_replicas_are_taken_off_and_compiled_modules_stay() -> None:
    inner = torch.compile(llama())
    assert without_replication(torch.compile(DataParallel(inner))) is inner
    assert without_replication(inner) is inner


def wrapped_by_ranks() -> None:
    model = DistributedDataParallel(in_layers(checkpoint_wrapper))
    assert list(plain_state_dict(model)) == TENSORS
    assert list(dict(plain_modules(model))) == MODULES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = nn.Sequential(nn.Linear(4, 4))
        sharded = FullyShardedDataParallel(linear, use_orig_params=True, device_id=torch.device("cpu"))
    assert [name for name, _ in plain_parameters(sharded)] == ["0.weight", "0.bias"]
    assert dist.is_initialized()


def test_names_under_ddp_and_fsdp1() -> None:
    run_ranks(2, wrapped_by_ranks)
