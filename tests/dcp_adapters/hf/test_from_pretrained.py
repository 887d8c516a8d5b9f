"""transformers' `from_pretrained` and `save_pretrained` with a `QTensorConfig`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from dcp_adapters import export_hf, import_hf
from dcp_adapters.transformers import QTensorConfig, quantized_config
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize_,
)
from tests.dcp_adapters.cases import bits
from tests.dcp_adapters.hf.exports import PROMPT, llama, loaded, raw
from tests.dcp_adapters.hf.renamed_models import built
from tests.ranks import run_ranks
from tests.recipes import MAIN

CASES = sorted(MAIN)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(path)
    return path


def load(path: Path, config: Any = None, **options: Any) -> Any:
    # None would take the place of what config.json says
    options |= {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(path, **options)


def reference(path: Path, recipe: Any, exclude: tuple[str, ...] = ("lm_head",), **options: Any) -> Any:
    model = load(path, **options)
    quantize_(model, recipe, exclude=exclude)
    return model


def assert_same(one: nn.Module, other: nn.Module) -> int:
    """The same parameters, bit for bit; returns how many are quantized."""
    found, expected = dict(one.named_parameters()), dict(other.named_parameters())
    assert found.keys() == expected.keys()
    count = 0
    for name, param in found.items():
        value: Any = param.detach()
        its: Any = expected[name].detach()
        assert (type(value), value.dtype, param.requires_grad) == (type(its), its.dtype, True), name
        if isinstance(value, QuantizedTensor):
            count += 1
            assert value.recipe == its.recipe
            assert {part: bits(held) for part, held in value.parts().items()} == {
                part: bits(held) for part, held in its.parts().items()
            }, name
        else:
            assert bits(value) == bits(its), name
    return count


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_quantizing_what_is_loaded(name: str, dense: Path) -> None:
    model, expected = load(dense, QTensorConfig(MAIN[name])), reference(dense, MAIN[name])
    assert assert_same(model, expected) == 14
    assert not isinstance(model.lm_head.weight.data, QuantizedTensor)
    assert torch.equal(model(PROMPT).logits, expected(PROMPT).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_that_is_asked_for_is_quantized(dtype: torch.dtype, dense: Path) -> None:
    model = load(dense, QTensorConfig(MXFP8BlockScaling()), dtype=dtype)
    assert model.dtype == dtype
    assert assert_same(model, reference(dense, MXFP8BlockScaling(), dtype=dtype)) == 14


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
def test_a_device_map_of_one_device(device_map: Any, dense: Path) -> None:
    model = load(dense, QTensorConfig(MXFP8BlockScaling()), device_map=device_map)
    assert assert_same(model, reference(dense, MXFP8BlockScaling())) == 14


def test_patterns_choose_as_quantize_does(dense: Path) -> None:
    config = QTensorConfig(MXFP8BlockScaling(), include=["*_proj", "lm_head"], exclude=["*.down_proj"])
    model, expected = load(dense, config), load(dense)
    quantize_(expected, MXFP8BlockScaling(), include=["*_proj", "lm_head"], exclude=["*.down_proj"])
    assert assert_same(model, expected) == 13
    with pytest.raises(ValueError, match=r"quantize_: include pattern 'none' matches no nn.Linear"):
        load(dense, QTensorConfig(MXFP8BlockScaling(), include=["none"]))
    with pytest.raises(TypeError, match="expected a list of patterns"):
        QTensorConfig(MXFP8BlockScaling(), exclude="lm_head")
    with pytest.raises(ValueError, match="layout='none' is not one of"):
        QTensorConfig(MXFP8BlockScaling(), layout="none")


def test_a_head_that_is_tied_stays_dense_and_tied(tmp_path: Path) -> None:
    llama(tied=True).save_pretrained(tmp_path)
    model = load(tmp_path, QTensorConfig(MXFP8BlockScaling(), exclude=[]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not isinstance(model.lm_head.weight.data, QuantizedTensor)


def test_a_weight_that_no_file_has_is_quantized_too(dense: Path) -> None:
    """The head of a classifier, which transformers initialises."""
    model = AutoModelForSequenceClassification.from_pretrained(
        dense, quantization_config=QTensorConfig(MXFP8BlockScaling()), num_labels=3
    )
    assert weights_of(model)["score.weight"].shape == (3, 64)
    assert len(weights_of(model)) == 15


def test_a_dense_state_dict_is_quantized_as_it_is_loaded(dense: Path) -> None:
    model = load(dense, QTensorConfig(NVFP4BlockScaling()))
    expected = {name: bits(held.payload) for name, held in weights_of(model).items()}
    state = load(dense).state_dict()
    with torch.no_grad():
        for held in weights_of(model).values():
            held.payload.zero_()
    model.load_state_dict(state)
    assert {name: bits(held.payload) for name, held in weights_of(model).items()} == expected


def weights_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: param.detach() for name, param in model.named_parameters()}
    return {name: value for name, value in found.items() if isinstance(value, QuantizedTensor)}


# -- what is saved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        (MXFP8BlockScaling(), "compressed-tensors"),
        (NVFP4BlockScaling(), "compressed-tensors"),
        (Float8CurrentScaling(), "modelopt"),
    ],
    ids=str,
)
def test_it_saves_what_an_export_writes(recipe: Any, layout: str, dense: Path, tmp_path: Path) -> None:
    model = load(dense, QTensorConfig(recipe, layout=layout))
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    model.save_pretrained(saved)
    export_hf(model, exported, layout=layout, config=load(dense).config, progress=False)
    own, its = (load_file(path / "model.safetensors") for path in (saved, exported))
    assert own.keys() == its.keys()
    assert all(torch.equal(raw(own[name]), raw(its[name])) for name in own)
    told = [json.loads((path / "config.json").read_text())["quantization_config"] for path in (saved, exported)]
    assert told[0] == told[1]
    assert told[0]["quant_method"] == layout
    found = import_hf(saved, progress=False)
    for name, weight in weights_of(model).items():
        assert bits(found[name].payload) == bits(weight.payload)


def test_transformers_reads_what_was_saved(dense: Path, tmp_path: Path) -> None:
    """Through compressed-tensors, whose decompressed weights are the values of ours."""
    model = load(dense, QTensorConfig(MXFP8BlockScaling()))
    model.save_pretrained(tmp_path)
    back = loaded(tmp_path, dequantize=True)
    for name, weight in weights_of(model).items():
        assert torch.equal(dict(back.named_parameters())[name], weight.dequantize(torch.bfloat16)), name


def test_it_saves_again_after_training(dense: Path, tmp_path: Path) -> None:
    model = load(dense, QTensorConfig(MXFP8BlockScaling()))
    model.save_pretrained(tmp_path / "before")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "after")
    before, after = (import_hf(tmp_path / name, progress=False) for name in ("before", "after"))
    for name, weight in weights_of(model).items():
        assert bits(after[name].payload) == bits(weight.payload) != bits(before[name].payload)


def test_what_is_asked_stands_in_the_config_until_then(dense: Path) -> None:
    config = QTensorConfig(NVFP4BlockScaling(), exclude=["*.q_proj"])
    told = json.loads(json.dumps(load(dense, config).config.to_dict()["quantization_config"]))
    assert told["quant_method"] == "qtensor"
    again = QTensorConfig.from_dict(told)
    assert (again.recipe, again.include, again.exclude) == (NVFP4BlockScaling(), ("*",), ("*.q_proj",))


def test_experts_stay_dense_and_keep_their_names_in_the_files(tmp_path: Path) -> None:
    """transformers makes one weight of all experts as it reads them, and takes it apart again as it saves."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", QTensorConfig(MXFP8BlockScaling()))
    assert assert_same(model, reference(tmp_path / "dense", MXFP8BlockScaling())) == 4
    model.save_pretrained(tmp_path / "saved")
    export_hf(model, tmp_path / "exported", config=load(tmp_path / "dense").config, progress=False)
    own, its = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "exported"))
    assert own.keys() == its.keys()
    assert all(torch.equal(raw(own[name]), raw(its[name])) for name in own)


def test_what_was_saved_has_the_names_that_the_files_had(tmp_path: Path) -> None:
    """transformers gives tensors the names of files once it has them from us; they must not be in these names then."""
    made = built("LlavaForConditionalGeneration")
    made.save_pretrained(tmp_path / "dense")
    config = QTensorConfig(MXFP8BlockScaling(), exclude=["*vision*", "*projector*", "lm_head"])
    model = type(made).from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    dense, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("dense", "saved"))
    assert {name.removesuffix("_scale") for name in saved} == dense.keys()
    told = type(made).from_pretrained(
        tmp_path / "saved", config=quantized_config(tmp_path / "saved"), output_loading_info=True
    )[1]
    assert not any(told.values()), told


# -- training ----------------------------------------------------------------------------------------------------------


def test_the_trainer_trains_it(dense: Path, tmp_path: Path) -> None:
    model = load(dense, QTensorConfig(MXFP8BlockScaling()))
    before = {name: bits(held.payload) for name, held in weights_of(model).items()}
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), lr=1e-2)
    data: Any = [{"input_ids": PROMPT[0], "labels": PROMPT[0]}] * 2
    options: dict[str, Any] = {"save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=1, dataloader_pin_memory=False, **options
    )
    Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    assert all(bits(held.payload) != before[name] for name, held in weights_of(model).items())


def test_dequantize_gives_a_dense_model(dense: Path, tmp_path: Path) -> None:
    model = load(dense, QTensorConfig(MXFP8BlockScaling()))
    values = {name: held.dequantize(torch.bfloat16) for name, held in weights_of(model).items()}
    model.save_pretrained(tmp_path)  # leaves the name of a dtype in the config
    model.dequantize()
    assert not weights_of(model)
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in values.items())
    assert not model.is_quantized


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_weights_on_the_disk_are_refused(dense: Path) -> None:
    with pytest.raises(ValueError, match='can not be offloaded to "disk"'):
        load(dense, QTensorConfig(MXFP8BlockScaling()), device_map={"model": "cpu", "lm_head": "disk"})


@pytest.mark.parametrize("name", ["mxfp4", "int4_32", "mxfp8", "float8_row"])
def test_what_was_saved_for_engines_is_no_state_to_go_on_from(name: str, dense: Path, tmp_path: Path) -> None:
    """The Trainer loads its checkpoints so: a layout's names are not the model's, and torch would pass over them."""
    model = load(dense, QTensorConfig(MAIN[name]))
    model.save_pretrained(tmp_path)
    before = {key: bits(held.payload) for key, held in weights_of(model).items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert "weight" in str(caught.value)
    assert {key: bits(held.payload) for key, held in weights_of(model).items()} == before


def test_weights_of_another_shape_are_refused(dense: Path) -> None:
    """transformers compares no shapes of weights that are quantized, and would put the files' into the model."""
    config = AutoConfig.from_pretrained(dense)
    config.intermediate_size *= 2
    options: dict[str, Any] = {"quantization_config": QTensorConfig(MXFP8BlockScaling())}
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(dense, config=config, **options)


def test_a_layout_that_has_no_such_weights_is_refused_at_once() -> None:
    for recipe, layout in ((MXFP8BlockScaling(), "fp8"), (MAIN["mxfp4"], "modelopt")):
        with pytest.raises(ValueError, match=f"the layout {layout} has no"):
            QTensorConfig(recipe, layout=layout)
    with pytest.raises(ValueError, match="engines have no such weights"):
        QTensorConfig(Float8CurrentScaling(element="e5m2"), layout="fp8")
    with pytest.raises(ValueError, match="fused_scales='sometimes'"):
        QTensorConfig(MXFP8BlockScaling(), fused_scales="sometimes")


def test_fused_weights_are_rounded_again_where_that_is_allowed(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    model.save_pretrained(tmp_path / "dense")
    refused = load(tmp_path / "dense", QTensorConfig(NVFP4BlockScaling()))
    with pytest.raises(ValueError, match="theirs differ"):
        refused.save_pretrained(tmp_path / "refused")
    allowed = load(tmp_path / "dense", QTensorConfig(NVFP4BlockScaling(), fused_scales="requantize"))
    allowed.save_pretrained(tmp_path / "saved")
    assert import_hf(tmp_path / "saved", progress=False)


def test_a_directory_that_is_quantized_is_refused(dense: Path, tmp_path: Path) -> None:
    load(dense, QTensorConfig(MXFP8BlockScaling())).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized with CompressedTensorsConfig but you are passing a QTensorConfig"):
        load(tmp_path, QTensorConfig(MXFP8BlockScaling()))
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"] = QTensorConfig(MXFP8BlockScaling()).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="which only a model in memory has"):
        load(tmp_path)


def _save_sharded(dense: str, out: str) -> str:
    model = load(Path(dense), QTensorConfig(MXFP8BlockScaling()))
    fully_shard(model)
    with pytest.raises(ValueError, match="the model is sharded") as caught:
        model.save_pretrained(out)
    return str(caught.value)


def test_a_sharded_model_is_refused_when_it_is_saved(dense: Path, shared_tmp_path: Path) -> None:
    llama().save_pretrained(shared_tmp_path / "dense")
    told = run_ranks(2, _save_sharded, str(shared_tmp_path / "dense"), str(shared_tmp_path / "out"))
    assert all("export_hf" in one for one in told)
