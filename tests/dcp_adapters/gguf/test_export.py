"""GGUF files of live models, shards and checkpoints, read back by the package gguf; and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_adapters import QuantizedSavePlanner, export_gguf
from dcp_adapters.cli.main import main
from dcp_adapters.gguf import export
from dcp_adapters.gguf.architectures import ARCHITECTURES, name_in_file
from dcp_adapters.gguf.plan import GGUF
from dcp_adapters.hf.layouts.registry import LAYOUTS
from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize_,
)
from qtensor.tensor.quantized_tensor import dequantize_all
from tests.dcp_adapters.cases import alone
from tests.dcp_adapters.gguf import files
from tests.dcp_adapters.hf.exports import llama
from tests.ranks import agreed, run_ranks

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

RECIPES: dict[str, Any] = {"MXFP4": MXFP4BlockScaling(), "NVFP4": NVFP4BlockScaling()}
every_type = pytest.mark.parametrize("kind", RECIPES)


def quantized(kind: str, *, tied: bool = False) -> LlamaForCausalLM:
    model = llama(tied=tied)
    quantize_(model, RECIPES[kind], exclude=("lm_head",))
    return model


@pytest.fixture
def like(tmp_path: Path) -> Path:
    return files.like(tmp_path / "like.gguf", llama())


def check_file(path: Path, state: dict[str, Tensor], kind: str) -> None:
    """Every tensor of a state dict is in the file, bit for bit, in llama.cpp's order; nothing else is."""
    found, types = files.values(path), files.kinds(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert torch.equal(found.pop("rope_freqs.weight"), torch.arange(1, 9, dtype=torch.float32))
    for name, value in state.items():
        module, _, own = name.rpartition(".")
        base = names.get_name(module)
        if own == "input_scale":
            assert torch.equal(found.pop(f"{base}.input_scale"), value.reshape(1))
            continue
        rows = found.pop(f"{base}.weight")
        heads = {"attn_q": 4, "attn_k": 2}.get(base.rpartition(".")[2])
        rows = rows if heads is None else files.in_halves(rows, heads)
        if not isinstance(value, QuantizedTensor):
            assert torch.equal(rows, value.float())
            assert types[f"{base}.weight"] == ("BF16" if value.ndim == 2 else "F32")
            continue
        parts = value.parts()
        if "global_scale" in parts:
            assert torch.equal(found.pop(f"{base}.scale"), parts["global_scale"].reshape(1))
            parts["global_scale"] = torch.ones((), dtype=torch.float32)
        assert types[f"{base}.weight"] == kind
        assert torch.equal(rows, QuantizedTensor.from_parts(parts, value.recipe, torch.float32).dequantize())
    assert not found


@every_type
def test_a_file_holds_the_bytes_of_the_model(tmp_path: Path, like: Path, kind: str) -> None:
    model = quantized(kind)
    state = dict(model.state_dict())
    if kind == "NVFP4":  # a scale of inputs, as calibrate leaves it
        state["model.layers.0.mlp.down_proj.input_scale"] = torch.tensor(0.0123, dtype=torch.float32)
    path = export_gguf(state, tmp_path / "out.gguf", like=like, progress=False)
    check_file(path, state, kind)


def test_the_metadata_are_those_of_the_other_file_but_for_what_tells_of_its_weights(tmp_path: Path, like: Path) -> None:
    path = export_gguf(quantized("NVFP4"), tmp_path / "out.gguf", like=like, progress=False)
    before, after = files.fields(like), files.fields(path)
    assert after.pop("general.file_type") == gguf.LlamaFileType.MOSTLY_NVFP4
    del before["general.file_type"], before["quantize.imatrix.file"]
    assert after == before


def test_a_tied_projection_is_left_out(tmp_path: Path) -> None:
    like = files.like(tmp_path / "like.gguf", llama(tied=True))
    path = export_gguf(quantized("MXFP4", tied=True), tmp_path / "out.gguf", like=like, progress=False)
    assert "output.weight" not in files.kinds(path)


def test_formats_may_be_mixed_and_scales_of_fused_linears_differ(tmp_path: Path, like: Path) -> None:
    """llama.cpp runs q, k and v one by one."""
    model = llama()
    quantize_(model, NVFP4BlockScaling(), include=("*q_proj", "*k_proj"))
    quantize_(model, MXFP4BlockScaling(), include=("*v_proj",))
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        layer.k_proj.weight.copy_(layer.k_proj.weight.dequantize() * 3)
    path = export_gguf(model, tmp_path / "out.gguf", like=like, progress=False)
    kinds, values = files.kinds(path), files.values(path)
    assert [kinds[f"blk.0.attn_{own}.weight"] for own in "qkv"] == ["NVFP4", "NVFP4", "MXFP4"]
    assert not torch.equal(values["blk.0.attn_q.scale"], values["blk.0.attn_k.scale"])
    assert files.fields(path)["general.file_type"] == gguf.LlamaFileType.MOSTLY_NVFP4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_gguf(architecture: str) -> None:
    """By its own map, in which other frameworks' names are, too."""
    known = ARCHITECTURES[architecture]
    its = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(its, 3)
    modules = ["model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.2.{own}" for own in known.in_block)]
    for module in modules:
        assert name_in_file(known, module) == names.get_name(module)
    assert names.get_name("layers.2.attention.wq") == "blk.2.attn_q"  # of Meta's files, whose rows lie in pairs already
    assert name_in_file(known, "layers.2.attention.wq") is None


# -- other sources -----------------------------------------------------------------------------------------------------


def _of_shards(where: str) -> None:
    model = quantized("NVFP4")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    export_gguf(model, Path(where) / "shards.gguf", like=Path(where) / "like.gguf", progress=False)


def test_shards_make_the_file_of_one_process(tmp_path: Path) -> None:
    there = Path(agreed(value=str(tmp_path)))  # a directory that all ranks have, under torchrun too
    files.like(there / "like.gguf", llama())
    run_ranks(2, _of_shards, str(there))
    path = export_gguf(quantized("NVFP4"), tmp_path / "one.gguf", like=there / "like.gguf", progress=False)
    assert (there / "shards.gguf").read_bytes() == path.read_bytes()


def test_a_checkpoint_is_exported_from_the_command_line(
    tmp_path: Path, like: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = quantized("MXFP4")
    weights = {name: value for name, value in model.state_dict().items() if isinstance(value, QuantizedTensor)}
    with alone():
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "step", planner=QuantizedSavePlanner())
    llama().save_pretrained(tmp_path / "dense")
    command = ["export", str(tmp_path / "step"), str(tmp_path / "out.gguf"), "--layout", "gguf", "--no-progress"]
    assert main([*command, "--like", str(like), "--rest", str(tmp_path / "dense")]) == 0
    assert re.fullmatch(r".*out\.gguf: [\d.]+ KiB, layout gguf\n", capsys.readouterr().out)
    check_file(tmp_path / "out.gguf", dict(model.state_dict()), "MXFP4")


def test_the_command_wants_like_for_gguf_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--layout", "gguf"], ["--like", "a.gguf"]):
        assert main(["export", "step", "out", *options]) == 2
        assert "--layout gguf and --like go together" in capsys.readouterr().err
    for option, value in (("--config", "model"), ("--fused-scales", "raise"), ("--max-shard-size", "1GB")):
        assert main(["export", "step", "out", "--layout", "gguf", "--like", "a.gguf", option, value]) == 2
        assert f"--layout gguf takes no {option}: it is one file" in capsys.readouterr().err


# -- refused -----------------------------------------------------------------------------------------------------------


REFUSED = {
    "float8": (Float8CurrentScaling(), "the layout gguf has no fp8_row weights with dynamic inputs; it has mxfp4"),
    "mxfp8": (MXFP8BlockScaling(), "the layout gguf has no mxfp8 weights with dynamic inputs; it has mxfp4"),
    "int4": (
        Int4GroupScaling(group=32),
        "the layout gguf has no int4_32 weights with unquantized inputs; it has mxfp4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_ggml_does_not_have_are_refused(tmp_path: Path, like: Path, name: str) -> None:
    recipe, message = REFUSED[name]
    model = llama()
    quantize_(model, recipe, include=("*o_proj",))
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.self_attn\.o_proj: {message}"):
        export_gguf(model, tmp_path / "out.gguf", like=like, progress=False)
    assert not (tmp_path / "out.gguf").exists()


def test_a_block_of_nan_is_refused_and_nothing_stays(tmp_path: Path, like: Path) -> None:
    model = quantized("MXFP4")
    model.model.layers[1].mlp.up_proj.weight.parts()["scale"][3, 0] = 255
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        export_gguf(model, tmp_path / "out.gguf", like=like, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["like.gguf"]


def test_a_negative_scale_is_refused_by_name(tmp_path: Path, like: Path) -> None:
    model = quantized("NVFP4")
    model.model.layers[1].mlp.up_proj.weight.parts()["scale"].view(torch.uint8)[3, 0] = 0xB0
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: a block has a negative scale"):
        export_gguf(model, tmp_path / "out.gguf", like=like, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["like.gguf"]


def test_tensors_that_do_not_fit_are_named_together(tmp_path: Path, like: Path) -> None:
    state: dict[str, Tensor] = dict(quantized("MXFP4").state_dict())
    state["layers.0.attention.wq.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)
    state["model.norm.weight"] = torch.zeros(32, dtype=torch.bfloat16)
    state["lm_head.weight"] = torch.zeros(128, 64, dtype=torch.float64)
    state["model.rotary_emb.inv_freq"] = torch.zeros(8, dtype=torch.float32)  # llama.cpp makes it from the metadata
    with pytest.raises(ValueError, match="can not hold this") as raised:
        export_gguf(state, tmp_path / "out.gguf", like=like, progress=False)
    assert str(raised.value).splitlines() == [
        "the layout gguf can not hold this:",
        f"  model.norm.weight is [32], output_norm.weight of {like} [64]",
        "  lm_head.weight is float64, expected F32, F16, BF16",
        "  layers.0.attention.wq.weight: files of llama have no such tensor; expected transformers' names",
        f"  model.layers.2.mlp.up_proj.weight: {like} has no blk.2.ffn_up.weight; give a file of the same model",
    ]


def test_nvfp4_takes_whole_blocks_of_64_columns(tmp_path: Path) -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
    writer = gguf.GGUFWriter(tmp_path / "like.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("output.weight", torch.zeros(32, 48, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantize_(model, NVFP4BlockScaling())
    with pytest.raises(ValueError, match=r"lm_head\.weight has 48 columns; blocks of NVFP4 have 64 there"):
        export_gguf(model, tmp_path / "out.gguf", like=tmp_path / "like.gguf", progress=False)


def test_tensors_that_the_source_lacks_are_named(tmp_path: Path, like: Path) -> None:
    state = dict(quantized("MXFP4").state_dict())
    del state["model.norm.weight"], state["lm_head.weight"]
    with pytest.raises(ValueError, match="the source lacks 2 tensors") as raised:
        export_gguf(state, tmp_path / "out.gguf", like=like, progress=False)
    assert str(raised.value) == (
        f"the source lacks 2 tensors that {like} has (output_norm.weight, output.weight); say by rest=... (--rest) "
        "where they are taken from, for example the model's directory"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "gemma3"},
            r"is of the architecture 'gemma3', and names and orders of rows are known of llama",
        ),
        ({"head_count": [4, 2]}, r"its layers have a list heads; expected one number for all layers"),
        ({"split": 2}, r"is one of several files of a model; merge them \(llama-gguf-split --merge\)"),
    ],
)
def test_other_files_are_no_likeness(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    like = files.like(tmp_path / "like.gguf", llama(), **changes)
    with pytest.raises(ValueError, match=message):
        export_gguf(quantized("MXFP4"), tmp_path / "out.gguf", like=like, progress=False)


def test_paths_are_looked_at_first(tmp_path: Path, like: Path) -> None:
    model = quantized("MXFP4")
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf: no such file; like= takes a GGUF file of the same"):
        export_gguf(model, tmp_path / "out.gguf", like=tmp_path / "nothing.gguf")
    with pytest.raises(FileExistsError, match=r"like\.gguf exists already; choose another name"):
        export_gguf(model, like, like=like)
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such directory; create it first"):
        export_gguf(model, tmp_path / "nowhere" / "out.gguf", like=like)
    (tmp_path / "other.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(ValueError, match=r"other\.gguf is damaged or no GGUF file: "):
        export_gguf(model, tmp_path / "out.gguf", like=tmp_path / "other.gguf")


def test_a_name_that_is_taken_meanwhile_is_left_alone(
    tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = export._write_tensors
    monkeypatch.setattr(
        export, "_write_tensors", lambda *args: (written(*args), (tmp_path / "out.gguf").write_text("mine"))
    )
    with pytest.raises(FileExistsError, match=r"out\.gguf was made by another"):
        export_gguf(quantized("MXFP4"), tmp_path / "out.gguf", like=like, progress=False)
    assert (tmp_path / "out.gguf").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["like.gguf", "out.gguf"]


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError, match=r'written by the package gguf, which is not there; install "qtensor-fsdp\[gguf\]"'
    ):
        export_gguf(quantized("MXFP4"), tmp_path / "out.gguf", like=like, progress=False)


def test_it_is_no_layout_of_directories() -> None:
    """None that export_hf takes, or that a directory could have."""
    assert GGUF.name not in LAYOUTS


def test_the_source_is_left_as_it_was(tmp_path: Path, like: Path) -> None:
    model = quantized("NVFP4")
    before = {name: dequantize_all(value).clone() for name, value in model.state_dict().items()}
    export_gguf(model, tmp_path / "out.gguf", like=like, progress=False)
    for name, value in model.state_dict().items():
        assert torch.equal(dequantize_all(value), before[name])
