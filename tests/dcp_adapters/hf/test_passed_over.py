"""Imports from files that have more than the model, or less: what the model does without, ignore= and missing=."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import export_hf, import_hf
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize, quantize_
from tests.dcp_adapters.cases import values
from tests.dcp_adapters.hf.test_kept_dtypes import LATENT, SIZES
from tests.ranks import run_ranks

MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
LOGGER = "dcp_adapters.import_hf"
MTP: dict[str, tuple[dict[str, Any], str]] = {
    "DeepseekV3ForCausalLM": (SIZES | LATENT, "model.layers.61"),
    "Glm4MoeForCausalLM": (SIZES | {"head_dim": 32}, "model.layers.92"),
    "Qwen3NextForCausalLM": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 96,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "tie_word_embeddings": False,
        },
        "mtp.layers.0",
    ),
}


def added(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """More tensors in the file of a directory."""
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    return directory


def same(one: Any, two: Any) -> bool:
    """Of two tensors, dense or quantized, all bytes."""
    if not hasattr(one, "recipe"):
        return torch.equal(one, two)
    return all(torch.equal(part, two.parts()[name]) for name, part in one.parts().items())


def refusal(path: Path, model: nn.Module | None, **options: Any) -> str:
    """The error's text; nothing was written."""
    before = {} if model is None else {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"\S") as caught:
        import_hf(path, model, progress=False, **options)
    after = {} if model is None else model.state_dict()
    assert all(value.is_meta or same(value, after[name]) for name, value in before.items())
    return str(caught.value)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    caplog.clear()
    return found


@pytest.mark.parametrize("name", MTP)
def test_layers_that_predict_several_tokens_are_passed_over(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dense, and quantized in a way that nothing here reads, as vendors have them."""
    transformers = pytest.importorskip("transformers")
    sizes, place = MTP[name]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes))
    state = model.state_dict()
    quantized = {
        key: quantize(value, MXFP8) if "_proj" in key and value.ndim == 2 else value for key, value in state.items()
    }
    export_hf(quantized, tmp_path / "out", config={"model_type": "mine"}, progress=False)
    strange = torch.zeros(64, 8, dtype=torch.int32)
    own = {f"{place}.eh_proj.weight": torch.ones(64, 128), f"{place}.mlp.down_proj.qweight": strange}
    added(tmp_path / "out", own)
    other = kind(kind.config_class(**sizes))
    import_hf(tmp_path / "out", other, on_mismatch="convert", progress=False)
    for key, value in other.state_dict().items():
        held = quantized[key]
        assert torch.equal(value, held.dequantize(value.dtype) if hasattr(held, "recipe") else held), key
    (line,) = told(caplog)
    assert line.startswith(f"{tmp_path / 'out'}: 2 tensors passed over, as the model says (_keys_to_ignore_on_load")
    assert all(key in line for key in own)
    assert place in refusal(tmp_path / "out", None), "without a model nobody does without them"
    found = import_hf(tmp_path / "out", ignore=[f"{place}.*"], progress=False)
    assert not found.keys() & own.keys()
    added(tmp_path / "out", {"model.more.weight": torch.ones(4)})
    assert "model.more.weight: only the directory has it" in refusal(tmp_path / "out", other, on_mismatch="convert")


def policy(path: Path) -> tuple[Any, dict[str, Any]]:
    """A quantized Llama's directory, and its sizes."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    quantize_(model, MXFP8)
    export_hf(model, path, progress=False)
    return model, sizes


def critic(sizes: dict[str, Any], labels: int = 1) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(labels)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes, num_labels=labels)).bfloat16()
    quantize_(model, MXFP8, exclude=["score"])
    return model


def test_a_critic_begins_from_a_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, sizes = policy(tmp_path / "out")
    other = critic(sizes)
    score = other.score.weight.detach().clone()
    lines = refusal(tmp_path / "out", other).splitlines()[1:]
    assert [line.strip().partition(";")[0] for line in lines] == [
        "lm_head.weight: only the directory has it",
        "score.weight: only the model has it",
    ]
    assert "score.weight: only the model has it" in refusal(tmp_path / "out", other, ignore=["lm_head.*"])
    assert "lm_head.weight: only the directory" in refusal(tmp_path / "out", other, missing=["score.*"])
    for ignore in (["lm_head.weight"], ["lm_head.*"], ["lm_head*"]):  # the weight and its scale
        found = import_hf(tmp_path / "out", other, ignore=ignore, missing=["score.*"], progress=False)
        assert [line.split(": ", 1)[1] for line in told(caplog)] == [
            "2 tensors passed over, as ignore= says: lm_head.weight, lm_head.weight_scale",
            "1 tensors not in the files, and as they were initialised: score.weight",
        ]
        assert torch.equal(found["score.weight"], score)
        for name, value in model.model.state_dict().items():
            assert same(found[f"model.{name}"], value)
    export_hf(other, tmp_path / "critic", progress=False)
    resumed = critic(sizes)
    resumed.score.weight.detach().zero_()
    import_hf(tmp_path / "critic", resumed, missing=["score.*"], progress=False)
    assert torch.equal(resumed.score.weight, score), "what the files have is loaded"
    assert told(caplog) == []
    anew = critic(sizes, labels=3)
    words = refusal(tmp_path / "critic", anew)
    assert "score.weight" in words, "another shape"
    fresh = anew.score.weight.detach().clone()
    import_hf(tmp_path / "critic", anew, ignore=["score.weight"], missing=["score.weight"], progress=False)
    assert torch.equal(anew.score.weight, fresh)


def test_a_backbone_takes_what_it_has(tmp_path: Path) -> None:
    model, _ = policy(tmp_path / "out")
    backbone = nn.ModuleDict({"model": model.model})
    expected = {name: value.clone() for name, value in backbone.state_dict().items()}
    for value in backbone.state_dict().values():
        if not hasattr(value, "recipe"):
            value.zero_()
    assert "lm_head.weight: only the directory has it" in refusal(tmp_path / "out", backbone)
    import_hf(tmp_path / "out", backbone, ignore=["lm_head.*"], progress=False)
    assert all(same(value, expected[name]) for name, value in backbone.state_dict().items())


class Two(nn.Module):
    def __init__(self, *, head: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)
        if head:
            self.head = nn.Linear(64, 4)
            self.register_buffer("steps", torch.tensor(3.0))


def small(path: Path) -> Path:
    state = {"up.weight": quantize(values((64, 64), 0), NVFP4), "old.weight": values((8,), 1)}
    export_hf(state, path, config={"model_type": "mine"}, progress=False)
    return path


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    path = small(tmp_path / "out")
    words = refusal(path, Two(), ignore=["old.*"], missing=["head.*", "steps", "score.*"], on_mismatch="convert")
    assert words == "import_hf: missing pattern 'score.*' matches no tensor of the model"
    with pytest.warns(UserWarning, match=r"^import_hf: ignore pattern 'lm_head.\*' matches no tensor of .*out$"):
        import_hf(path, Two(head=False), ignore=["old.*", "lm_head.*"], on_mismatch="convert", progress=False)
    with pytest.warns(UserWarning, match=r"^import_hf: ignore pattern 'lm_head.\*' matches no tensor"):
        assert {*import_hf(path, ignore=["old.*", "lm_head.*"], progress=False)} == {"up.weight"}
    for argument in ("ignore", "missing"):
        with pytest.raises(TypeError, match=rf"^import_hf: {argument} is a list of patterns, got 'head'"):
            import_hf(path, Two(), **{argument: "head"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^import_hf: missing= names tensors of a model, and there is none"):
        import_hf(path, missing=["head.*"])
    assert "weight_packed" in refusal(path, Two(head=False), ignore=["old.*", "up.weight_scale"]), "not half a weight"


def test_what_is_missing_must_have_values(tmp_path: Path) -> None:
    """Memory without values would be trained on."""
    path = small(tmp_path / "out")
    with torch.device("meta"):
        model = Two()
    quantize_(model, NVFP4, exclude=["head"])
    given: dict[str, Any] = {"ignore": ["old.*"], "missing": ["head.*", "steps"]}
    words = refusal(path, model, **given)
    for name in ("head.weight", "head.bias", "steps"):
        assert f"{name}: missing= names it, no file has it, and on the meta device it has no values to keep;" in words
    assert model.up.weight.is_meta, "nothing has memory yet"
    model.head, model.steps = nn.Linear(64, 4), torch.tensor(5.0)
    expected = {name: value.clone() for name, value in model.state_dict().items() if "up" not in name}
    found = import_hf(path, model, progress=False, **given)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not found["up.weight"].is_meta


def on_ranks(path: str) -> None:
    torch.manual_seed(0)
    model = Two()
    head = model.head.weight.detach().clone()
    fully_shard(model)
    import_hf(path, model, ignore=["old.*"], missing=["head.*", "steps"], on_mismatch="convert", progress=False)
    assert torch.equal(model.head.weight.full_tensor(), head)
    expected: Any = import_hf(path, ignore=["old.*"], progress=False)["up.weight"]
    assert torch.equal(model.up.weight.full_tensor(), expected.dequantize(torch.float32))
    given: Any = {"ignore": ["old.*"], "on_mismatch": "convert", "progress": False}
    with pytest.raises(
        ValueError, match=r"^rank 1: import_hf: missing pattern 'scores' matches no tensor of the model"
    ):
        import_hf(path, model, missing=["scores"] if dist.get_rank() else ["head.*", "steps"], **given)


def test_shards_keep_what_is_missing(tmp_path: Path) -> None:
    run_ranks(2, on_ranks, str(small(tmp_path / "out")))
