"""What does not fit is refused before a weight is read; what fits comes to the bytes of the Python API."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dcp_adapters import export_gguf, export_hf, import_hf
from layerwise import Max, calibrate
from layerwise.command.config import DataKeys, ModelKeys
from layerwise.command.data import read_samples
from layerwise.command.model import built
from layerwise.command.yaml_text import ConfigError
from qtensor import Float8CurrentScaling, NVFP4BlockScaling, quantize_
from tests.dcp_adapters.gguf.files import like
from tests.layerwise.command.runs import command, files_of, same_files, save_model, write_config

pytestmark = pytest.mark.usefixtures("alone")
MAX: dict[str, Any] = {"algorithm": "Max", "data": None}
DYNAMIC = {"inputs": "dynamic"}


def refusal(directory: Path, **changed: Any) -> list[str]:
    """What a check tells, a line for each thing, without the config's path."""
    config = write_config(directory, **changed)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    status, told = command(config, "--check")
    assert status == 2, told
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before, "nothing was written"
    head = f"python -m layerwise: error: {config}:"
    assert told.startswith(head)
    return [line.strip() for line in told.removeprefix(head).strip().splitlines()]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"device": "xpu"}}, "model.device: there is no xpu here; expected auto, cpu"),
        (
            {"recipe": "int4-128", "calibration": {"inputs": "dynamic"}},
            "calibration: model.layers.0.self_attn.q_proj.weight",
        ),
        ({"recipe": "mxfp8"}, 'calibration: inputs="static" needs a tensor-wide scale'),
        ({"recipe": "float8-delayed"}, "calibration: Float8DelayedScaling takes its scales from training steps"),
        ({"calibration": {"include": ["*.w1"]}}, "calibration: include pattern '*.w1' matches no module"),
        ({"calibration": {"exclude": ["*"]}}, "calibration: no weight is left to quantize; see include and exclude"),
        ({"calibration": {"layers": ["decoder.*"]}}, "calibration.layers: 'decoder.*' matches no module of the model;"),
        ({"data": {"sequence_length": 33}}, "data.sequence_length: the model takes 32 tokens at most, got 33"),
        ({"data": {"samples": 21}}, "data.samples: "),
        ({"recipe": "float8-row", "output": {"layout": "modelopt"}}, "output: "),
        ({"recipe": "nvfp4", "output": {"layout": "fp8"}}, "output: "),
        (
            {"output": {"layout": "mxfp4"}},
            "output: layout='mxfp4' is that of gpt_oss, and the config is that of llama;",
        ),
    ],
)
def test_what_does_not_fit_the_model(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    (told,) = refusal(tmp_path, **changed)
    assert told.startswith(message)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    (tmp_path / "config-out").mkdir()
    (tmp_path / "config-out" / "a").touch()
    held = load_file(directory / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, directory / "model.safetensors")
    told = refusal(tmp_path, calibration={"layers": ["x"]}, output={"report": [str(tmp_path / "gone" / "r.json")]})
    assert (
        told[0] == f"output.path: {tmp_path / 'config-out'} exists already; choose another name, nothing is overwritten"
    )
    assert told[1].startswith("calibration.layers: 'x' matches no module")
    assert told[2] == f"model.path: {directory} does not fit the model; nothing has been loaded:"
    assert told[3:] == ["model.norm.weight: only the model has it"]
    (told_by_disk,) = refusal(tmp_path, model={"weights_on": "disk"}, output={"path": str(tmp_path / "free")})
    assert told_by_disk.startswith("model.path: model.norm.weight of the model is on the meta device and not in ")


def test_outputs_must_be_free_and_their_directories_there(tmp_path: Path) -> None:
    save_model(tmp_path)
    gone = tmp_path / "gone"
    (told,) = refusal(tmp_path, output={"path": str(gone / "out")})
    assert told == f"output.path: {gone}: no such directory; create it first"
    (tmp_path / "config.json").touch()
    (told,) = refusal(tmp_path)
    assert told.startswith(f"output.report[0]: {tmp_path / 'config.json'} exists already;")
    (told,) = refusal(tmp_path, output={"report": [], "checkpoint": str(tmp_path / "model")})
    assert told.startswith(f"output.checkpoint: {tmp_path / 'model'} exists already;")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    save_model(tmp_path)
    long = "x" * 5000
    for key, changed in {
        "model": {"path": str(tmp_path / long)},
        "data": {"path": str(tmp_path / "a.txt"), "tokenizer": str(tmp_path / long)},
        "calibration": {"checkpoint_dir": str(tmp_path / long)},
        "output": {"path": str(tmp_path / long)},
    }.items():
        (told,) = refusal(tmp_path, **{key: changed})
        assert "File name too long" in told
    (tmp_path / "file").touch()
    (told,) = refusal(tmp_path, calibration={"checkpoint_dir": str(tmp_path / "file")})
    assert told.startswith(f"calibration.checkpoint_dir: {tmp_path / 'file'} is a file; name a directory")
    for path in ("a\0b", "a\ud800b", str(tmp_path / long)):
        status, said = command(path)
        assert (status, said.count("it cannot be read: ")) == (2, 1)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    (told,) = refusal(tmp_path, output={"report": [str(tmp_path / "r.png")]})
    assert told == (
        "output.report: pictures are drawn by matplotlib, which is not installed: "
        "pip install 'qtensor-fsdp[calibration]'"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json; expected a Hugging Face directory"),
        ("{", "cannot be used: "),
        ('{"model_type": "none of them"}', "cannot be used: "),
        (
            '{"model_type": "vit", "dtype": "bfloat16"}',
            "transformers' AutoModelForCausalLM and AutoModelForImageTextToText do not build it, and code",
        ),
        ('{"model_type": "llama"}', "model.dtype: "),
        ('{"model_type": "llama", "auto_map": {"AutoConfig": "a.B"}, "dtype": "bfloat16"}', ""),
    ],
)
def test_directories_that_are_no_model(config: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)
    told = refusal(tmp_path, **MAX, calibration=DYNAMIC)
    assert any(message in line for line in told)
    assert all(line.startswith("model.") for line in told[:1])
    assert refusal(tmp_path, model={"path": str(tmp_path / "gone")}, **MAX, calibration=DYNAMIC) == [
        f"model.path: {tmp_path / 'gone'}: no such directory"
    ]


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    told = refusal(tmp_path, data={"path": str(tmp_path / "a.txt")})
    assert told[0].startswith(f"data.tokenizer: {directory} has no tokenizer that can be read (")


def test_text_is_tokenized_by_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    words = {"[UNK]": 0, **{f"w{number}": number for number in range(1, 90)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=8).save_pretrained(
        directory
    )
    (tmp_path / "a.txt").write_text(" ".join(f"w{number}" for number in range(1, 90)), encoding="utf-8")
    keys = DataKeys(path=tmp_path / "a.txt", samples=22, sequence_length=4)
    assert sorted(read_samples(keys, directory, 90).flatten().tolist()) == list(range(1, 89))


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_model_is_on_the_meta_device_and_its_tables_are_those_of_transformers(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    model = built(ModelKeys(path=directory))
    whole = LlamaForCausalLM.from_pretrained(directory)
    assert all(param.is_meta and param.dtype == torch.bfloat16 for param in model.parameters())
    assert not model.training
    tables = dict(model.named_buffers())
    assert tables.keys() == dict(whole.named_buffers()).keys() != set()
    assert all(torch.equal(tables[name], value) for name, value in whole.named_buffers())
    assert built(ModelKeys(path=directory, dtype="float32")).dtype == torch.float32


def test_a_table_that_nothing_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "initialize_weights", lambda self: None)
    with pytest.raises(ConfigError, match=r"model.rotary_emb.inv_freq is in no file, and nothing computes it"):
        built(ModelKeys(path=directory))


def test_a_tied_model_in_fp32_files(tmp_path: Path) -> None:
    directory = save_model(tmp_path, dtype=torch.float32, tie_word_embeddings=True)
    config = write_config(tmp_path, model={"dtype": "bfloat16"}, **MAX, calibration=DYNAMIC)
    assert command(config)[0] == 0
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    result = calibrate(model, None, recipe=NVFP4BlockScaling(), algorithm=Max(), exclude=["lm_head"])
    export_hf(result, tmp_path / "api", config=directory, rest=directory)
    assert same_files([tmp_path / "config-out", tmp_path / "api"])
    assert "lm_head.weight" not in load_file(tmp_path / "config-out" / "model.safetensors")


def test_a_quantized_directory_is_calibrated_as_the_values_it_stands_for(tmp_path: Path) -> None:
    dense = LlamaForCausalLM.from_pretrained(save_model(tmp_path), dtype=torch.bfloat16)
    quantize_(dense, Float8CurrentScaling(), exclude=["lm_head"])
    source = export_hf(dense, tmp_path / "fp8")
    changed = {"model": {"path": str(source)}, **MAX, "calibration": DYNAMIC}
    (told,) = refusal(tmp_path, **{**changed, "model": {"path": str(source), "weights_on": "disk"}})
    assert told.startswith("model.weights_on: the model's files are quantized")
    assert command(write_config(tmp_path, **changed))[0] == 0

    model = LlamaForCausalLM(dense.config).to(torch.bfloat16)
    import_hf(source, model, on_mismatch="convert")
    result = calibrate(model, None, recipe=NVFP4BlockScaling(), exclude=["lm_head"])
    export_hf(result, tmp_path / "api", config=source, rest=model)
    assert same_files([tmp_path / "config-out", tmp_path / "api"])
    assert "nvfp4" in json.loads((tmp_path / "api" / "config.json").read_text())["quantization_config"]["format"]


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    directory = save_model(tmp_path)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    other = like(tmp_path / "like.gguf", model)
    output = {"path": str(tmp_path / "out.gguf"), "layout": "gguf", "like": str(other)}
    (told,) = refusal(tmp_path, recipe="mxfp8", **MAX, calibration=DYNAMIC, output=output)
    assert told.startswith("output: ")
    assert command(write_config(tmp_path, **MAX, calibration=DYNAMIC, output=output))[0] == 0
    result = calibrate(model, None, recipe=NVFP4BlockScaling(), exclude=["lm_head"])
    export_gguf(result, tmp_path / "api.gguf", like=other, rest=directory)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "api.gguf").read_bytes()


def test_warnings_are_told_once_as_lines(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_model(tmp_path)
    config = write_config(tmp_path, **MAX, calibration={"inputs": "dynamic", "exclude": ["lm_head", "nowhere.*"]})
    status, told = command(config)
    assert status == 0
    lines = [line for line in told.splitlines() if "warning: " in line]
    assert lines == [
        line for line in lines if line.startswith("python -m layerwise: warning: exclude pattern 'nowhere.*'")
    ]
    assert len(lines) == 1
    assert files_of(tmp_path / "config-out")
    assert not [one for one in recwarn if "nowhere" in str(one.message)]
    assert np.load(tmp_path / "ids.npy").size
