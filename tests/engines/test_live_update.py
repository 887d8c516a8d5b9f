"""A running vLLM takes a version of the weights from two FSDP2 ranks, and is then what a fresh load of it is.

The digest of what the engine holds, its fused linears cut apart, is that of the trainer's model, of the stream, and of
the export that the trainer writes of the same step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from dcp_adapters import HeldVersion, SharedMemorySender, WeightStream, delta_to_bytes, digest, export_hf
from dcp_adapters.digests.engine import unfuse
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize_,
)
from tests.engines.engine import Engine, unavailable
from tests.engines.models import PROMPT, cut_model
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPES: dict[str, Any] = {
    "fp8_row": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
# Names of vLLM for what ModelOpt's files have.
RENAMED = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}
INPUTS = 0.01  # NVFP4 runs with scales of inputs only, see test_layouts.py


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("engine")) as started:
        started.environment("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0")  # else it keeps no bytes of MXFP8
        yield started


def state_of(model: torch.nn.Module, recipe: Any) -> dict[str, Any]:
    """What is sent and exported: for NVFP4 with the scales of inputs."""
    state = dict(model.state_dict())
    if isinstance(recipe, NVFP4BlockScaling):
        scales = {f"{name.removesuffix('weight')}input_scale" for name in state if name.endswith("_proj.weight")}
        state |= dict.fromkeys(sorted(scales), torch.tensor(INPUTS))
    return state


def options_of(recipe: Any) -> dict[str, str]:
    """ModelOpt's layout holds NVFP4's scales as we do, so that the engine's can be compared."""
    return {"layout": "modelopt", "fused_scales": "requantize"} if isinstance(recipe, NVFP4BlockScaling) else {}


def sharded(recipe: Any) -> LlamaForCausalLM:
    """The model over all ranks."""
    model = cut_model()
    quantize_(model, recipe, exclude=("lm_head",))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model: LlamaForCausalLM) -> None:
    """A step of the optimizer that moves codes."""
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    model(PROMPT).logits.float().square().mean().backward()
    optimizer.step()


def _train_and_send(name: str, after: str, address: str) -> str:
    """A rank: makes a step, streams, and exports the same; the digest of its model."""
    recipe = RECIPES[name]
    model = sharded(recipe)
    options = {"config": model.config, **options_of(recipe)}
    step(model)
    stream = WeightStream(state_of(model, recipe), bucket_bytes=2**20, **options)
    assert len(stream.sizes) > 3
    if torch.distributed.get_rank() == 0:
        with SharedMemorySender(address, timeout=240) as sender:
            stream.send(sender)
    else:
        stream.send(None)
    export_hf(state_of(model, recipe), after, progress=False, **options)
    return digest(model)


def _train_and_compare(name: str, before: str, after: str) -> bytes | None:
    """A rank: a delta of one step, on rank 0; and exports of both versions."""
    recipe = RECIPES[name]
    model = sharded(recipe)
    config = model.config
    export_hf(model, before, config=config, progress=False)
    held = HeldVersion(files_of(model), version=0)
    step(model)
    delta = held.since(files_of(model), version=1)
    export_hf(model, after, config=config, progress=False)
    return None if delta is None else delta_to_bytes(delta)


def files_of(model: torch.nn.Module) -> dict[str, Any]:
    """Without what is tied, which files leave out."""
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def held_by(engine: Engine, path: Path) -> dict[str, Tensor]:
    """The engine's tensors under the names of the export."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    rows = {name.removesuffix(".weight"): shape[0] for name, shape in shapes.items() if name.endswith("_proj.weight")}
    tensors = {}
    for name, tensor in engine.weights().items():
        module, _, own = name.rpartition(".")
        tensors[f"{module}.{RENAMED.get(own, own)}"] = tensor
    # Its kernel for scales of rows multiplies by [K, N].
    turned = [name for name in tensors if name.endswith("_proj.weight") and f"{name}_scale" in tensors]
    turned = [name for name in turned if tensors[f"{name}_scale"].shape[1:] == (1,)]
    found = unfuse(tensors, rows, turned=turned)
    assert shapes.keys() <= found.keys()
    return {name: found[name].reshape(shape) for name, shape in shapes.items()}


def out_of(engine: Engine) -> dict[str, Any]:
    return engine.generate(PROMPT[0].tolist(), 12)


@pytest.mark.parametrize("name", RECIPES)
def test_a_streamed_version_is_a_fresh_load_of_it(engine: Engine, shared_tmp_path: Path, name: str) -> None:
    before, after, address = (shared_tmp_path / each for each in ("before", "after", "link"))
    model = cut_model()
    quantize_(model, RECIPES[name], exclude=("lm_head",))
    options = {"config": model.config, **options_of(RECIPES[name])}
    export_hf(state_of(model, RECIPES[name]), before, progress=False, **options)
    engine.load(str(before))
    old = out_of(engine)
    config = json.loads((before / "config.json").read_text())
    assert digest(held_by(engine, before), config=config) == digest(before)

    engine.tell("update", str(address))
    trained = run_ranks(2, _train_and_send, name, str(after), str(address), timeout=280)
    engine.answer()
    assert len(set(trained)) == 1
    found = held_by(engine, after)
    assert digest(found, config=config) == digest(after)
    assert digest(after) != digest(before)
    if not isinstance(RECIPES[name], NVFP4BlockScaling):  # there, scales of q, k, v were made one for the export
        assert trained[0] == digest({**found, "lm_head.weight": found["model.embed_tokens.weight"]}, config=config)
    new = out_of(engine)
    assert not torch.equal(new["logits"], old["logits"])

    engine.load(str(after))
    fresh = out_of(engine)
    assert fresh["tokens"] == new["tokens"]
    assert torch.equal(fresh["logits"], new["logits"])


@pytest.mark.parametrize("name", ["fp8_row", "mxfp8"])
def test_a_delta_brings_an_engine_to_the_next_version(engine: Engine, shared_tmp_path: Path, name: str) -> None:
    pytest.importorskip("backports.zstd", reason="deltas are compressed with zstd, see the extra `delta`")
    before, after = shared_tmp_path / "before", shared_tmp_path / "after"
    message, _ = run_ranks(2, _train_and_compare, name, str(before), str(after), timeout=280)
    engine.load(str(before))
    old = out_of(engine)
    engine.update_by_delta(str(before), message)
    config = json.loads((before / "config.json").read_text())
    assert digest(held_by(engine, after), config=config) == digest(after) != digest(before)
    new = out_of(engine)
    assert not torch.equal(new["logits"], old["logits"])
    engine.load(str(after))
    fresh = out_of(engine)
    assert fresh["tokens"] == new["tokens"]
    assert torch.equal(fresh["logits"], new["logits"])
