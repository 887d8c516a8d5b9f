"""Models whose inputs are rotated at run time, exported: compressed-tensors is told, and other layouts are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.transform import TransformConfig, apply_transform_config
from compressed_tensors.utils import match_named_modules
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dcp_adapters import QuantizedSavePlanner, QuantizedStager, WeightStream, export_hf, import_hf
from dcp_adapters.__main__ import main
from dcp_adapters.gguf.plan import GGUF
from dcp_adapters.hf.exporting.config import ModelConfig
from dcp_adapters.hf.exporting.prepare import Asked, prepared
from layerwise import Max, calibrate, rotate_, rotate_inputs_
from qtensor import Float8BlockScaling, MXFP4BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize_
from qtensor.products.input_rotation import InputRotation, input_rotations
from tests.dcp_adapters.hf.exports import PROMPT, linears, llama
from tests.ranks import run_ranks

BLOCK = 32
DOWN = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
CONFIG = {
    "config_groups": {
        "online_32": {
            "type": "hadamard",
            "apply": [{"targets": DOWN, "location": "input", "inverse": False, "ignore": []}],
            "randomize": False,
            "requires_grad": False,
            "head_dim": 32,
            "precision": "torch.float32",
        }
    }
}


def rotated(recipe: Any = None, *, online: Any = ("*down_proj",)) -> Any:
    model: Any = llama()
    rotate_(model, {"input_ids": PROMPT, "use_cache": False}, where=(), block=BLOCK, online=online)
    if recipe is not None:
        quantize_(model, recipe, exclude=["lm_head"])
    return model


def written(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(PROMPT, use_cache=False).logits.double()
    return found


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# -- in the hands of compressed-tensors --------------------------------------------------------------------------------


def test_its_parser_takes_the_config_and_finds_the_linears(tmp_path: Path) -> None:
    export_hf(rotated(MXFP4BlockScaling()), tmp_path / "out")
    told = written(tmp_path / "out")
    assert told["transform_config"] == CONFIG
    parsed = TransformConfig.model_validate(told["transform_config"])
    assert json.loads(parsed.model_dump_json()) == CONFIG
    (scheme,) = parsed.config_groups.values()
    (args,) = scheme.apply
    assert args.is_online()
    assert [name for name, _ in match_named_modules(llama(), args.targets, args.ignore)] == DOWN
    QuantizationConfig.model_validate({key: value for key, value in told.items() if key != "transform_config"})


def test_its_hadamard_is_ours() -> None:
    """Sums of 32 products in fp32 in another order, of values of up to 4, divided by sqrt(32)."""
    linear = torch.nn.Linear(128, 8)
    apply_transform_config(linear, TransformConfig.model_validate(CONFIG | {"config_groups": {"a": _any_linear()}}))
    seen: list[Tensor] = []
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    linear(x)
    torch.testing.assert_close(seen[0], InputRotation(BLOCK).rotate(x), rtol=0, atol=32 * 4 * 2**-24)
    assert not torch.equal(seen[0], x)


def _any_linear() -> dict[str, Any]:
    return CONFIG["config_groups"]["online_32"] | {
        "apply": [{"targets": ["Linear"], "location": "input"}],
    }


def decompressed(model: Any) -> Any:
    """In fp32, with the values that its weights have in bf16."""
    for module in model.modules():
        if isinstance(getattr(module, "weight", None), QuantizedTensor):
            module.weight = torch.nn.Parameter(module.weight.dequantize(torch.bfloat16))
    return model.float()


@pytest.mark.parametrize("recipe", [MXFP4BlockScaling(), NVFP4BlockScaling()])
def test_a_loaded_model_that_is_told_to_rotate_has_our_logits(recipe: Any, tmp_path: Path) -> None:
    """transformers 5 does not look at a transform_config; what compressed-tensors makes of it is what an engine does.

    Both compute in fp32 with weights of the same values. Sums are taken in other orders: in rows of up to 128 products,
    through 2 layers with 7 linears and a head, so 15 x 128 roundings of 2**-24 are far above what may differ.
    """
    model = rotated(recipe)
    export_hf(model, tmp_path / "out")
    told, unaware = (AutoModelForCausalLM.from_pretrained(tmp_path / "out") for _ in range(2))
    apply_transform_config(told, TransformConfig.model_validate(written(tmp_path / "out")["transform_config"]))
    for loaded in (told, unaware):
        loaded(PROMPT)  # which decompresses the weights, to bf16
        torch.nn.Module.float(loaded)  # transformers refuses to do it to what was quantized
    ours = logits(decompressed(model))
    assert deviation(logits(told), ours) < 15 * 128 * 2**-24
    # Should transformers rotate by itself one day, docs/rotations.md says less of it.
    assert deviation(logits(unaware), ours) > 0.05


# -- every source ------------------------------------------------------------------------------------------------------


def saved(model: Any, path: Path, **options: Any) -> Path:
    dcp.save(
        {"model": model.state_dict(), "step": 3},
        checkpoint_id=path,
        planner=QuantizedSavePlanner(**options),
        no_dist=True,
    )
    return path


def test_every_source_tells_of_it(tmp_path: Path) -> None:
    model = rotated(MXFP4BlockScaling())
    config = model.config
    converted, path = tmp_path / "converted", saved(model, tmp_path / "checkpoint")
    assert main(["convert", str(path), str(converted), "--to", "nvfp4", "--include", "*o_proj*"]) == 0
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dcp.save(rotated().state_dict(), checkpoint_id=tmp_path / "stock", no_dist=True)
    (dense, quantized) = tmp_path / "stock", tmp_path / "of stock"
    assert main(["convert", str(dense), str(quantized), "--to", "mxfp4", "--include", "*_proj.weight"]) == 0
    sources = {
        "module": model,
        "state dict": model.state_dict(),
        "nested": {"model": get_model_state_dict(model), "step": 3},
        "compiled": torch.compile(copy.deepcopy(model)).state_dict(),
        "whole": whole,
        "copied": {name: value.clone() for name, value in model.state_dict().items()},
        "of stock": quantized,
        "staged": QuantizedStager().stage({"model": model.state_dict()}),
        "checkpoint": path,
        "with digests": saved(model, tmp_path / "digests", digest=True),
        "converted": converted,
    }
    for name, source in sources.items():
        out = tmp_path / f"out of {name}"
        export_hf(source, out, config=config)
        assert written(out)["transform_config"] == CONFIG, name
        assert not [key for key in load_file(out / "model.safetensors") if "rotation" in key], name


def test_the_result_of_a_calibration_tells_of_it(tmp_path: Path) -> None:
    model = rotated(online={"*.0.mlp.down_proj": 32, "*.1.mlp.down_proj": 64})
    model.save_pretrained(tmp_path / "original")
    batches = [{"input_ids": PROMPT, "use_cache": False}]
    result = calibrate(
        model, batches, recipe=NVFP4BlockScaling(), algorithm=Max(), exclude=["lm_head", "*.1.mlp.*"], progress=False
    )
    said = {name: tuple(value.shape) for name, value in result.state_dict().items() if "rotation" in name}
    assert said == {f"{DOWN[0]}.input_rotation": (32,), f"{DOWN[1]}.input_rotation": (64,)}
    dcp.save(result.state_dict(), checkpoint_id=tmp_path / "saved", planner=QuantizedSavePlanner(), no_dist=True)
    for name, source in {"result": result, "checkpoint": tmp_path / "saved"}.items():
        export_hf(source, tmp_path / name, rest=tmp_path / "original", config=tmp_path / "original")
        groups = written(tmp_path / name)["transform_config"]["config_groups"]
        assert {key: (one["head_dim"], one["apply"][0]["targets"]) for key, one in groups.items()} == {
            "online_32": (32, DOWN[:1]),
            "online_64": (64, DOWN[1:]),  # a linear that stays dense, too
        }


def test_without_rotations_nothing_is_said(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, MXFP4BlockScaling(), exclude=["lm_head"])
    export_hf(model, tmp_path / "out")
    assert "transform_config" not in written(tmp_path / "out")


def of_shards(path: Path) -> None:
    model = rotated(MXFP4BlockScaling())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for module in DOWN:  # values say nothing, so ranks may differ in them
        model.get_submodule(module).input_rotation.fill_(dist.get_rank())
    export_hf(model, path / "live")
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "saved", planner=QuantizedSavePlanner())


def test_shards_tell_of_it(tmp_path: Path) -> None:
    run_ranks(2, of_shards, tmp_path)
    export_hf(tmp_path / "saved", tmp_path / "stored", config=llama().config)
    assert written(tmp_path / "live")["transform_config"] == written(tmp_path / "stored")["transform_config"] == CONFIG


def test_a_stream_tells_of_it() -> None:
    stream = WeightStream(rotated(MXFP4BlockScaling()))
    assert stream.json["config.json"]["quantization_config"]["transform_config"] == CONFIG


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "recipe"), [("modelopt", NVFP4BlockScaling()), ("fp8", Float8BlockScaling())])
def test_layouts_that_cannot_say_it_are_refused(layout: str, recipe: Any, tmp_path: Path) -> None:
    model = rotated(recipe)
    message = (
        f"^{DOWN[0]}, {DOWN[1]}: the inputs are rotated at run time, which the layout {layout} cannot say, so engines "
        'would compute something else; use layout="compressed-tensors"$'
    )
    with pytest.raises(ValueError, match=message):
        export_hf(model, tmp_path / "out", layout=layout)
    with pytest.raises(ValueError, match=message):
        export_hf(saved(model, tmp_path / "saved"), tmp_path / "out", layout=layout, config=model.config)
    with pytest.raises(ValueError, match=message):
        WeightStream(model, layout=layout)
    assert not (tmp_path / "out").exists()


def test_gguf_is_refused() -> None:
    asked = Asked(
        caller="export_gguf",
        given=rotated(MXFP4BlockScaling()),
        layout=GGUF,
        described=ModelConfig({}),
        max_shard_size=2**30,
    )
    with pytest.raises(ValueError, match=r"the inputs are rotated at run time, which the layout gguf cannot say"):
        prepared(asked)


def test_dense_directories_fit_models_that_rotate_alike(tmp_path: Path) -> None:
    """`save_pretrained` writes the buffers, too."""
    rotated().save_pretrained(tmp_path)
    other: Any = llama()
    with pytest.raises(ValueError, match=f"{DOWN[0]}.input_rotation: only the directory has it"):
        import_hf(tmp_path, other)
    rotate_inputs_(other, {"*down_proj": BLOCK})
    import_hf(tmp_path, other)
    assert torch.equal(logits(other), logits(rotated()))
    llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=f"{DOWN[0]}.input_rotation: only the model has it"):
        import_hf(tmp_path / "plain", other)


def test_the_rest_must_not_say_otherwise(tmp_path: Path) -> None:
    model = rotated(MXFP4BlockScaling())
    config = model.config
    rotated().save_pretrained(tmp_path / "rotated")
    llama().save_pretrained(tmp_path / "plain")
    state = model.state_dict()
    without = {name: value for name, value in state.items() if "rotation" not in name}
    name = f"{DOWN[0]}.weight"
    message = f"^{name} is taken from one source, where it is for {{}}, and another says by {DOWN[0]}.input_rotation"
    with pytest.raises(ValueError, match=message.format("inputs as they are")):
        export_hf(without, tmp_path / "out", rest=tmp_path / "rotated", config=config)
    markers = {name: value for name, value in state.items() if not name.endswith("down_proj.weight")}
    with pytest.raises(ValueError, match=message.format("inputs as they are")):
        export_hf(markers, tmp_path / "out", rest=tmp_path / "plain", config=config)
    markers |= {f"{module}.input_rotation": torch.zeros(64, dtype=torch.uint8) for module in DOWN}
    with pytest.raises(ValueError, match=message.format("inputs that are rotated at run time in blocks of 32")):
        export_hf(markers, tmp_path / "out", rest=tmp_path / "rotated", config=config)
    with pytest.raises(ValueError, match=f"^{DOWN[0]}.input_rotation says that inputs of a linear are rotated at run"):
        export_hf(markers, tmp_path / "out")
    export_hf(state, tmp_path / "told", rest=tmp_path / "plain", config=config)
    dense = {name: value for name, value in state.items() if "down_proj" not in name}
    export_hf(dense, tmp_path / "by rest", rest=tmp_path / "rotated", config=config)
    assert written(tmp_path / "told")["transform_config"] == written(tmp_path / "by rest")["transform_config"] == CONFIG


def test_fused_linears_are_rotated_alike(tmp_path: Path) -> None:
    model = rotated(MXFP4BlockScaling(), online=["*up_proj"])
    message = (
        "the inputs of these are rotated at run time in blocks of model.layers.0.mlp.gate_proj: not at all, "
        "model.layers.0.mlp.up_proj: 32; engines run them as one linear with one input: rotate those of all alike"
    )
    with pytest.raises(ValueError, match=f"^{message}"):
        export_hf(model, tmp_path / "out")
    model = rotated(MXFP4BlockScaling(), online=["*up_proj", "*gate_proj"])
    export_hf(model, tmp_path / "out")
    (group,) = written(tmp_path / "out")["transform_config"]["config_groups"].values()
    assert group["apply"][0]["targets"] == [name for name in linears(model) if name.endswith(("gate_proj", "up_proj"))]
    assert input_rotations(model).keys() == {*group["apply"][0]["targets"]}
