"""Exports in vLLM, layout by layout: it holds our bytes, its linears make our products, its logits are transformers'.

What its build for CPUs cannot run is here as well, with vLLM's own error: the test fails when that begins to work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")

import torch

from examples import smollm2
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from qtensor.spec.recipes import Recipe
from tests.engines.engine import Engine, EngineError, unavailable
from tests.engines.models import FACTOR, LAYERS, PROMPT, Written, cut_model, error, logits_of, written

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TENSOR = Float8CurrentScaling(granularity="tensor")
NVFP4 = NVFP4BlockScaling()


@dataclass(frozen=True)
class Case:
    """A layout. inputs: whether vLLM quantizes the inputs of linears here. static: under scales from a calibration."""

    recipe: Recipe | None
    layout: str = "compressed-tensors"
    static: bool = False
    inputs: bool = False


RUN = {
    "dense": Case(None),
    "fp8_row": Case(Float8CurrentScaling(), inputs=True),
    "fp8_row_modelopt": Case(Float8CurrentScaling(), "modelopt", inputs=True),
    "mxfp8": Case(MXFP8BlockScaling()),
    "mxfp8_modelopt": Case(MXFP8BlockScaling(), "modelopt"),
    "nvfp4_static": Case(NVFP4, static=True, inputs=True),
    "nvfp4_static_modelopt": Case(NVFP4, "modelopt", static=True, inputs=True),
}
NO_OP = r"static_scaled_fp8_quant\(\) expected at most 0 argument"
NO_MARLIN = "MarlinNvFp4LinearKernel is not supported: Marlin FP4 not available"
# What does not run, and vLLM's reason.
REFUSED = {
    "fp8_tensor": (Case(TENSOR), NO_OP),  # the op is declared, and empty
    "fp8_tensor_static": (Case(TENSOR, static=True), NO_OP),
    "fp8_tensor_modelopt": (Case(TENSOR, "modelopt", static=True), NO_OP),
    # its kernel takes a scale for each token alone
    "fp8_row_static": (Case(Float8CurrentScaling(), static=True), r"narrow\(\) cannot be applied to a 0-dim tensor"),
    "nvfp4": (Case(NVFP4), NO_MARLIN),
    "nvfp4_modelopt": (Case(NVFP4, "modelopt"), NO_MARLIN),
    "mxfp4": (Case(MXFP4BlockScaling()), "Failed to find a kernel that can implement the MXFP4 linear layer"),
    # 576 rows of q_proj are no whole blocks
    "fp8_blocks_ct": (Case(Float8BlockScaling()), "output_partition_size = 576 is not divisible by"),
}
# The same, of CPUs without AMX tiles and without AVX-512, see is_able.
REFUSED_BY_SOME = {
    "fp8_blocks": (Case(Float8BlockScaling(), "fp8"), "Failed to find a kernel that can implement the ScaledMM linear"),
    "int4": (Case(Int4GroupScaling()), "object has no attribute 'cpu_gemm_wna16'"),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return cut_model()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("engine")) as started:
        yield started


@pytest.fixture(scope="module", params=RUN)
def loaded(
    request: pytest.FixtureRequest,
    engine: Engine,
    model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Engine, Case, Written]:
    """Each export in turn, in the engine."""
    case = RUN[request.param]
    path = tmp_path_factory.mktemp("exports") / request.param
    made = written(path, model, case.recipe, case.layout, static=case.static)
    engine.load(str(path))
    return engine, case, made


def members(layer: str) -> list[str]:
    parent, _, own = layer.rpartition(".")
    return [f"{parent}.{name}" for name in FUSED.get(own, (own,))]


def check_logits(made: Written, case: Case, found: torch.Tensor) -> None:
    """As near to exact arithmetic as transformers, see tests/engines/models.py."""
    exact = logits_of(made.reference(exact=True, inputs=case.inputs))[:-1]
    theirs = logits_of(made.reference(exact=False, inputs=case.inputs))[:-1]
    assert found.shape == exact.shape
    room = FACTOR * error(theirs, exact)
    assert 0 < room < 0.2 * float(exact.std())  # a wrong scale or block would not hide in it
    assert error(found, exact) <= room


def check_tokens(made: Written, case: Case, tokens: list[int], prompt: torch.Tensor = PROMPT) -> None:
    """Greedy: no other token is ahead by more than both errors may move it."""
    sequence = torch.cat([prompt, torch.tensor([tokens])], 1)[:, :-1]
    exact = logits_of(made.reference(exact=True, inputs=case.inputs), sequence)
    theirs = logits_of(made.reference(exact=False, inputs=case.inputs), sequence)
    start = prompt.shape[1] - 1
    exact, theirs = exact[start:], theirs[start:]
    chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    room = 2 * FACTOR * (theirs - exact).abs().amax(1)
    assert bool((exact.amax(1) - chosen <= room).all())


def test_the_text_and_its_logits_are_those_of_transformers(loaded: tuple[Engine, Case, Written]) -> None:
    engine, case, made = loaded
    out = engine.generate(PROMPT[0].tolist(), 12)
    check_logits(made, case, out["logits"])
    check_tokens(made, case, out["tokens"])


@pytest.mark.parametrize("layer", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"])
def test_a_linear_makes_our_product(loaded: tuple[Engine, Case, Written], layer: str) -> None:
    """Bit for bit where it multiplies bf16; of codes of Float8 the exact product, but for what sums in fp32 round."""
    engine, case, made = loaded
    for number in range(LAYERS):
        names = members(f"model.layers.{number}.{layer}")
        columns = made.dense.get_submodule(names[0]).in_features
        x = torch.randn(5, columns, generator=torch.Generator().manual_seed(number)).bfloat16()
        found = engine.linear(f"model.layers.{number}.{layer}", x)
        if isinstance(made.recipe, Float8CurrentScaling):
            exact, least, largest = made.products_of_codes(names, x)
            assert bool(((least <= found) & (found <= largest)).all())
            # Errors of K sums add up to about 2^-20 of a value where bf16 numbers are 2^-8 apart: one in 2^11 moves.
            assert float((found == exact).float().mean()) > 1 - 2**-9
        else:
            weights = [
                made.dense.get_submodule(name).weight.detach()
                if made.recipe is None
                else made.weights[name].dequantize(torch.bfloat16)
                for name in names
            ]
            inputs = made.rounded(names[0], x) if case.inputs else x
            assert torch.equal(found, torch.nn.functional.linear(inputs, torch.cat(weights)))


@pytest.mark.parametrize("name", REFUSED | REFUSED_BY_SOME)
def test_what_does_not_run_says_why(
    engine: Engine, model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    case, reason = (REFUSED | REFUSED_BY_SOME)[name]
    path = tmp_path_factory.mktemp("refused") / name
    made = written(path, model, case.recipe, case.layout, static=case.static)

    def run() -> torch.Tensor:
        try:
            engine.load(str(path))
            return engine.generate(PROMPT[0].tolist(), 2)["logits"]
        finally:
            engine.unload()

    if name in REFUSED or not is_able(name):
        with pytest.raises(EngineError, match=reason):
            run()  # where it runs now: move it to RUN, and tell of it in docs/export.md
    else:
        check_logits(made, case, run())


def is_able(name: str) -> bool:
    """Whether this CPU has what vLLM's kernel for it takes, as Linux tells it."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if Path("/proc/cpuinfo").exists() else []
    return {"fp8_blocks": "amx_tile", "int4": "avx512f"}[name] in flags


def test_the_real_model_makes_the_text_of_its_weights(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> None:
    """SmolLM2, all of it, in MXFP8."""
    case = RUN["mxfp8"]
    path = tmp_path_factory.mktemp("real") / "mxfp8"
    made = written(path, cut_model(None, None), case.recipe, case.layout, static=False)
    tokenizer = smollm2.tokenizer()
    prompt = torch.tensor([tokenizer("The capital of France is").input_ids])
    engine.load(str(path))
    tokens = engine.generate(prompt[0].tolist(), 12, logits=False)["tokens"]
    assert "Paris" in tokenizer.decode(tokens)
    check_tokens(made, case, tokens, prompt)
