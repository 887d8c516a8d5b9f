"""The published vectors are what the oracle writes, and what qtensor gives; other libraries, where they agree."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from qtensor import QuantizedTensor, Recipe, quantize, use_kernels
from tests.docs.pages import page
from tests.qtensor.recipes_under_test import same_bytes
from tests.qtensor.vectors.files import FOLDER, SCHEMES, contents

KEPT = 390_000  # bytes of all files: they are in every wheel
README = (FOLDER / "README.md").read_text(encoding="utf-8")
(READER,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)

# A compilation takes seconds: one recipe of each kind of element and scale.
COMPILED = (
    *("float8_e4m3_row", "float8_e4m3_128x128_pow2"),
    *("mxfp8_e4m3_1x32_up", "nvfp4_1x16", "int4_32", "int8_row", "nf4_32"),
)

every_file = pytest.mark.parametrize("name", SCHEMES)


def read(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The recipe, and the tensors of each case, without the reader."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        cases: dict[str, dict[str, Tensor]] = {case: {} for case in json.loads(metadata["cases"])}
        for key in file.keys():  # noqa: SIM118 - not a mapping
            case, _, what = key.partition(".")
            cases[case][what] = file.get_tensor(key)
    return json.loads(metadata["recipe"]), cases


def parts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {what: tensor for what, tensor in tensors.items() if what not in {"input", "values"}}


def test_the_folder_holds_these_files_and_no_more() -> None:
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == {*SCHEMES}
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= KEPT


@every_file
def test_a_file_is_what_the_oracle_writes(name: str) -> None:
    assert (FOLDER / f"{name}.safetensors").read_bytes() == contents(name)


@every_file
def test_qtensor_gives_these_bytes(name: str) -> None:
    record, cases = read(name)
    recipe = Recipe.from_json(record)
    assert recipe.to_json() == record
    for case, tensors in cases.items():
        q = quantize(tensors["input"], recipe)
        assert q.parts().keys() == parts_of(tensors).keys()
        for part, found in q.parts().items():
            assert same_bytes(found, tensors[part]), f"{case}: {part} differs"
        assert same_bytes(q.dequantize(torch.float32), tensors["values"]), f"{case}: values differ"
        read_back = QuantizedTensor.from_parts(parts_of(tensors), recipe, torch.float32)
        assert same_bytes(read_back.dequantize(), tensors["values"]), f"{case}: values of the parts differ"


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernels_give_these_bytes(name: str) -> None:
    record, cases = read(name)
    recipe = Recipe.from_json(record)
    with use_kernels("compiled"):
        for case, tensors in cases.items():
            q = quantize(tensors["input"], recipe)
            for part, found in q.parts().items():
                assert same_bytes(found, tensors[part]), f"{case}: {part} differs"
            assert same_bytes(q.dequantize(torch.float32), tensors["values"]), f"{case}: values differ"


@every_file
def test_the_reader_of_the_readme_reads_a_file(name: str) -> None:
    assert len(READER.strip().splitlines()) <= 11
    names: dict[str, Any] = {}
    exec(READER, names)
    record, cases = read(name)
    found = {case: (recipe, tensors) for case, recipe, tensors in names["cases"](FOLDER / f"{name}.safetensors")}
    assert [*found] == [*cases]
    for case, (recipe, tensors) in found.items():
        assert recipe == record
        assert tensors.keys() == cases[case].keys()
        assert all(same_bytes(tensors[what], cases[case][what]) for what in tensors)


def test_the_package_is_where_the_readme_says() -> None:
    assert Path(str(files("qtensor.vectors"))) == FOLDER


def test_the_readme_names_each_case_and_each_part() -> None:
    told = set(re.findall(r"`(\w+)`", README)) | set(re.findall(r"`<case>\.(\w+)`", README))
    for name in SCHEMES:
        for case, tensors in read(name)[1].items():
            assert case in told or re.sub(r"_\d+$", "", case) in told, case
            assert tensors.keys() <= told


def test_the_page_has_the_reader_of_the_readme() -> None:
    assert page("numerics.md").python[0].text == READER
