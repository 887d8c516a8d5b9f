"""transformers' `from_pretrained` of directories that are quantized: the bytes of `import_hf`, and back again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.quantization_config import FineGrainedFP8Config

from dcp_adapters import export_hf, import_hf
from dcp_adapters.transformers import QTensorConfig, quantized_config
from fsdp_hooks.torch_private import local_of
from layerwise import KVCache, calibrate, rotate_inputs_
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantize_,
)
from tests.dcp_adapters.cases import bits
from tests.dcp_adapters.hf.exports import PROMPT, export, linears, llama, loaded, raw
from tests.dcp_adapters.hf.renamed_models import CONFIGS, built, logits
from tests.dcp_adapters.hf.test_client_gpt_oss import quantized_experts, tiny
from tests.ranks import run_ranks
from tests.recipes import MAIN
from tests.sampling import sampled

STATIC = ("_proj",)
LAYOUTS = [
    *(("compressed-tensors", name, ()) for name in MAIN if not name.startswith("nf4")),  # which no layout has
    ("compressed-tensors", "nvfp4", STATIC),
    *(("modelopt", name, ()) for name in ("float8_row", "mxfp8", "nvfp4")),
    ("modelopt", "float8_tensor", STATIC),
    ("modelopt", "nvfp4", STATIC),
    ("fp8", "float8_block_square", ()),
]


def load(path: Path, **options: Any) -> Any:
    """The model; transformers may report nothing as missing, unexpected or of another shape."""
    config = quantized_config(path, **{key: options.pop(key) for key in ("layout", "fused_scales") if key in options})
    model, told = AutoModelForCausalLM.from_pretrained(path, config=config, output_loading_info=True, **options)
    assert not any(told.values()), told
    return model


def assert_holds(model: nn.Module, expected: dict[str, Tensor]) -> int:
    """The parameters, bit for bit; returns how many are quantized."""
    count = 0
    for name, param in model.named_parameters():
        value: Any = param.detach()
        its: Any = expected[name].detach()
        assert (type(value), value.dtype, value.shape) == (type(its), its.dtype, its.shape), name
        if not isinstance(value, QuantizedTensor):
            assert bits(value) == bits(its), name
            continue
        count += 1
        assert value.recipe == its.recipe, name
        for part, held in value.parts().items():
            assert bits(held) == bits(its.parts()[part]), (name, part)
    return count


def assert_same_files(one: Path, other: Path) -> None:
    """The same tensors, and the same said of them to engines."""
    own, its = (load_file(path / "model.safetensors") for path in (one, other))
    assert own.keys() == its.keys()
    assert all(torch.equal(raw(own[name]), raw(its[name])) for name in own)
    told = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert told[0]["quantization_config"] == told[1]["quantization_config"]


@pytest.mark.parametrize(("layout", "name", "static"), LAYOUTS)
def test_its_weights_are_those_of_an_import_and_go_out_as_they_came(
    layout: str, name: str, static: tuple[str, ...], tmp_path: Path
) -> None:
    export(tmp_path / "in", MAIN[name], layout=layout, static=static)
    model = load(tmp_path / "in")
    assert assert_holds(model, import_hf(tmp_path / "in", progress=False)) == 14
    assert model(PROMPT).logits.isfinite().all()
    model.save_pretrained(tmp_path / "out")
    assert_same_files(tmp_path / "in", tmp_path / "out")
    again = load(tmp_path / "out")
    assert assert_holds(again, model.state_dict()) == 14


def test_without_the_plug_in_transformers_reads_what_was_saved(tmp_path: Path) -> None:
    """Through compressed-tensors, and its own FP8 in blocks: their values are those of our weights."""
    for layout, name in (("compressed-tensors", "mxfp8"), ("fp8", "float8_block_square")):
        export(tmp_path / layout, MAIN[name], layout=layout)
        model = load(tmp_path / layout)
        out = tmp_path / f"{layout}-out"
        model.save_pretrained(out)
        if layout == "fp8":
            config = FineGrainedFP8Config(dequantize=True)
            client = AutoModelForCausalLM.from_pretrained(out, quantization_config=config, dtype=torch.bfloat16)
        else:
            client = loaded(out, dequantize=True)
        held = dict(client.named_parameters())
        for own, weight in weights_of(model).items():
            assert torch.equal(held[own], weight.dequantize(torch.bfloat16)), own


def weights_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: param.detach() for name, param in model.named_parameters()}
    return {name: value for name, value in found.items() if isinstance(value, QuantizedTensor)}


@sampled(
    "name",
    sorted(CONFIGS.keys() - {"LlamaForCausalLM", "Llama4ForCausalLM"}),
    ["DeepseekV3ForCausalLM", "LlavaForConditionalGeneration", "MixtralForCausalLM"],
)
def test_names_of_files_that_differ_from_those_in_memory(name: str, tmp_path: Path) -> None:
    """Weights of experts are put together, and taken apart again, in the names of the files that they came from."""
    built(name).save_pretrained(tmp_path / "dense")
    kind: Any = type(built(name))
    model = kind.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    others = ("vision", "visual", "project", "lm_head")
    plain = [own for own in linears(model) if type(model.get_submodule(own)) is nn.Linear]
    left = [own for own in plain if any(word in own for word in others)]
    quantize_(model, Float8BlockScaling(), exclude=left)
    for own, param in list(model.named_parameters()):
        module, _, last = own.rpartition(".")
        if last in ("gate_up_proj", "down_proj"):
            weight = nn.Parameter(quantize(param.detach(), Float8BlockScaling()))
            setattr(model.get_submodule(module), last, weight)
    export_hf(model, tmp_path / "in", layout="fp8", progress=False)
    found, told = kind.from_pretrained(
        tmp_path / "in", config=quantized_config(tmp_path / "in"), output_loading_info=True
    )
    assert not any(told.values()), told
    assert assert_holds(found, model.state_dict()) >= 12
    assert torch.equal(logits(found), logits(model))
    found.save_pretrained(tmp_path / "out")
    assert_same_files(tmp_path / "in", tmp_path / "out")


def test_several_files_and_another_dtype(tmp_path: Path) -> None:
    export(tmp_path, NVFP4BlockScaling(), max_shard_size=2**15)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected: Any = import_hf(tmp_path, progress=False)
    model = load(tmp_path, dtype=torch.float16)
    for name, weight in weights_of(model).items():
        assert weight.dtype == torch.float16
        assert {part: bits(held) for part, held in weight.parts().items()} == {
            part: bits(held) for part, held in expected[name].parts().items()
        }


def test_a_directory_that_does_not_say_its_dtype(tmp_path: Path) -> None:
    """transformers takes that of some tensor, which may be one of scales."""
    model = llama()
    quantize_(model, Float8CurrentScaling())
    export_hf(model, tmp_path, progress=False)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said.pop("dtype", said.pop("torch_dtype", None)) == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = load(tmp_path)
    assert assert_holds(found, import_hf(tmp_path, progress=False)) == 15
    assert found.dtype == torch.bfloat16


def test_the_recipe_that_a_directory_records(tmp_path: Path) -> None:
    export(tmp_path / "in", MXFP8BlockScaling(scale_rounding="floor"))
    model = load(tmp_path / "in")
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert {weight.recipe for weight in weights_of(again).values()} == {MXFP8BlockScaling(scale_rounding="floor")}


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_of_the_kv_cache_go_out_again(layout: str, tmp_path: Path) -> None:
    result = calibrate(
        llama(), [PROMPT], recipe=MXFP8BlockScaling(), exclude=["lm_head"], kv_cache=KVCache(), progress=False
    )
    options: dict[str, Any] = {"rest": llama(), "config": llama().config, "layout": layout}
    export_hf(result, tmp_path / "in", progress=False, **options)
    load(tmp_path / "in").save_pretrained(tmp_path / "out")
    assert any("k_scale" in name or "output_scale" in name for name in load_file(tmp_path / "out/model.safetensors"))
    assert_same_files(tmp_path / "in", tmp_path / "out")


def test_another_layout_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    export(tmp_path / "in", Float8BlockScaling(), layout="fp8")
    load(tmp_path / "in", layout="compressed-tensors").save_pretrained(tmp_path / "out")
    told = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert told["quant_method"] == "compressed-tensors"
    assert assert_holds(load(tmp_path / "out"), import_hf(tmp_path / "in", progress=False)) == 14


def test_it_trains_and_is_saved_with_its_new_bytes(tmp_path: Path) -> None:
    export(tmp_path / "in", MXFP8BlockScaling())
    model = load(tmp_path / "in")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "out")
    before, after = (import_hf(tmp_path / name, progress=False) for name in ("in", "out"))
    for name, weight in weights_of(model).items():
        assert bits(after[name].payload) == bits(weight.payload) != bits(before[name].payload)


def test_the_model_without_a_head_and_a_dense_one(tmp_path: Path) -> None:
    """`AutoModel` has other names; a head that no file has is initialised by transformers, which says so."""
    export(tmp_path, MXFP8BlockScaling())
    model = AutoModel.from_pretrained(tmp_path, config=quantized_config(tmp_path))
    assert len(weights_of(model)) == 14
    causal = load(tmp_path)
    values = {name: held.dequantize(torch.bfloat16) for name, held in weights_of(causal).items()}
    causal.dequantize()
    assert all(torch.equal(dict(causal.named_parameters())[name], value) for name, value in values.items())


# -- where it goes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_a_device_map(device_map: Any, tmp_path: Path) -> None:
    export(tmp_path, MXFP4BlockScaling())
    model = load(tmp_path, device_map=device_map)
    assert assert_holds(model, import_hf(tmp_path, progress=False)) == 14
    assert {param.device.type for param in model.parameters()} == {"cpu"}


def test_auto_divides_memory_by_the_bytes_of_quantized_weights(tmp_path: Path) -> None:
    """Of 4.25 bits an element all fits; of 16 the last layers would go to the disk, which is refused."""
    export(tmp_path, MXFP4BlockScaling())
    model = load(tmp_path)
    size = sum(
        sum(part.nbytes for part in held.parts().values()) if isinstance(held, QuantizedTensor) else held.nbytes
        for held in (param.detach() for param in model.parameters())
    )
    assert len(weights_of(load(tmp_path, device_map="auto", max_memory={"cpu": int(1.3 * size)}))) == 14
    with pytest.raises(ValueError, match='can not be offloaded to "disk"'):
        load(tmp_path, device_map="auto", max_memory={"cpu": size // 2}, offload_folder=str(tmp_path / "disk"))


def test_weights_on_the_disk_are_refused(tmp_path: Path) -> None:
    export(tmp_path, MXFP4BlockScaling())
    with pytest.raises(ValueError, match='can not be offloaded to "disk"'):
        load(tmp_path, device_map={"model": "cpu", "lm_head": "disk"})


def _under(ways: dict[str, str], directory: str, **options: Any) -> list[str]:
    """What from_pretrained says on this rank, of a dense directory and of a quantized one, in an environment."""
    path, told = Path(directory), []
    os.environ |= ways
    try:
        dense: dict[str, Any] = {"quantization_config": QTensorConfig(MXFP8BlockScaling())}
        quantized: dict[str, Any] = {"config": quantized_config(path / "quantized")}
        for name, its in (("dense", dense), ("quantized", quantized)):
            with pytest.raises(ValueError, match="from_pretrained") as caught:
                AutoModelForCausalLM.from_pretrained(path / name, **its, **options)
            told.append(str(caught.value))
    finally:
        for name in ways:
            del os.environ[name]
    return told


def _shards_and_broadcasts(directory: str) -> list[str]:
    ram = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    sizes = ({"fsdp_size": 2}, {"tp_size": 2, "tp_plan": "auto"})
    where = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    told = [_under(ram, directory)]
    told += [_under(where, directory, distributed_config=DistributedConfig(**one)) for one in sizes]
    return [text for both in told for text in both]


def test_shards_and_broadcasts_of_transformers_are_refused_alike_on_all_ranks(shared_tmp_path: Path) -> None:
    llama().save_pretrained(shared_tmp_path / "dense")
    export(shared_tmp_path / "quantized", MXFP8BlockScaling())
    told = run_ranks(2, _shards_and_broadcasts, str(shared_tmp_path))
    assert told[0] == told[1]
    assert all("FSDP_CPU_RAM_EFFICIENT_LOADING=false" in one for one in told[0][:2])
    assert all("shards would be dense; instead" in one for one in told[0][2:])


def _trains_sharded(directory: str) -> bool:
    """Each rank reads the files, then shards: the bytes of its slices, and an export of all of them."""
    path = Path(directory)
    model = load(path / "in")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    export_hf(model, path / "out", progress=False)
    model(PROMPT, labels=PROMPT).loss.backward()
    return isinstance(local_of(model.model.layers[0].mlp.up_proj.weight), QuantizedTensor)


def test_it_is_sharded_once_it_is_loaded(shared_tmp_path: Path) -> None:
    export(shared_tmp_path / "in", MXFP8BlockScaling())
    assert run_ranks(2, _trains_sharded, str(shared_tmp_path)) == [True, True]
    assert_same_files(shared_tmp_path / "in", shared_tmp_path / "out")


def _fills_shards(directory: str, quantized: bool) -> int:
    """On the meta device each rank has the model's form; then it reads its shards alone."""
    path = Path(directory)
    its = {"config": quantized_config(path / "in")} if quantized else {}
    its |= {} if quantized else {"quantization_config": QTensorConfig(MXFP8BlockScaling())}
    model: Any = AutoModelForCausalLM.from_pretrained(path / "in", device_map="meta", **its)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # a table that no file holds
    import_hf(path / "in", model, progress=False)
    export_hf(model, path / "out", progress=False)
    return sum(isinstance(local_of(param), QuantizedTensor) for param in model.parameters())


@pytest.mark.parametrize("quantized", [True, False])
def test_on_the_meta_device_it_is_sharded_before_it_is_read(quantized: bool, shared_tmp_path: Path) -> None:
    model = llama()
    if quantized:
        export(shared_tmp_path / "in", MXFP8BlockScaling())
    else:
        model.save_pretrained(shared_tmp_path / "in")
        export(shared_tmp_path / "expected", MXFP8BlockScaling(), model=model)
    assert run_ranks(2, _fills_shards, str(shared_tmp_path), quantized) == [14, 14]
    assert_same_files(shared_tmp_path / ("in" if quantized else "expected"), shared_tmp_path / "out")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_recipe_beside_quantized_weights_is_refused(tmp_path: Path) -> None:
    """transformers does not know modelopt's method, and would take the directory for a dense one: codes for values."""
    export(tmp_path, Float8CurrentScaling(), layout="modelopt")
    with pytest.raises(ValueError, match=r"is quantized already \(modelopt\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QTensorConfig(MXFP8BlockScaling()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QTensorConfig(None))
    assert assert_holds(model, import_hf(tmp_path, progress=False)) == 14


def test_a_dense_directory_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no quantization_config"):
        quantized_config(tmp_path)
    with pytest.raises(ValueError, match="has no quantized weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QTensorConfig(None))
    with pytest.raises(ValueError, match="there is none; leave them out"):
        QTensorConfig(None, exclude=["lm_head"])


def test_codes_that_no_config_speaks_of_are_refused(tmp_path: Path) -> None:
    export(tmp_path, Float8CurrentScaling())
    said = json.loads((tmp_path / "config.json").read_text())
    del said["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"no quantization_config in config\.json says how"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QTensorConfig(MXFP8BlockScaling()))


def test_weights_that_the_model_has_no_place_for_are_refused(tmp_path: Path) -> None:
    export(tmp_path, MXFP8BlockScaling())
    config = AutoConfig.from_pretrained(tmp_path)
    its = quantized_config(tmp_path)
    its.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"model.layers.1.\S+: only the directory has it, as"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=its)
    its = quantized_config(tmp_path)
    its.intermediate_size = config.intermediate_size * 2
    with pytest.raises(ValueError, match=r"the directory has the shape \[128, 64\], the model \[256, 64\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=its)


def test_a_quantized_head_that_the_model_ties_is_refused(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, MXFP8BlockScaling())
    export_hf(model, tmp_path, progress=False)
    its = quantized_config(tmp_path)
    assert len(weights_of(AutoModelForCausalLM.from_pretrained(tmp_path, config=its))) == 15
    its.tie_word_embeddings = True
    with pytest.raises(ValueError, match=r"lm_head.weight: it is \S.*, and the model ties it to another one"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=its)


def test_experts_that_transformers_multiplies_by_their_transpose_are_refused(tmp_path: Path) -> None:
    model = tiny()
    export_hf(quantized_experts(model), tmp_path, layout="mxfp4", config=model.config, progress=False)
    with pytest.raises(ValueError, match="the directory has rows of linears"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=quantized_config(tmp_path))


def test_experts_that_transformers_does_not_read_are_refused(tmp_path: Path) -> None:
    """Of Llama 4 it reads experts as one tensor; a layout of other weights has a tensor for each."""
    model = built("Llama4ForCausalLM")
    quantize_(model, Float8CurrentScaling(), exclude=["lm_head"])
    export_hf(model, tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"experts.down_proj: transformers does not read it from"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=quantized_config(tmp_path))


def test_inputs_that_are_rotated_at_run_time_are_refused(tmp_path: Path) -> None:
    """A plain linear would multiply its inputs as they are by rotated weights."""
    model = llama()
    rotate_inputs_(model, {"model.layers.0.mlp.down_proj": 32})
    quantize_(model, MXFP8BlockScaling(), exclude=["lm_head"])
    export_hf(model, tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"rotate_inputs_\(model, \{'model.layers.0.mlp.down_proj': 32\}\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=quantized_config(tmp_path))


def test_files_that_an_import_would_not_read_are_refused(tmp_path: Path) -> None:
    """Of one name, or of an index of another name beside the usual one."""
    for name, size in (("one", 2**30), ("several", 2**15)):
        path = tmp_path / name
        export(path, Float8CurrentScaling(), layout="modelopt", max_shard_size=size)
        for file in path.glob("model*"):
            text = file.read_bytes().replace(b".safetensors", b".else.safetensors") if "index" in file.name else None
            stem, _, end = file.name.rpartition(".")
            (path / f"{stem}.else.{end}").write_bytes(file.read_bytes() if text is None else text)
        with pytest.raises(ValueError, match=r"is F8_E4M3, quantized by somebody else; such weights are read from"):
            AutoModelForCausalLM.from_pretrained(path, config=quantized_config(path), variant="else")
        # transformers does not know modelopt's method, and would take its codes for values
        config = QTensorConfig(MXFP8BlockScaling())
        with pytest.raises(ValueError, match="is F8_E4M3, quantized by somebody else"):
            AutoModelForCausalLM.from_pretrained(path, quantization_config=config, variant="else")
