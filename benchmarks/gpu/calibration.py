"""How many seconds does the calibration of a layer of Llama-3-8B take, by algorithm?

transformers' LlamaForCausalLM with random weights in bf16, `fully_shard` on each layer and the root, 16 sequences of
2,048 tokens, NVFP4. The first of two layers also compiles; what the later one takes counts.
"""

import importlib.util
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from benchmarks.gpu.step import alone
from layerwise import AWQ, GPTQ, Algorithm, Event, Max, calibrate
from qtensor import NVFP4BlockScaling

SECONDS = 60
ALGORITHMS: dict[str, Algorithm] = {"Max": Max(), "GPTQ": GPTQ(), "AWQ": AWQ()}
LAYERS = 2
AIMS: tuple[Aim, ...] = ()


def rows(scale: Scale) -> Iterator[Row]:
    """Cheap ones first."""
    if importlib.util.find_spec("transformers") is None:
        yield Row("calibrate", skipped="transformers is not installed")
        return
    with alone(scale) as mesh:
        for name, algorithm in ALGORITHMS.items():
            yield tried(name, partial(_measured, scale, mesh, algorithm))


def _measured(scale: Scale, mesh: DeviceMesh, algorithm: Algorithm) -> Figures:
    model = _model(scale, mesh)
    tokens = scale.tokens // 2
    data = [torch.randint(0, scale.vocabulary, (1, tokens), device=scale.device) for _ in range(scale.samples)]
    starts: list[float] = []

    def note(event: Event) -> None:
        if event.kind == "layer_start":
            scale.wait()
            starts.append(time.perf_counter())

    began = time.perf_counter()
    calibrate(
        model,
        [{"input_ids": each, "use_cache": False, "logits_to_keep": 1} for each in data],
        recipe=NVFP4BlockScaling(),
        algorithm=algorithm,
        exclude=("lm_head",),
        on_event=note,
        progress=False,
    )
    scale.wait()
    ended = time.perf_counter()
    return {"first layer s": starts[1] - starts[0], "later layer s": ended - starts[-1], "whole s": ended - began}


def _model(scale: Scale, mesh: DeviceMesh) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.groups,
        dtype=torch.bfloat16,
    )
    with torch.device(scale.device):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
