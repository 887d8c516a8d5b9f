"""What exports say of the bytes of their tensors, and what `verify` makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcp_adapters import export_hf
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.records.weight_sums import PartSum, tensor_digest
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums
from qtensor import Int4GroupScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize

if TYPE_CHECKING:
    from dcp_adapters.stored.verifying.findings import VerifyReport

KEY = "qtensor.digests"


def exported(path: Path, **options: Any) -> Path:
    """Weights of three formats and dense ones, in two files."""
    generator = torch.Generator().manual_seed(5)
    values = {name: torch.randn(64, 128, generator=generator).bfloat16() for name in ("up", "down", "out")}
    recipes = {"up": MXFP8BlockScaling(), "down": NVFP4BlockScaling(), "out": Int4GroupScaling()}
    state: dict[str, Tensor] = {f"l.{name}.weight": quantize(values[name], recipe) for name, recipe in recipes.items()}
    state |= {"l.norm.weight": torch.ones(96), "l.flags": torch.tensor([True, False]), "l.step": torch.tensor(7)}
    export_hf(state, path, max_shard_size=15000, progress=False, **options)
    assert len([*path.glob("*.safetensors")]) == 2
    return path


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def rewritten(file: Path, tensors: dict[str, Tensor], note: str | None) -> None:
    metadata = metadata_of(file)
    metadata.pop(KEY)
    save_file(tensors, file, metadata=metadata if note is None else {**metadata, KEY: note})


def errors(report: VerifyReport) -> list[tuple[str, str, str]]:
    return [(found.file, found.entry, found.message) for found in report.errors]


def test_each_file_has_the_digests_of_its_tensors(tmp_path: Path) -> None:
    for file in exported(tmp_path / "out").glob("*.safetensors"):
        expected = {}
        for name, tensor in sorted(load_file(file).items()):
            total = int(byte_sums([TensorPiece.whole(tensor)])[0])
            expected[name] = tensor_digest([PartSum("", tensor.dtype, tensor.shape, total)])
        assert [*json.loads(metadata_of(file)[KEY]).items()] == [*expected.items()]
    report = verify_directory(tmp_path / "out")
    assert (report.findings, report.checksums) == ((), 11)


def test_a_changed_byte_of_any_tensor_is_found_and_named(tmp_path: Path) -> None:
    directory = exported(tmp_path / "out")
    for file in sorted(directory.glob("*.safetensors")):
        whole = file.read_bytes()
        size = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + size])
        header.pop("__metadata__")
        for name, record in header.items():
            data = bytearray(whole)
            data[8 + size + record["data_offsets"][1] - 1] ^= 1
            file.write_bytes(data)
            found = {
                entry: message for where, entry, message in errors(verify_directory(directory)) if where == file.name
            }
            if name.endswith("weight_shape"):  # such a directory is not read at all
                continue
            assert f"the file's {KEY} says {json.loads(metadata_of(file)[KEY])[name]}" in found[name]
            assert [other for other in found if other in header] == [name]
        file.write_bytes(whole)
    assert verify_directory(directory).ok


def test_another_dtype_of_the_same_bytes_is_found(tmp_path: Path) -> None:
    directory = exported(tmp_path / "out")
    file = next(file for file in directory.glob("*.safetensors") if "l.norm.weight" in load_file(file))
    data = file.read_bytes()
    at = data.index(b'"l.norm.weight":{"dtype":"F32"')
    file.write_bytes(data[:at] + data[at:].replace(b'"F32","shape":[96]', b'"I32","shape":[96]', 1))
    assert [entry for _, entry, _ in errors(verify_directory(directory))] == ["l.norm.weight"]


def test_files_without_digests_are_named_in_a_warning(tmp_path: Path) -> None:
    directory = exported(tmp_path / "out")
    first, second = sorted(directory.glob("*.safetensors"))
    rewritten(first, load_file(first), None)
    report = verify_directory(directory)
    ((severity, message),) = [(found.severity, found.message) for found in report.findings]
    assert severity == "warning"
    assert message == (
        f"{first.name}: no {KEY} in the metadata: bytes that changed into other valid ones cannot be found"
    )
    assert report.checksums == len(load_file(second))


def test_files_that_the_index_does_not_name_are_named_in_a_warning(tmp_path: Path) -> None:
    directory = exported(tmp_path / "out")
    first, _ = sorted(directory.glob("*.safetensors"))
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {name: held for name, held in index["weight_map"].items() if held != first.name}
    file.write_text(json.dumps(index))
    (found,) = verify_directory(directory).findings
    assert (found.severity, found.file) == ("warning", first.name)
    assert found.message == "model.safetensors.index.json does not name it, so its tensors are not read"


def test_tensors_and_digests_without_the_other_are_errors(tmp_path: Path) -> None:
    directory = exported(tmp_path / "out")
    file = next(file for file in directory.glob("*.safetensors") if "l.norm.weight" in load_file(file))
    note = json.loads(metadata_of(file)[KEY])
    note["gone"] = note.pop("l.norm.weight")
    rewritten(file, load_file(file), json.dumps(note))
    assert errors(verify_directory(directory)) == [
        (file.name, "gone", f"the file's {KEY} has a digest of it, and the file has no such tensor"),
        (file.name, "l.norm.weight", f"the file's {KEY} has no digest of it"),
    ]


@pytest.mark.parametrize(
    ("note", "told"),
    [
        ("{", "is not JSON: .*; export it again"),
        ("[" * 100000, "is not JSON: .*; export it again"),
        ("[]", "holds a list, expected 32 hex digits for each tensor; export it again"),
        ('{"l.norm.weight": "0"}', "holds '0', expected 32 hex digits for each tensor; export it again"),
        ('{"l.norm.weight": 7}', "holds 7, expected 32 hex digits for each tensor; export it again"),
    ],
)
def test_metadata_that_say_something_else_are_an_error(note: str, told: str, tmp_path: Path) -> None:
    directory = exported(tmp_path / "out")
    first = min(directory.glob("*.safetensors"))
    rewritten(first, load_file(first), note)
    ((file, entry, message),) = errors(verify_directory(directory))
    assert (file, entry) == ("", "")
    assert re.fullmatch(f"{first.name}: {KEY} in its metadata {told}", message)
