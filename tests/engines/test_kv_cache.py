"""Calibrated scales of a KV cache in vLLM: it holds ours, by the names that each layout has in a file.

Its FP8 cache itself wants AVX-512 on a CPU, so the cache stays in bf16 here; scales of heads want FlashAttention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from dcp_adapters import export_hf
from layerwise import KVCache, calibrate
from qtensor import Float8CurrentScaling
from tests.engines.engine import Engine, unavailable
from tests.engines.models import BATCHES, LAYERS, PROMPT, cut_model

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("engine")) as started:
        yield started


def test_vllm_holds_the_scales(engine: Engine, tmp_path: Path) -> None:
    model = cut_model()
    result = calibrate(copy.deepcopy(model), BATCHES, recipe=Float8CurrentScaling(), kv_cache=KVCache(), progress=False)
    names = {
        f"model.layers.{layer}.self_attn.{own}_scale": f"model.layers.{layer}.self_attn.attn._{own}_scale"
        for layer in range(LAYERS)
        for own in "kv"
    }
    export_hf(result, tmp_path / "ct", rest=model, config=model.config, progress=False)
    engine.load(str(tmp_path / "ct"), kv_cache_dtype="bfloat16")
    held = engine.weights()
    for ours, theirs in names.items():
        assert torch.equal(held[theirs].reshape(()), result.state_dict()[ours]), ours
    assert len(engine.generate(PROMPT[0].tolist(), 4)["tokens"]) == 4
    export_hf(result, tmp_path / "opt", layout="modelopt", rest=model, config=model.config, progress=False)
    stored = {
        f"model.layers.{layer}.self_attn.{own}_proj.{own}_scale": f"model.layers.{layer}.self_attn.attn.{own}_scale"
        for layer in range(LAYERS)
        for own in "kv"
    }
    assert engine.cache_scales(str(tmp_path / "opt")) == stored
