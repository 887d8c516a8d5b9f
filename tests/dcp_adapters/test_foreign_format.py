"""Checkpoints, checks and commands for a format that they were not written for (tests/qtensor/foreign.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcp_adapters.cli.main import main
from dcp_adapters.hf.layouts.layout import KINDS
from dcp_adapters.records.recipe_names import find_target, recipe_label
from dcp_adapters.stored.part_values import WITHOUT_NAN, _not_finite, holds_nan
from dcp_adapters.stored.verifying.verify import verify
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.spec.format import PartSpec
from qtensor.spec.registry import specs_of
from tests.dcp_adapters.cases import assert_holds, load, save, values
from tests.qtensor.foreign import SCALES, foreign_format


@pytest.fixture
def foreign() -> Iterator[Any]:
    with foreign_format() as recipe:
        yield recipe


def state(recipes: list[Any], seed: int) -> dict[str, Any]:
    return {f"{i}.weight": quantize(values((64, 256), seed + i), recipe) for i, recipe in enumerate(recipes)}


def test_it_is_saved_loaded_verified_and_reported(
    foreign: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = [foreign(scales=scales) for scales in SCALES]
    full = state(recipes, 0)
    save(full, tmp_path / "q")
    found = state(recipes, 9)
    load(found, tmp_path / "q")
    assert_holds(found, full)
    assert verify(tmp_path / "q").findings == ()
    assert main(["inspect", str(tmp_path / "q")]) == 0
    assert "Foreign128(scales='bf16')" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "q"), "-o", str(tmp_path / "page.html")]) == 0
    assert "Foreign128" in (tmp_path / "page.html").read_text()


def test_its_last_block_of_a_row_may_be_smaller(foreign: Any, tmp_path: Path) -> None:
    full = {"w": quantize(values((64, 200), 0), foreign(scales="tail"))}
    save(full, tmp_path / "a")
    found = {"w": quantize(values((64, 200), 1), foreign(scales="tail"))}
    load(found, tmp_path / "a")
    assert_holds(found, full)
    assert verify(tmp_path / "a").findings == ()
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "page.html")]) == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "float8-row", "--no-progress"]) == 0
    back = ["--to", "Foreign128", "--option", "scales=tail", "--no-progress"]
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), *back]) == 0
    assert verify(tmp_path / "c").findings == ()


def test_it_is_named_on_the_command_line(foreign: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_target("Foreign128", {"scales": "bf16"}) == foreign(scales="bf16")
    assert recipe_label(foreign()) == "Foreign128(scales='bytes')"
    with pytest.raises(ValueError, match=r"unknown recipe 'foreign'; this version knows .*, Foreign128, bfloat"):
        find_target("foreign")
    save({"w": quantize(values((64, 256), 0), MXFP8BlockScaling())}, tmp_path / "a")
    there = ["--to", "Foreign128", "--option", "scales=bf16", "--no-progress"]
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), *there]) == 0
    assert "1 tensors converted to Foreign128(scales='bf16')" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "bfloat16", "--no-progress"]) == 0
    assert verify(tmp_path / "c").findings == ()


def test_forgotten_again_it_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'Foreign128'"):
        find_target("Foreign128")


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[3, 5] = float("nan")
    return x


def test_nan_is_judged_by_the_specs_of_the_parts(foreign: Any) -> None:
    ours = [*KINDS.values(), MXFP8BlockScaling(element="e5m2"), Float8CurrentScaling(element="e5m2")]
    for recipe in [*ours, NVFP4BlockScaling(blocks="square"), *(foreign(scales=scales) for scales in SCALES)]:
        # of many values, so that every code occurs that a healthy tensor may hold
        x = values((512, 256), 1, torch.float32).bfloat16()
        assert not holds_nan(recipe, quantize(x, recipe).parts()), recipe
        assert holds_nan(recipe, quantize(with_nan(x), recipe).parts()), recipe


def test_what_only_a_part_tells_is_found(foreign: Any) -> None:
    """Damage that no quantizing leaves: one part says NaN, the others do not."""
    x = values((64, 256), 1)
    for recipe, part in (
        (MXFP8BlockScaling(), "payload"),
        (MXFP8BlockScaling(), "scale"),
        (Float8CurrentScaling(), "scale"),
        (NVFP4BlockScaling(), "global_scale"),
        (foreign(scales="bf16"), "spread"),
    ):
        q = quantize(x, recipe)
        assert isinstance(q, QuantizedTensor)
        parts = {name: data.clone() for name, data in q.parts().items()}
        parts[part].view(-1).view(torch.uint8).fill_(0xFF)
        assert holds_nan(recipe, parts), (recipe, part)


def test_each_code_of_one_byte_is_judged_as_torch_judges_it() -> None:
    """Alone, in the last place of a part of more than one piece."""
    recipes = [MXFP8BlockScaling(), MXFP8BlockScaling(element="e5m2"), NVFP4BlockScaling()]
    specs = [spec for recipe in recipes for spec in specs_of(recipe) if spec.dtype.itemsize == 1]
    dtypes = {spec.numbers for spec in specs if spec.numbers is not None} - WITHOUT_NAN
    assert dtypes == {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}
    for numbers in (*dtypes, torch.float8_e4m3fnuz):  # the NaN of the last is the code of the other formats' -0
        spec = PartSpec("part", torch.uint8, codes=numbers)
        part = torch.zeros(2**18 + 24, dtype=torch.uint8, device="cpu")
        for code in range(256):
            part[-1] = code
            finite = bool(part[-1:].view(numbers).float().isfinite())
            assert _not_finite(spec, part) is not finite, (numbers, code)
        assert not _not_finite(spec, part[:0])
