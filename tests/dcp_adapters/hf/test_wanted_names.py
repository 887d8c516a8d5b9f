"""Directories of renamed models into parts of them, what holds them, and their state dicts."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers")

from dcp_adapters import digest, import_hf
from layerwise import Max, calibrate
from qtensor import Float8CurrentScaling
from tests.dcp_adapters.hf.renamed_models import CONFIGS, PROMPT, built, logits
from tests.dcp_adapters.hf.test_renamed_models import LLAVA, assert_same_bytes

QWEN = "Qwen2VLForConditionalGeneration"
VISION = ("*vision*", "*visual*", "*projector*", "*lm_head*")
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    root = tmp_path_factory.mktemp("saved")

    def directory(name: str) -> Path:
        if not (root / name).exists():
            built(name).save_pretrained(root / name)
        return root / name

    return directory


class WithValues(nn.Module):
    """As libraries for reinforcement learning have it: a policy, and a head of their own."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = nn.Linear(64, 1)


@pytest.mark.parametrize("name", [LLAVA, QWEN, "Mistral3ForConditionalGeneration"])
def test_the_text_model_of_a_larger_one_is_imported(saved: Saved, name: str) -> None:
    text = built(name, seed=8).model.language_model
    with pytest.raises(ValueError, match="only the directory has it") as refused:
        import_hf(saved(name), text, progress=False)
    assert "layers.0.self_attn.q_proj.weight" not in str(refused.value)  # the rest of the directory alone is too much
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="import_hf: ignore pattern")
        import_hf(saved(name), text, ignore=VISION, progress=False)
    assert_same_bytes(text.state_dict(), built(name).model.language_model.state_dict())


@pytest.mark.parametrize("name", CONFIGS)
def test_what_holds_a_model_is_imported_and_compared(saved: Saved, name: str) -> None:
    holder = WithValues(built(name, seed=8))
    import_hf(saved(name), holder, missing=["value.*"], progress=False)
    assert torch.equal(logits(holder.policy), logits(built(name)))
    held = nn.ModuleDict({"policy": holder.policy})
    assert digest(saved(name), like=held) == digest(held)


@pytest.mark.parametrize("name", [LLAVA, "MixtralForCausalLM"])
def test_a_digest_like_a_state_dict(saved: Saved, name: str) -> None:
    state = built(name).state_dict()
    assert digest(saved(name), like=state) == digest(state)
    config = json.loads((saved(name) / "config.json").read_text())
    assert digest(load_file(saved(name) / "model.safetensors"), config=config, like=state) == digest(state)


def test_a_layer_that_may_be_any_of_several_is_refused(saved: Saved) -> None:
    layer = built(LLAVA, seed=8).model.language_model.layers[1]
    with pytest.raises(ValueError, match=r"\n  input_layernorm\.weight: only the model has it"):
        import_hf(saved(LLAVA), layer, progress=False)


def test_a_twin_that_is_ignored_takes_no_name(saved: Saved, tmp_path: Path) -> None:
    own, other = (f"model.{inner}layers.0.self_attn.q_proj.weight" for inner in ("language_model.", ""))
    shutil.copytree(saved(QWEN), tmp_path / "twins")
    held = load_file(tmp_path / "twins" / "model.safetensors")
    assert other in held
    twins = {**held, own: torch.zeros_like(held[other])}
    save_file(twins, tmp_path / "twins" / "model.safetensors", metadata={"format": "pt"})
    model = built(QWEN, seed=8)
    import_hf(tmp_path / "twins", model, ignore=[own], progress=False)
    assert torch.equal(model.state_dict()[own], held[other])


def test_calibrated_from_the_files_of_the_model_that_it_holds(saved: Saved) -> None:
    with torch.device("meta"):
        inner = type(built(LLAVA))._from_config(CONFIGS[LLAVA](), dtype=torch.bfloat16).eval()
    for own, buffer in built(LLAVA).named_buffers():
        parent, _, attribute = own.rpartition(".")
        inner.get_submodule(parent)._buffers[attribute] = buffer
    names = [f"{projection}_proj" for projection in ("q", "k", "v", "o", "gate", "up", "down")]
    found = []
    for model in (inner, Holder(inner)):
        layers = list(inner.model.language_model.layers)
        result = calibrate(
            model,
            [{"input_ids": PROMPT}],
            recipe=Float8CurrentScaling(),
            algorithm=Max(),
            layers=layers,
            include=[f"*layers.*.{name}" for name in names],
            exclude=["*vision*"],
            weights=saved(LLAVA),
            progress=False,
        )
        found.append({key.removeprefix("policy."): value for key, value in result.state_dict().items()})
    assert len(found[0]) == 14
    assert_same_bytes(*found)


class Holder(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **inputs: torch.Tensor) -> object:
        return self.policy(**inputs)
