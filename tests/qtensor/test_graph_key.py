"""Compiled graphs in torch's cache on disk: one of another weight, or of other code of ours, is never taken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_hooks.release import VERSION
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize, quantized_model_init
from qtensor.graph_key import HERE, code_digest
from tests.qtensor.recipes_under_test import RECIPES

INPUT = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def values(rows: int = 32) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))


def parameter(recipe: Any = None, rows: int = 32, *, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(quantize(values(rows), recipe or MXFP8BlockScaling()), requires_grad=trained)


def in_high_precision(recipe: Any, rows: int = 32) -> nn.Parameter:
    with quantized_model_init(recipe, storage="high_precision"):
        return nn.Linear(64, rows, bias=False).weight


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that begins empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


def compiled(weight: nn.Parameter) -> tuple[Tensor, Tensor | None, str]:
    """Output, the weight's gradient, and how a process that has compiled nothing yet came to the graph."""
    torch.compiler.reset()  # what is in memory, not what is on disk
    counters.clear()
    x = INPUT.clone().requires_grad_()
    y = torch.compile(lambda x, w: F.linear(x, w).square(), fullgraph=True)(x, weight)
    y.sum().backward()
    (found,) = [name for name in counters["aot_autograd"] if name in ("autograd_cache_hit", "autograd_cache_miss")]
    return y, weight.grad, found.removeprefix("autograd_cache_")


WEIGHTS: dict[str, nn.Parameter] = {
    "first": parameter(),
    "frozen": parameter(trained=False),
    "more rows": parameter(rows=48),
    "of another recipe": parameter(Float8CurrentScaling()),
    "of another element": parameter(Float8CurrentScaling(element="e5m2")),
    "of other blocks": parameter(MXFP8BlockScaling(blocks="square")),
}


@pytest.mark.usefixtures("on_disk")
def test_a_graph_of_another_weight_is_never_taken() -> None:
    for name, weight in WEIGHTS.items():
        weight.grad = None
        y, grad, found = compiled(weight)
        assert found == "miss", name
        assert torch.allclose(y, F.linear(INPUT, weight.detach().dequantize()).square(), rtol=1e-5), name
        assert (grad is None) == (not weight.requires_grad), name
        if grad is not None:
            assert grad.shape == weight.shape, name
    for name, weight in WEIGHTS.items():  # and the right one is
        assert compiled(weight)[2] == "hit", name


def keys() -> dict[str, str]:
    """Weights that differ in one thing each."""
    plain: dict[str, Any] = {f"{recipe}": parameter(recipe) for recipe in RECIPES.values()}
    plain |= {
        "frozen": WEIGHTS["frozen"],
        "more rows": WEIGHTS["more rows"],
        "bf16": quantize(values().bfloat16(), NVFP4BlockScaling()),
        "meta": quantize(values().to("meta"), NVFP4BlockScaling()),
        "a view": quantize(values(), NVFP4BlockScaling())[:16],
        "16 rows": quantize(values(16), NVFP4BlockScaling()),
        "turned": quantize(values(), NVFP4BlockScaling()).t(),
        "dense": in_high_precision(NVFP4BlockScaling()),
        "dense, more rows": in_high_precision(NVFP4BlockScaling(), 48),
        "dense, frozen": in_high_precision(NVFP4BlockScaling()).requires_grad_(False),
    }
    return {name: weight._stable_hash_for_caching() for name, weight in plain.items()}


def test_whatever_a_trace_depends_on_is_in_the_key() -> None:
    found = keys()
    assert len({*found.values()}) == len(found)
    assert found == keys()


def test_the_key_changes_with_our_code(tmp_path: Path) -> None:
    copies = tuple(Path(shutil.copytree(package, tmp_path / package.name)) for package in HERE)
    before = code_digest(copies)
    assert before == code_digest(HERE)
    assert code_digest(HERE) in parameter()._stable_hash_for_caching()
    file = copies[0] / "codecs" / "e2m1.py"
    file.write_text(file.read_text().replace("4.0", "5.0") + "\n")
    code_digest.cache_clear()
    assert code_digest(copies) != before
    file.rename(file.with_name("other.py"))
    code_digest.cache_clear()
    assert code_digest(copies) != before


def test_without_files_the_version_takes_their_place(tmp_path: Path) -> None:
    assert code_digest((tmp_path,)) == VERSION
