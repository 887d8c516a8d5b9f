"""Exports of live models, sharded ones and checkpoints: the same files, whatever number of ranks wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_adapters import WeightStream, digest, export_hf, import_hf
from dcp_adapters.cli.main import main
from dcp_adapters.hf.exporting import making, writing
from dcp_adapters.hf.exporting.config import shard_size
from fsdp_hooks import sync_scales
from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantize_,
)
from qtensor.tensor.quantized_tensor import QuantizedTensor
from tests.dcp_adapters.cases import alone, save, values
from tests.ranks import agreed, run_ranks

NVFP4 = NVFP4BlockScaling()
MXFP8 = MXFP8BlockScaling()
CONFIG = {"model_type": "tiny", "hidden_size": 64, "tie_word_embeddings": False}


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.o_proj = nn.Linear(64, 72, bias=True, dtype=torch.bfloat16)  # 72 rows: uneven on 2 ranks of 3
        self.down_proj = nn.Linear(64, 33, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(64, dtype=torch.bfloat16)
        with torch.no_grad():
            for offset, param in enumerate(self.parameters()):
                param.copy_(values(tuple(param.shape), seed + offset))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 64, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Block(10 * number) for number in range(2))
        self.lm_head = nn.Linear(64, 40, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(values((40, 64), 3))
            self.lm_head.weight.copy_(values((40, 64), 4))


RECIPES: dict[str, tuple[Any, ...]] = {
    "nvfp4": (NVFP4, NVFP4),
    "mxfp8": (MXFP8, MXFP8),
    "float8": (Float8CurrentScaling(), Float8CurrentScaling(granularity="tensor")),
    "mixed": (NVFP4, Float8CurrentScaling()),
}


def model_of(name: str) -> Model:
    model = Model()
    for recipe, pattern in zip(RECIPES[name], ("*.o_proj", "*.down_proj"), strict=True):
        quantize_(model, recipe, include=[pattern])
    return model


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def same_bytes(a: Tensor, b: Tensor) -> bool:
    one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(one, other)


def common(tmp_path: Path) -> Path:
    """A directory that all ranks have, under torchrun too."""
    return Path(agreed(value=str(tmp_path)))


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- the same files from everywhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_the_bytes_of_the_weights_are_in_the_files(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    assert export_hf(model, tmp_path / "out", config=CONFIG) == tmp_path / "out"
    found = tensors_of(tmp_path / "out")
    for fqn, param in model.named_parameters():
        if not isinstance(param, QuantizedTensor):
            assert torch.equal(found.pop(fqn), param)
            continue
        module = fqn.removesuffix(".weight")
        packed = f"{module}.weight_packed" if param.recipe == NVFP4 else f"{module}.weight"
        assert same_bytes(found.pop(packed), param.payload)
        assert same_bytes(found.pop(f"{module}.weight_scale").reshape(param.scale.shape), param.scale)
        if param.recipe == NVFP4:
            assert torch.equal(torch.reciprocal(found.pop(f"{module}.weight_global_scale")[0]), param.global_scale)
    assert found == {}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["embed_tokens", "lm_head"]
    assert config == {**CONFIG, "dtype": "bfloat16"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    (tmp_path / "mine").touch()
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {(tmp_path / "mine").stat().st_mode}


def exported(path: str, name: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    model = sharded(model_of(name), mesh)
    export_hf(model, path, config=CONFIG, max_shard_size=5000)
    again = f"{path}-nested"
    state = {"model": model.state_dict(), "step": torch.tensor(3)}
    export_hf(state, again, config=CONFIG, max_shard_size=5000, layout="compressed-tensors")


@pytest.mark.parametrize(("name", "mesh"), [("nvfp4", (2,)), ("mixed", (3,)), ("float8", (2, 2)), ("mxfp8", (4,))])
def test_shards_are_exported_as_one_process_exports(name: str, mesh: tuple[int, ...], tmp_path: Path) -> None:
    ranks = torch.Size(mesh).numel()
    there = common(tmp_path)
    run_ranks(ranks, exported, str(there / "ranks"), name, mesh)
    with alone():
        export_hf(model_of(name), tmp_path / "one", config=CONFIG, max_shard_size=5000)
    expected = contents(tmp_path / "one")
    assert len([file for file in expected if file.endswith(".safetensors")]) > 3
    assert contents(there / "ranks") == expected
    assert contents(there / "ranks-nested") == expected


def columns_and_strides(path: str) -> None:
    """Weights cut along columns (as tensor parallelism cuts them), twice, and replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {}
    for number, (recipe, placements) in enumerate(PLACED):
        q = quantize(values((32, 128), number), recipe)
        parts = {
            part: distribute_tensor(tensor.clone(), mesh, placements if tensor.ndim else [Replicate()] * 2).to_local()
            for part, tensor in q.parts().items()
            if tensor.dtype != torch.float8_e4m3fn
        }
        for part, tensor in q.parts().items():
            if tensor.dtype == torch.float8_e4m3fn:
                as_bytes = distribute_tensor(tensor.view(torch.uint8).clone(), mesh, placements)
                parts[part] = as_bytes.to_local().view(torch.float8_e4m3fn)
        local = QuantizedTensor.from_parts(parts, recipe, torch.bfloat16)
        state[f"{number}.weight"] = DTensor.from_local(local, mesh, placements, run_check=False)
    export_hf(state, path, max_shard_size=6000)


PLACED = [
    (MXFP8, [Shard(0), Shard(1)]),
    (NVFP4, [Replicate(), Shard(1)]),
    (NVFP4, [Shard(0), Shard(0)]),
    (MXFP8, [Replicate(), Replicate()]),
]


def test_lazy_negatives_are_exported_streamed_and_digested_as_their_values(tmp_path: Path) -> None:
    bias, norm = torch.arange(32.0), torch.arange(64.0).reshape(8, 8)
    state = {"a.weight": quantize(values((32, 64), 0), MXFP8BlockScaling()), "a.bias": bias, "b.weight": norm}
    behind = state | {"a.bias": torch._neg_view(-bias), "b.weight": torch._neg_view(-norm.t()).t()}  # type: ignore[attr-defined]
    export_hf(behind, tmp_path / "hf")
    streamed = {name: tensor for bucket in WeightStream(behind) for name, tensor in bucket.items()}
    for found in (load_file(tmp_path / "hf" / "model.safetensors"), streamed):
        assert torch.equal(found["a.bias"], bias)
        assert torch.equal(found["b.weight"], norm)
    assert digest(behind) == digest(state)


def test_columns_and_replicas_are_exported_whole(tmp_path: Path) -> None:
    there = common(tmp_path)
    run_ranks(4, columns_and_strides, str(there / "ranks"))
    state = {
        f"{number}.weight": quantize(values((32, 128), number), recipe) for number, (recipe, _) in enumerate(PLACED)
    }
    with alone():
        export_hf(state, tmp_path / "one", max_shard_size=6000)
    assert contents(there / "ranks") == contents(tmp_path / "one")


def from_checkpoint(source: str, path: str) -> None:
    export_hf(source, path, config=CONFIG, max_shard_size=5000)


def test_a_checkpoint_is_exported_without_a_model_by_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("mixed")
    state = {"model": model.state_dict(), "optim": {"lr": 0.1, "m": values((64,), 1)}}
    save(state, tmp_path / "ckpt")
    with alone():
        export_hf(model, tmp_path / "live", config=CONFIG, max_shard_size=5000)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ("--config", str(tmp_path / "config.json"), "--max-shard-size", "5KB")
    status = main(["export", str(tmp_path / "ckpt"), str(tmp_path / "cli"), *options])
    assert status == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'cli'}: ")
    there = common(tmp_path)
    run_ranks(2, from_checkpoint, str(there / "ckpt"), str(there / "ranks"))
    expected = contents(tmp_path / "live")
    for other in (tmp_path / "cli", there / "ranks"):
        assert tensors_equal(other, tmp_path / "live")
        assert contents(other)["config.json"] == expected["config.json"]


def tensors_equal(a: Path, b: Path) -> bool:
    one, other = tensors_of(a), tensors_of(b)
    return one.keys() == other.keys() and all(same_bytes(one[name], other[name]) for name in one)


# -- what goes with the weights ------------------------------------------------------------------------------------


def test_the_model_s_files_go_along_and_its_weights_do_not(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    old = {**CONFIG, "dtype": "float16", "quantization_config": {"quant_method": "gptq"}}
    (home / "config.json").write_text(json.dumps(old))
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt", "LICENSE"):
        (home / name).write_text(name)
    for name in ("pytorch_model.bin", "README.md", "w.gguf", ".metadata", "__0_0.distcp"):
        (home / name).write_text(name)
    (home / "hf_quant_config.json").write_text("{}")
    (home / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model.safetensors"}}')
    export_hf(model_of("mxfp8"), tmp_path / "out", config=home, layout="modelopt")
    found = {path.name for path in (tmp_path / "out").iterdir()}
    kept = {"tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt", "LICENSE"}
    assert found == kept | {"config.json", "hf_quant_config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_text() == name for name in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["quantization_config"]["quant_method"]) == ("float16", "modelopt")


def test_a_config_may_be_that_of_a_quantized_directory(tmp_path: Path) -> None:
    """As after import_hf: the names of its tensors are those of a layout, not the model's."""
    export_hf(model_of("nvfp4"), tmp_path / "first", config=CONFIG)
    state = import_hf(tmp_path / "first")
    export_hf(state, tmp_path / "again", config=tmp_path / "first")
    assert tensors_equal(tmp_path / "again", tmp_path / "first")
    del state["layers.1.o_proj.weight"]
    with pytest.raises(ValueError, match=re.escape("the source lacks 1 tensors of the model (layers.1.o_proj.weight")):
        export_hf(state, tmp_path / "third", config=tmp_path / "first")


@pytest.mark.parametrize("said", ["config.json", "hf_quant_config.json", "dtypes"])
def test_codes_are_not_taken_for_the_dense_rest(said: str, tmp_path: Path) -> None:
    model = model_of("nvfp4")
    export_hf(model, tmp_path / "codes", layout="modelopt" if said == "hf_quant_config.json" else "compressed-tensors")
    if said != "config.json":
        (tmp_path / "codes" / "config.json").unlink()
    with pytest.raises(ValueError, match="codes holds quantized weights; rest= takes a directory of dense ones"):
        export_hf(model, tmp_path / "out", rest=tmp_path / "codes")


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("other.weight", torch.ones(4, 4).to(torch.float8_e4m3fn)),
        ("other.bias", torch.ones(4).to(torch.float8_e5m2)),
        ("other.weight", torch.ones(4, 4, dtype=torch.uint8)),
        ("other.qweight", torch.ones(4, 4, dtype=torch.int32)),
        ("other.down_proj_blocks", torch.ones(2, 4, 4, dtype=torch.uint8)),
    ],
)
def test_foreign_codes_are_not_taken_for_dense_tensors(name: str, codes: torch.Tensor, tmp_path: Path) -> None:
    model, given = model_of("nvfp4"), f"{name} ({str(codes.dtype).removeprefix('torch.')}): codes of a quantization"
    with pytest.raises(ValueError, match=re.escape(given)):
        export_hf({**model.state_dict(), name: codes}, tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(given)):
        export_hf(model, tmp_path / "out", rest={name: codes})
    (tmp_path / "rest").mkdir()
    save_file({name: codes}, tmp_path / "rest" / "model.safetensors")
    with pytest.raises(ValueError, match=r"rest: quantized in ways|rest holds quantized weights"):
        export_hf(model, tmp_path / "out", rest=tmp_path / "rest")
    counts = {"table": torch.ones(3, 3, dtype=torch.int32), "mask": torch.ones(3, 3, dtype=torch.bool)}
    export_hf({**model.state_dict(), **counts}, tmp_path / "out")


def test_what_the_source_lacks_comes_from_the_rest(tmp_path: Path) -> None:
    model = model_of("nvfp4")
    dense = {name: value for name, value in model.state_dict().items() if not isinstance(value, QuantizedTensor)}
    part = {name: value for name, value in model.state_dict().items() if isinstance(value, QuantizedTensor)}
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(CONFIG))
    everything = {**dense, **{name: value.dequantize() for name, value in part.items()}}
    save_file({name: value.contiguous() for name, value in everything.items()}, home / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape("the source lacks 8 tensors of the model (embed_tokens.weight, ")):
        export_hf(part, tmp_path / "out", config=home)
    assert not (tmp_path / "out").exists()
    export_hf(model, tmp_path / "whole", config=CONFIG)
    for number, rest in enumerate((home, str(home), dense, model)):
        export_hf(part, tmp_path / str(number), config=home, rest=rest)
        assert tensors_equal(tmp_path / str(number), tmp_path / "whole")
    assert main(["export", str(checkpoint_of(part, tmp_path)), str(tmp_path / "cli"), "--rest", str(home)]) == 0
    assert tensors_equal(tmp_path / "cli", tmp_path / "whole")
    del dense["embed_tokens.weight"]
    with pytest.raises(
        ValueError, match=r"^the source and rest= lack 1 tensors of the model \(embed_tokens\.weight\);"
    ):
        export_hf(part, tmp_path / "less", config=home, rest=dense)


def test_the_rest_may_be_what_a_training_run_saved(tmp_path: Path) -> None:
    model, dense = model_of("nvfp4"), Model().state_dict()
    part = {name: value for name, value in model.state_dict().items() if isinstance(value, QuantizedTensor)}
    export_hf(model, tmp_path / "whole", config=CONFIG)
    run = {"model": dense, "optim": {"state": {"lm_head.weight": values((40, 64), 9)}, "lr": 0.1}}
    save(run, tmp_path / "run")
    for number, rest in enumerate((run, tmp_path / "run")):
        export_hf(part, tmp_path / str(number), config=CONFIG, rest=rest)
        assert tensors_equal(tmp_path / str(number), tmp_path / "whole")
    with pytest.raises(
        ValueError, match=re.escape("are under model and ema; give what holds the model's weights alone")
    ):
        export_hf(part, tmp_path / "out", config=CONFIG, rest={"model": dense, "ema": dense})


def test_entries_of_bytes_beside_dense_weights_ask_for_the_prefix(tmp_path: Path) -> None:
    save({"model": Model().state_dict(), "optim": {"lr": 0.1}}, tmp_path / "run")
    said = "optim.lr is an entry of bytes; an export holds tensors only: say by prefix=... (--prefix) under which name"
    with pytest.raises(ValueError, match=re.escape(said) + ' the weights are, for example "model."$'):
        export_hf(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match="nothing in the source is quantized: calibrate the model, convert the"):
        export_hf(tmp_path / "run", tmp_path / "out", prefix="model.")


def test_the_command_warns_of_a_config_that_says_nothing_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(model_of("mxfp8").state_dict(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["export", str(checkpoint), str(tmp_path / "a"), "--config", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().err == ""
    assert main(["export", str(checkpoint), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == (
        "python -m dcp_adapters: warning: without --config, config.json tells of the quantization alone; engines need "
        "the model's\n"
    )


def test_experts_that_are_there_are_not_taken_from_the_rest_under_other_names(tmp_path: Path) -> None:
    """A calibration has a weight of all experts, the directory of the dense model a linear each."""
    gate_up, down = values((2, 64, 32), 5), values((2, 32, 32), 6)
    halves = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64)}
    linears = {f"l.experts.{e}.{half}.weight": gate_up[e, rows] for e in range(2) for half, rows in halves.items()}
    linears |= {f"l.experts.{e}.down_proj.weight": down[e] for e in range(2)}
    linears = {name: value.clone() for name, value in linears.items()}
    joined = {"l.experts.gate_up_proj": gate_up, "l.experts.down_proj": down}
    norm = {"l.norm.weight": values((32,), 7)}
    quantized = {name: quantize(value, NVFP4) for name, value in joined.items()}
    export_hf({**quantized, **norm}, tmp_path / "whole")
    export_hf(quantized, tmp_path / "out", rest={**linears, **norm})
    assert tensors_equal(tmp_path / "out", tmp_path / "whole")
    config, expected = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "whole"))
    assert config == expected
    alone_each = {name: quantize(value, MXFP8) for name, value in linears.items()}
    export_hf(alone_each, tmp_path / "each", rest={**joined, **norm})
    assert {name for name in tensors_of(tmp_path / "each") if name.endswith(".weight")} == {*linears, *norm}


def checkpoint_of(state: Mapping[str, Any], tmp_path: Path) -> Path:
    save(dict(state), tmp_path / "part")
    return tmp_path / "part"


def test_a_tied_projection_is_left_out_only_where_it_is_the_embedding(tmp_path: Path) -> None:
    model = model_of("mxfp8")
    tied = {**CONFIG, "tie_word_embeddings": True}
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from embed_tokens\.weight, though the config ties"):
        export_hf(model, tmp_path / "out", config=tied)
    assert list(tmp_path.iterdir()) == []
    model.lm_head.weight = model.embed_tokens.weight
    export_hf(model, tmp_path / "out", config=tied)
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    export_hf(model, tmp_path / "both", config=CONFIG)
    assert torch.equal(tensors_of(tmp_path / "both")["lm_head.weight"], model.embed_tokens.weight)


def test_experts_are_cut_out_of_their_weights(tmp_path: Path) -> None:
    q = quantize(values((3, 64, 32), 5), NVFP4)
    down = values((3, 32, 32), 6)
    state = {"l.experts.gate_up_proj": q, "l.experts.down_proj": down}
    state["l.experts.gate_up_proj.input_scale"] = torch.tensor(0.25)
    export_hf(state, tmp_path / "out", layout="modelopt")
    found = tensors_of(tmp_path / "out")
    for expert in range(3):
        for half, rows in (("gate_proj", slice(0, 32)), ("up_proj", slice(32, 64))):
            linear = f"l.experts.{expert}.{half}"
            assert same_bytes(found[f"{linear}.weight"], q.payload[expert, rows])
            assert same_bytes(found[f"{linear}.weight_scale"], q.scale[expert, rows])
            assert torch.equal(found[f"{linear}.weight_scale_2"], q.global_scale)
            assert found[f"{linear}.input_scale"] == 0.25
        assert torch.equal(found[f"l.experts.{expert}.down_proj.weight"], down[expert])


@pytest.mark.parametrize("config", [{"model_type": "mixtral"}, {"text_config": {"model_type": "mixtral"}}])
def test_experts_that_files_have_under_other_names_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    state = {"l.q.weight": quantize(values((8, 32), 1), MXFP8), "l.experts.down_proj": values((2, 32, 32), 6)}
    with pytest.raises(ValueError, match=r"l\.experts\.down_proj: engines know the experts of mixtral by other names"):
        export_hf(state, tmp_path / "out", config=config)
    assert list(tmp_path.iterdir()) == []
    del state["l.experts.down_proj"]
    export_hf({**state, "l.experts.0.w1.weight": values((8, 32), 2)}, tmp_path / "out", config=config)
    assert "l.experts.0.w1.weight" in tensors_of(tmp_path / "out")


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    q = quantize(values((32, 64), 0), MXFP8)
    export_hf({"weight": q}, tmp_path / "linear")  # a model that is a linear
    assert tensors_of(tmp_path / "linear").keys() == {"weight", "weight_scale"}
    model = nn.ModuleDict({"a": torch.compile(nn.Sequential(nn.Linear(64, 32, bias=False)))})
    model["a"]._orig_mod[0].weight = nn.Parameter(q)
    assert list(model.state_dict()) == ["a._orig_mod.0.weight"]
    export_hf(model, tmp_path / "compiled")
    assert tensors_of(tmp_path / "compiled").keys() == {"a.0.weight", "a.0.weight_scale"}


def test_recipes_that_the_tensors_do_not_tell_are_in_the_file(tmp_path: Path) -> None:
    square = NVFP4BlockScaling(blocks="square")
    state = {"a.weight": quantize(values((32, 64), 0), square), "b.weight": quantize(values((32, 64), 1), NVFP4)}
    state["c.weight"] = quantize(values((32, 64), 2), Float8DelayedScaling())
    export_hf(state, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        told = json.loads(opened.metadata()["qtensor.recipes"])
    assert told == {"a.weight": square.to_json(), "c.weight": Float8DelayedScaling().to_json()}


def test_fused_linears_are_rounded_again_where_that_is_asked_for(tmp_path: Path) -> None:
    state = {f"l.{name}_proj.weight": quantize(values((32, 64), seed), NVFP4) for seed, name in enumerate("qkv")}
    largest = max(q.global_scale for q in state.values())
    with pytest.raises(ValueError, match="engines run these as one linear with one global scale, and theirs differ"):
        export_hf(state, tmp_path / "out")
    with pytest.raises(ValueError, match='fused_scales=\'again\' is not one of "raise", "requantize"'):
        export_hf(state, tmp_path / "out", fused_scales="again")
    export_hf(state, tmp_path / "out", fused_scales="requantize", layout="modelopt")
    found = tensors_of(tmp_path / "out")
    for name, q in state.items():
        module = name.removesuffix(".weight")
        assert torch.equal(found[f"{module}.weight_scale_2"], largest)
        if torch.equal(q.global_scale, largest):
            assert same_bytes(found[f"{module}.weight"], q.payload)
            continue
        expected = quantize(q.dequantize(torch.float32), NVFP4)  # its own scale; now what the shared one gives:
        again = QuantizedTensor.from_parts(
            {
                "payload": found[f"{module}.weight"],
                "scale": found[f"{module}.weight_scale"],
                "global_scale": found[f"{module}.weight_scale_2"],
            },
            NVFP4,
            torch.float32,
        )
        # half a step of the largest element (1 of 6), and a block scale with 3 bits of mantissa: 1/16 of the block
        step = q.dequantize(torch.float32).abs().amax() * (1 / 6 + 1 / 16)
        assert (again.dequantize() - expected.dequantize(torch.float32)).abs().amax() <= step


@pytest.mark.parametrize("name", ["nvfp4", "mixed"])
def test_torch_s_own_reader_reads_all_of_it(name: str, tmp_path: Path) -> None:
    export_hf(model_of(name), tmp_path / "out", config=CONFIG, max_shard_size=5000)
    expected = tensors_of(tmp_path / "out")
    found = {entry: torch.zeros_like(tensor) for entry, tensor in expected.items()}
    with alone():
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")))
    assert all(same_bytes(found[entry], tensor) for entry, tensor in expected.items())


# -- nothing half, nothing wrong -----------------------------------------------------------------------------------


def test_nan_is_found_before_an_engine_runs_on_it(tmp_path: Path) -> None:
    for recipe in (NVFP4, MXFP8, Float8CurrentScaling(), Float8CurrentScaling(granularity="tensor")):
        x = values((32, 64), 0)
        x[3, 5] = float("nan")
        with pytest.raises(ValueError, match=r"a\.weight holds NaN: what it was quantized from was not finite"):
            export_hf({"a.weight": quantize(x, recipe)}, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    export_hf({"a.weight": quantize(values((32, 64), 0) * 1e30, MXFP8)}, tmp_path / "large")  # large is no NaN


@pytest.mark.parametrize("scale", [0.0, 1e-42])
def test_a_scale_without_a_reciprocal_is_refused(scale: float, tmp_path: Path) -> None:
    q = quantize(values((4, 64), 1), NVFP4)
    q.global_scale.fill_(scale)
    with pytest.raises(
        ValueError, match=r"a\.weight_global_scale: the scale of a\.weight is 0 or next to it, and engines"
    ):
        export_hf({"a.weight": q}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def broken_disk(path: str) -> str:
    if dist.get_rank() == 1:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        writing.save_file = full
    try:
        export_hf(sharded(model_of("mxfp8")), path, max_shard_size=5000)
    except OSError as error:
        return str(error)
    finally:
        writing.save_file = save_file
    return "nothing was raised"


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    there = common(tmp_path)
    told = run_ranks(2, broken_disk, str(there / "out"))
    assert told == ["rank 1: [Errno 28] No space left on device"] * 2
    assert list(there.iterdir()) == []


def apart(path: str) -> list[str]:
    model = sharded(model_of("nvfp4"))
    weight = model.layers[0].o_proj.weight
    local = weight.to_local()
    if dist.get_rank() == 1:
        local.global_scale.mul_(2)
    told = [refusal(export_hf, model, path)]
    sync_scales(model)
    state = dict(model.state_dict())
    if dist.get_rank() == 1:
        del state["lm_head.weight"]
    told.append(refusal(export_hf, state, path))
    told.append(refusal(export_hf, model, path, max_shard_size=5000 + dist.get_rank()))
    whole = model_of("mxfp8")
    with torch.no_grad():
        whole.layers[1].o_proj.bias[3] += dist.get_rank()
    return [*told, refusal(export_hf, whole, path)]


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_that_do_not_agree_are_told_on_all_of_them(tmp_path: Path) -> None:
    there = common(tmp_path)
    scales, names, arguments, values_ = run_ranks(2, apart, str(there / "out"))[1]
    assert scales == (
        "export_hf: ranks 0 and 1 differ in the values of tensor-wide scales; call fsdp_hooks.sync_scales on the model "
        "first"
    )
    assert names == (
        "export_hf: ranks 0 and 1 differ in the names, shapes, formats or order of their tensors; export whole models, "
        "or save a checkpoint and export that"
    )
    assert arguments == (
        "export_hf: ranks 0 and 1 differ in what is to become of them; give all ranks the same arguments, and shard a "
        "tensor on all or none"
    )
    assert values_ == (
        "export_hf: ranks 0 and 1 differ in the values of tensors that are not sharded; broadcast them from one rank "
        "first"
    )
    assert list(there.iterdir()) == []


def fails_on_one(path: str) -> str:
    def made(*_: Any) -> Any:
        raise MemoryError("no memory for the tensors of a file")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(making, "made", made)
        try:
            export_hf(sharded(model_of("nvfp4")), path, max_shard_size=5000)
        except RuntimeError as error:
            return str(error)
    return "nothing was raised"


def test_any_error_on_one_rank_between_gathers_is_raised_on_all(tmp_path: Path) -> None:
    there = common(tmp_path)
    told = run_ranks(2, fails_on_one, str(there / "out"))
    assert told == ["rank 1: MemoryError: no memory for the tensors of a file"] * 2
    assert list(there.iterdir()) == []


def test_nothing_is_overwritten_and_nothing_half_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mxfp8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    with pytest.raises(FileExistsError, match="out exists already; choose another name, nothing is overwritten"):
        export_hf(model, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no such directory; create it first"):
        export_hf(model, tmp_path / "no" / "out")
    seen: list[list[str]] = []

    def looked(tensors: Any, path: Path, **kwargs: Any) -> None:
        seen.append(sorted(found.name for found in tmp_path.iterdir()))
        save_file(tensors, path, **kwargs)

    monkeypatch.setattr(writing, "save_file", looked)
    export_hf(model, tmp_path / "new", max_shard_size=5000)
    assert len(seen) > 2
    assert all(re.fullmatch(r"\.new\.[0-9a-f]{8}\.partial", names[0]) and "new" not in names for names in seen)

    def raced(tensors: Any, path: Path, **kwargs: Any) -> None:
        (tmp_path / "raced").mkdir(exist_ok=True)
        (tmp_path / "raced" / "notes").touch()
        save_file(tensors, path, **kwargs)

    monkeypatch.setattr(writing, "save_file", raced)
    with pytest.raises(FileExistsError, match="raced was made by another while this one was written; nothing is"):
        export_hf(model, tmp_path / "raced")
    assert {found.name for found in tmp_path.iterdir()} == {"out", "new", "raced"}
    monkeypatch.setattr(writing, "_save", lambda *_: None)  # files that rank 0 cannot see: a disk of another host
    with pytest.raises(
        FileNotFoundError, match="another rank wrote it and rank 0 can not see it: out_dir must be shared"
    ):
        export_hf(model, tmp_path / "lost")
    assert not (tmp_path / "lost").exists()


def test_an_empty_directory_gets_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mxfp8")
    for name in ("empty", "new"):
        if name == "empty":
            (tmp_path / name).mkdir()
        export_hf(model, tmp_path / name)
    told = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("empty", "new")]
    assert told[0] == told[1]
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "new"}
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link", "new"):
        with pytest.raises(FileExistsError, match=f"{name} exists already; choose another name"):
            export_hf(model, tmp_path / name)
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(FileExistsError, match="disk can not be replaced when all is written; give a new directory in"):
        export_hf(model, tmp_path / "disk")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # the program would be left in a directory that is gone
    for path in (tmp_path / "here", "."):
        with pytest.raises(FileExistsError, match="can not be replaced when all is written"):
            export_hf(model, path)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save({"a.weight": quantize(values((64, 64), 0), MXFP8)}, tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").glob("*.distcp")
    data = bytearray(file.read_bytes())
    payload = quantize(values((64, 64), 0), MXFP8).payload.view(torch.uint8).numpy().tobytes()
    data[data.index(payload[:64]) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: its bytes do not have the checksum stored"):
        export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_source_is_refused_by_name(tmp_path: Path) -> None:
    q = quantize(values((32, 64), 0), MXFP8)
    out = tmp_path / "out"
    with pytest.raises(TypeError, match=r"expected a module, a state dict, a calibration's result or the path .* int"):
        export_hf(3, out)
    with pytest.raises(ValueError, match="b is a int; an export holds tensors only: leave it out"):
        export_hf({"a.weight": q, "b": 3}, out)
    with pytest.raises(ValueError, match=r"a\.bias is on the meta device, it has no values; load the weights first"):
        export_hf({"a.weight": q, "a.bias": torch.empty(3, device="meta")}, out)
    with pytest.raises(ValueError, match=r"no tensor's name begins with 'model\.'; names begin with a"):
        export_hf({"a.weight": q}, out, prefix="model.")
    with pytest.raises(ValueError, match=r"nosuch: no such directory"):
        export_hf(tmp_path / "nosuch", out)
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file; config= takes a model's directory"):
        export_hf({"a.weight": q}, out, config=tmp_path)
    with pytest.raises(TypeError, match=r"config= is a int, expected a path, a dict or an object with to_dict\(\)"):
        export_hf({"a.weight": q}, out, config=3)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds a list, expected an object"):
        export_hf({"a.weight": q}, out, config=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON: "):
        export_hf({"a.weight": q}, out, config=tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is no JSON: maximum recursion .*; give another config="):
        export_hf({"a.weight": q}, out, config=tmp_path)
    with pytest.raises(ValueError, match=r"a.input_scale has the shape \(3,\), expected one value"):
        export_hf({"a.weight": q, "a.input_scale": torch.ones(3)}, out)
    assert not out.exists()


def test_sizes_are_numbers_or_have_units() -> None:
    assert (shard_size(7), shard_size("7"), shard_size("5GB"), shard_size("1.5 MiB")) == (7, 7, 5 * 10**9, 3 * 2**19)
    for bad in (0, "5 apples", "GB", "-1GB"):
        with pytest.raises(ValueError, match=re.escape(f"max_shard_size={bad!r}: expected bytes, or a text like")):
            shard_size(bad)
