"""The commands on Hugging Face directories: what they say of one is what they say of the checkpoint it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_adapters import export_hf
from dcp_adapters.cli.main import main
from dcp_adapters.hf.reading.stored_directory import StoredDirectory, is_directory
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from tests.dcp_adapters.cases import save

RECIPES = {
    "float8-row": Float8CurrentScaling(),
    "float8-block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "int4": Int4GroupScaling(),
}
WEIGHT = "layers.0.down_proj.weight"


def both(tmp_path: Path, recipe: str = "mxfp8") -> tuple[str, str]:
    """One state dict as a checkpoint and as an export of it."""
    generator = torch.Generator().manual_seed(3)
    state = {
        WEIGHT: quantize(torch.randn(64, 96, generator=generator).bfloat16(), RECIPES[recipe]),
        "embed_tokens.weight": torch.randn(8, 96, generator=generator).bfloat16(),
        "norm.weight": torch.ones(96),
    }
    save(state, tmp_path / "dcp")
    export_hf(state, tmp_path / "hf")
    return str(tmp_path / "dcp"), str(tmp_path / "hf")


def json_of(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) in (0, 1)
    return dict(json.loads(capsys.readouterr().out))


def test_a_directory_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    checkpoint, directory = both(tmp_path)
    assert is_directory(directory)
    assert not is_directory(checkpoint)
    assert not is_directory(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_directory_holds_the_entries_and_bytes_of_its_checkpoint(tmp_path: Path, recipe: str) -> None:
    checkpoint, directory = both(tmp_path, recipe)
    a, b = StoredCheckpoint(checkpoint), StoredDirectory(directory)
    assert dict(a.entries) == dict(b.entries)
    assert b.layout == "compressed-tensors"
    for name in a.entries:
        ours, theirs = a.parts(name), b.parts(name)
        assert ours.keys() == theirs.keys()
        for part in ours:
            if (recipe, part) != ("nvfp4", "global_scale"):  # stored as a reciprocal, which fp32 cannot always invert
                assert torch.equal(ours[part].view(torch.uint8), theirs[part].view(torch.uint8)), (name, part)


def test_inspect_lists_what_it_lists_of_the_checkpoint(tmp_path: Path, capsys: Any) -> None:
    checkpoint, directory = both(tmp_path)
    a, b = json_of(capsys, "inspect", checkpoint), json_of(capsys, "inspect", directory)
    assert b["tensors"] == a["tensors"]
    assert b["total"] == a["total"]
    assert (b["layout"], b["format_version"], b["files"]) == ("compressed-tensors", None, 1)
    assert "layout" not in a
    assert main(["inspect", directory]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head == f"{directory}: Hugging Face directory, layout compressed-tensors, files: 1"


@pytest.mark.parametrize("recipe", ["mxfp4", "int4"])
def test_the_commands_read_packed_codes(tmp_path: Path, capsys: Any, recipe: str) -> None:
    checkpoint, directory = both(tmp_path, recipe)
    assert json_of(capsys, "inspect", directory)["tensors"] == json_of(capsys, "inspect", checkpoint)["tensors"]
    assert main(["diff", checkpoint, directory]) == 0
    assert main(["verify", directory]) == 0
    assert main(["report", directory, "--output", str(tmp_path / "page.html")]) == 0
    assert main(["convert", directory, str(tmp_path / "out"), "--to", "bfloat16"]) == 0
    found, before = StoredCheckpoint(tmp_path / "out", check=True), StoredDirectory(directory).read(WEIGHT)
    assert isinstance(before, QuantizedTensor)
    assert torch.equal(found.read(WEIGHT), before.dequantize(torch.bfloat16))


def test_a_dense_directory_is_not_quantized(tmp_path: Path, capsys: Any) -> None:
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "Hugging Face directory, not quantized, files: 1" in capsys.readouterr().out


def test_diff_finds_nothing_and_then_the_one_changed_byte(tmp_path: Path, capsys: Any) -> None:
    checkpoint, directory = both(tmp_path)
    assert main(["diff", checkpoint, directory]) == 0
    capsys.readouterr()
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors[WEIGHT].view(torch.uint8)[3, 5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    found = json_of(capsys, "diff", checkpoint, directory)
    assert [(one["name"], one["kind"], one["differing_bytes"]) for one in found["differences"]] == [
        (WEIGHT, "bytes", 1)
    ]


def test_verify_reads_all_and_finds_nan(tmp_path: Path, capsys: Any) -> None:
    _, directory = both(tmp_path)
    sound = json_of(capsys, "verify", directory)
    assert (sound["tensors"], sound["chunks"], sound["checksums"]) == (3, 3, 4)
    assert sound["findings"] == []
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors[WEIGHT].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["verify", directory]) == 1
    told = capsys.readouterr().out
    assert f"{WEIGHT}.payload" in told
    assert "1 of 6144 elements are NaN or infinite" in told
    assert "1 errors, 1 warnings" in told


def test_verify_finds_a_file_cut_short(tmp_path: Path, capsys: Any) -> None:
    _, directory = both(tmp_path)
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert main(["verify", directory]) == 1
    assert "model.safetensors" in capsys.readouterr().out


def test_report_of_a_directory_against_its_checkpoint(tmp_path: Path, capsys: Any) -> None:
    checkpoint, directory = both(tmp_path)
    found = json_of(capsys, "report", directory, "--against", checkpoint)
    assert {one["name"] for one in found["tensors"]} == {WEIGHT, "embed_tokens.weight", "norm.weight"}
    page = tmp_path / "page.html"
    assert main(["report", directory, "--output", str(page)]) == 0
    assert WEIGHT in page.read_text().replace("<wbr>", "")


def test_convert_makes_a_checkpoint_of_a_directory(tmp_path: Path) -> None:
    _, directory = both(tmp_path)
    assert main(["convert", directory, str(tmp_path / "out"), "--to", "bfloat16"]) == 0
    found, before = StoredCheckpoint(tmp_path / "out", check=True), StoredDirectory(directory).read(WEIGHT)
    assert isinstance(before, QuantizedTensor)
    assert torch.equal(found.read(WEIGHT), before.dequantize(torch.bfloat16))
    assert found.entries.keys() == StoredDirectory(directory).entries.keys()
