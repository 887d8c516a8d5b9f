"""Wrapped and adapted models leave memory under the names of the plain one, and adapters are never lost silently."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from dcp_adapters import (
    AtomicFileSystemWriter,
    HeldVersion,
    QuantizedSavePlanner,
    WeightStream,
    apply_deltas,
    digest,
    export_hf,
    fused_linears,
    import_hf,
)
from dcp_adapters.cli.main import main
from layerwise import KVCache, Max, calibrate, rotate_, search_formats
from qtensor import (
    LowRankUpdate,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    merge_,
    quantize_,
    share_scales,
)
from tests.ranks import run_ranks
from tests.wrapped import adapted, llama

RECIPE = MXFP8BlockScaling()
LORA: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 4}
TOKENS = (torch.arange(32) % 64).view(2, 16)


def quantized() -> Any:
    model = llama()
    quantize_(model, RECIPE, exclude=["lm_head"])
    return model


def in_layers(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = wrap(layer)
    return model


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def streamed(stream: WeightStream) -> dict[str, Tensor]:
    return {name: tensor for bucket in stream for name, tensor in bucket.items()}


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "compiled": torch.compile,
    "checkpointed": lambda model: in_layers(model, checkpoint_wrapper),
    "compiled and checkpointed": lambda model: in_layers(model, lambda one: torch.compile(checkpoint_wrapper(one))),
    "average": AveragedModel,
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_change_no_byte_of_an_export_a_stream_or_a_digest(kind: str, tmp_path: Path) -> None:
    plain, model = quantized(), WRAPPERS[kind](quantized())
    llama().save_pretrained(tmp_path / "dense")
    export_hf(plain, tmp_path / "plain")
    export_hf(model, tmp_path / "wrapped")
    assert files(tmp_path / "plain") == files(tmp_path / "wrapped")
    export_hf(model, tmp_path / "beside", config=tmp_path / "dense", rest=tmp_path / "dense")
    assert (
        load_file(tmp_path / "beside" / "model.safetensors").keys()
        == load_file(tmp_path / "plain" / "model.safetensors").keys()
    )
    assert digest(model) == digest(plain) == digest(tmp_path / "plain", like=model)
    assert_same(streamed(WeightStream(model)), streamed(WeightStream(plain)))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", ["checkpointed", "compiled and checkpointed"])
def test_a_calibration_has_plain_names_and_no_dense_twins(kind: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "dense")
    options: dict[str, Any] = {"recipe": RECIPE, "algorithm": Max(), "kv_cache": KVCache(), "progress": False}
    options |= {"include": ["model.layers.*"], "exclude": ["model.layers.0.mlp.*"]}
    plain = calibrate(llama(), [{"input_ids": TOKENS}], **options)
    wrapped = calibrate(WRAPPERS[kind](llama()), [{"input_ids": TOKENS}], **options)
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert [record.name for record in plain.report.records] == [record.name for record in wrapped.report.records]
    for name, result in (("plain", plain), ("wrapped", wrapped)):
        export_hf(result, tmp_path / name, config=tmp_path / "dense", rest=tmp_path / "dense")
    assert files(tmp_path / "plain") == files(tmp_path / "wrapped")


def test_a_calibration_goes_on_whatever_has_been_wrapped_meanwhile(tmp_path: Path) -> None:
    """Its checkpoints have plain names."""
    options: dict[str, Any] = {"recipe": RECIPE, "checkpoint_dir": tmp_path, "progress": False}
    data = [{"input_ids": TOKENS}]
    calibrate(llama(), data, **options)
    again = calibrate(WRAPPERS["checkpointed"](llama()), data, **options)
    assert list(again.report.resumed) == [0, 1, 2]


def test_rotations_have_plain_names() -> None:
    plain = rotate_(llama().float(), {"input_ids": TOKENS}, where=("values",), block=32, online=["*down_proj"])
    model = in_layers(llama().float(), checkpoint_wrapper)
    found = rotate_(model, {"input_ids": TOKENS}, where=("values",), block=32, online=["*down_proj"])
    assert plain.changed == found.changed
    assert plain.online == found.online
    result = calibrate(model, [{"input_ids": TOKENS}], recipe=RECIPE, progress=False)
    assert not any("_checkpoint_wrapped_module" in name for name in result.state_dict())
    assert sum(name.endswith("input_rotation") for name in result.state_dict()) == 2


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_adapters(**options: Any) -> Any:
    return adapted(peft.LoraConfig(**LORA, **options), quantized())


ADAPTED: dict[str, Callable[[], Any]] = {
    "lora": with_adapters,
    "dora": lambda: adapted(peft.LoraConfig(**LORA, use_dora=True)),
    "ia3": lambda: adapted(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "modules to save": lambda: with_adapters(modules_to_save=["lm_head"]),
    "prompt": lambda: adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), quantized()),
    "compiled": lambda: torch.compile(with_adapters()),
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_that_are_not_merged_are_refused_and_the_base_is_exported_where_it_is_asked_for(
    kind: str, tmp_path: Path
) -> None:
    model = ADAPTED[kind]()
    for run in (lambda: export_hf(model, tmp_path / "out"), lambda: WeightStream(model)):
        with pytest.raises(ValueError, match=r"an adapter of peft is not merged .* lost; merge .* adapters=\"base\""):
            run()
    assert not (tmp_path / "out").exists()
    plain = llama() if kind in ("dora", "ia3") else quantized()
    if kind in ("dora", "ia3"):
        recipe = {"recipe": RECIPE, "exclude": ["lm_head"]}
        found, expected = streamed(WeightStream(model, adapters="base", **recipe)), WeightStream(plain, **recipe)
        assert_same(found, streamed(expected))
        return
    export_hf(plain, tmp_path / "plain")
    export_hf(model, tmp_path / "base", adapters="base")
    assert files(tmp_path / "plain") == files(tmp_path / "base")
    if kind == "prompt":
        return  # whose state dict has nothing that tells of peft beside the step into the base
    state = model.state_dict()
    with pytest.raises(ValueError, match="names are those of adapters of peft and of what they adapt, and whether"):
        export_hf(state, tmp_path / "out", config=model.config)
    if kind != "compiled":
        export_hf(state, tmp_path / "of a state dict", config=plain.config, adapters="base")
        state_files, plain_files = files(tmp_path / "of a state dict"), files(tmp_path / "plain")
        assert state_files["model.safetensors"] == plain_files["model.safetensors"]


def test_merged_adapters_are_exported_and_are_not_the_base(tmp_path: Path) -> None:
    model = adapted(peft.LoraConfig(**LORA))
    model.merge_adapter()
    merged = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.detach().clone()
    found = streamed(WeightStream(model, recipe=RECIPE, include=["*down_proj"]))
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], merged)
    assert not torch.equal(merged, llama().model.layers[0].self_attn.q_proj.weight)
    with pytest.raises(ValueError, match='an adapter is merged into it, and adapters="base" asks for the model with'):
        WeightStream(model, adapters="base")
    with pytest.raises(ValueError, match="adapters='none' is not one of"):
        WeightStream(model, adapters="none")


def test_calibrating_under_adapters_warns_and_leaves_them_alone() -> None:
    with pytest.warns(UserWarning, match=r"q_proj.*: adapters of peft are not merged into these, so the result holds"):
        result = calibrate(
            adapted(peft.LoraConfig(**LORA)),
            [{"input_ids": TOKENS}],
            recipe=RECIPE,
            exclude=["lm_head"],
            progress=False,
        )
    assert list(result.state_dict()) == [name for name, param in quantized().named_parameters() if is_quantized(param)]


def is_quantized(param: Tensor) -> bool:
    return hasattr(param, "recipe")


def test_linears_under_adapters_are_found_quantized_shared_and_merged_into() -> None:
    model = adapted(peft.LoraConfig(target_modules=["q_proj"], r=4))
    inside = "base_model.model.model.layers.0.self_attn"
    assert fused_linears(model)[0] == [f"{inside}.q_proj.base_layer", f"{inside}.k_proj", f"{inside}.v_proj"]
    names = quantize_(model, NVFP4BlockScaling(), include=["model.layers.0.*"])
    assert names == quantize_(llama(), NVFP4BlockScaling(), include=["model.layers.0.*"])
    assert not any(is_quantized(param) for name, param in model.named_parameters() if "lora" in name)
    assert len(share_scales(model, fused_linears(model))) == 2
    own = "model.layers.0.self_attn"
    assert share_scales(model, [[f"{own}.{name}_proj" for name in "qkv"]]) == [
        tuple(f"{own}.{name}_proj.weight" for name in "qkv")
    ]
    update = LowRankUpdate(a=torch.randn(4, 64), b=torch.randn(64, 4))
    (line,) = merge_(model, {f"{own}.q_proj.weight": update}).weights
    assert line.survived > 0.5


def test_a_directory_is_imported_below_adapters_and_wrappers(tmp_path: Path) -> None:
    export_hf(quantized(), tmp_path / "out")
    model = adapted(peft.LoraConfig(**LORA), in_layers(quantized(), checkpoint_wrapper))
    with torch.no_grad():
        model.base_model.model.lm_head.weight.zero_()
    held = {name: param.detach().clone() for name, param in model.named_parameters() if "lora" in name}
    state = import_hf(tmp_path / "out", model)
    assert sorted(state) == sorted(llama().state_dict())
    assert torch.equal(model.base_model.model.lm_head.weight, llama().lm_head.weight)
    for name, value in held.items():
        assert torch.equal(model.get_parameter(name), value)


# -- names alone -------------------------------------------------------------------------------------------------------


def test_names_that_may_be_a_wrappers_are_matched_or_refused(tmp_path: Path) -> None:
    plain = quantized()
    llama().save_pretrained(tmp_path / "dense")
    export_hf(plain, tmp_path / "plain", config=tmp_path / "dense")
    state = {f"module.{name}": value for name, value in plain.state_dict().items()}
    with pytest.raises(ValueError, match=r"all names begin with 'module\.', as those of a wrapped model do, and not"):
        export_hf(state, tmp_path / "out")
    for outer in ("module.", "base_model.model.", "policy.lm.", "_orig_mod.module."):
        state = {f"{outer}{name}": value for name, value in plain.state_dict().items()}
        export_hf(state, tmp_path / outer, config=tmp_path / "dense")
        assert files(tmp_path / outer) == files(tmp_path / "plain")
    holder = nn.ModuleDict({"lm": plain})
    export_hf(holder, tmp_path / "holder", config=tmp_path / "dense")
    assert files(tmp_path / "holder") == files(tmp_path / "plain")
    state = {f"module.{name}": value for name, value in plain.state_dict().items()}
    export_hf(state, tmp_path / "kept", prefix="")
    assert "module.lm_head.weight" in load_file(tmp_path / "kept" / "model.safetensors")
    twice = {"a.weight": torch.ones(2), "_orig_mod.a.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"a\.weight and _orig_mod\.a\.weight have the same name without wrappers"):
        digest(twice)


def test_a_delta_finds_the_tensors_of_a_compiled_model() -> None:
    plain, compiled = quantized(), torch.compile(quantized())
    base = HeldVersion(plain.state_dict())
    with torch.no_grad():
        plain.lm_head.weight.mul_(2)
    delta = base.since(plain.state_dict(), 1)
    assert delta is not None
    assert apply_deltas(compiled.state_dict(), [delta]) == 1
    assert digest(compiled) == digest(plain)


def test_a_search_has_plain_names() -> None:
    found, data, recipes = [], [{"input_ids": TOKENS}], [NVFP4BlockScaling(), RECIPE]
    for model in (llama(), in_layers(llama(), checkpoint_wrapper)):
        assignment = search_formats(
            model, data, recipes=recipes, bits_per_weight=6.0, exclude=["lm_head"], progress=False
        )
        found.append(assignment.recipes)
    assert found[0] == found[1]


def test_a_checkpoint_of_adapters_is_refused_by_the_command_or_its_base_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama().save_pretrained(tmp_path / "dense")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(
            with_adapters().state_dict(),
            storage_writer=AtomicFileSystemWriter(tmp_path / "saved"),
            planner=QuantizedSavePlanner(),
            no_dist=True,
        )
    arguments = ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--config", str(tmp_path / "dense")]
    assert main(arguments) == 2
    assert "names are those of adapters of peft" in capsys.readouterr().err
    assert main([*arguments, "--adapters", "base"]) == 0
    export_hf(quantized(), tmp_path / "plain", config=tmp_path / "dense")
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain")))


def of_ddp(directory: Path) -> None:
    model = DistributedDataParallel(in_layers(quantized(), checkpoint_wrapper))
    export_hf(model, directory / "ddp", progress=False)
    assert digest(model) == digest(quantized())
    assert fused_linears(model)[0][0].startswith("module.model.layers.0._checkpoint_wrapped_module")
    rank = torch.distributed.get_rank()
    data = [{"input_ids": TOKENS}] * (1 + rank)  # ranks may have different numbers of batches
    result = calibrate(DistributedDataParallel(llama()), data, recipe=RECIPE, exclude=["lm_head"], progress=False)
    names = [name for name, param in quantized().named_parameters() if is_quantized(param)]
    assert list(result.state_dict()) == names
    sharded = in_layers(llama(), checkpoint_wrapper)
    for layer in sharded.model.layers:  # the wrappers, as trainers do
        fully_shard(layer)
    fully_shard(sharded)
    found = calibrate(sharded, data, recipe=RECIPE, exclude=["lm_head"], progress=False).state_dict()
    assert list(found) == names
    assert digest(found) == digest(result)


def test_ddp(shared_tmp_path: Path) -> None:
    run_ranks(2, of_ddp, shared_tmp_path)
    export_hf(quantized(), shared_tmp_path / "plain")
    assert files(shared_tmp_path / "ddp") == files(shared_tmp_path / "plain")
