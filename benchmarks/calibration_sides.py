"""The contenders of benchmarks/calibration.py: the same model, data and algorithm, calibrated by us and by ModelOpt.

    nvfp4_max   NVFP4, scales from the amax of weights; the amax of every linear's input is taken as well
    fp8_gptq    FP8 with one scale a weight, GPTQ (damping 0.01, blocks of 128 columns); inputs stay as they are

Both sides quantize every linear of the decoder layers and leave the output projection alone. What they leave behind
differs. Our side leaves the quantized bytes, and their values in the model's weights. ModelOpt's `max` leaves scales
beside untouched weights, which its fake quantizers would round in every forward (in NVFP4 only on a GPU); rounding them
once is timed by itself, as "store". Its GPTQ writes the rounded values, and no bytes.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import qtensor as qt
from benchmarks.live_storages import LiveStorages

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import smollm2  # noqa: E402

Task = Literal["nvfp4_max", "fp8_gptq"]
Side = Literal["layerwise", "at once", "modelopt"]
RECIPES = {"nvfp4_max": qt.NVFP4BlockScaling(), "fp8_gptq": qt.Float8CurrentScaling(granularity="tensor")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One calibration.

    Attributes:
        layers: how many decoder layers, the first ones, exist while it runs.
        batches: of one row of `seq_len` tokens each.
        measure: the "time" it takes, the "memory" it takes, or its "result": held-out perplexity and the weights, which
            are saved in the file `out`.
    """

    task: Task
    side: Side
    layers: int
    batches: int
    seq_len: int = 256
    measure: Literal["time", "memory", "result"] = "time"
    eval_blocks: int = 24
    out: str = ""


@functools.cache
def pretrained() -> nn.Module:
    """SmolLM2-135M in fp32; copied for every job."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(smollm2.config()).float().eval()
    params = dict(model.named_parameters())
    with torch.no_grad():
        for fqn, weight in smollm2.iter_weights(params):
            params[fqn].copy_(weight)
    return model


@functools.cache
def blocks(seq_len: int, split: Literal["train", "heldout"] = "train") -> Tensor:
    """Real text, int64 [n, seq_len]."""
    return smollm2.token_blocks(smollm2.tokenizer(), seq_len, split=split)


def batches(job: Job) -> list[dict[str, Any]]:
    """What the model is called with; only one logit is computed, so that no side pays for the output projection."""
    rows = blocks(job.seq_len)[: job.batches]
    return [{"input_ids": row[None], "use_cache": False, "logits_to_keep": 1} for row in rows]


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Perplexity on `rows` [n, seq_len]."""
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss for row in rows]
    return math.exp(torch.stack(losses).mean().item())


def algorithm(task: Task) -> Any:
    """Our side's algorithm: for GPTQ, what ModelOpt's does."""
    from layerwise import GPTQ, Max

    return GPTQ(damping=0.01, act_order=False, scales=Max()) if task == "fp8_gptq" else Max()


def calibrate_ours(model: nn.Module, job: Job, data: list[dict[str, Any]] | None = None) -> None:
    """Our side; "at once" makes the whole model one stage. Without `data` it takes all batches of the job."""
    from layerwise import calibrate

    calibrate(
        model,
        batches(job) if data is None else data,
        recipe=RECIPES[job.task],
        algorithm=algorithm(job.task),
        layers=() if job.side == "at once" else None,
        exclude=("lm_head",),
        inputs="static" if job.task == "nvfp4_max" else "dynamic",
        progress=False,
    )


def modelopt_config(task: Task) -> dict[str, Any]:
    """ModelOpt's own preset, with the algorithm layer by layer; GPTQ without quantizers of inputs."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG if task == "fp8_gptq" else mtq.NVFP4_DEFAULT_CFG)
    config["algorithm"] = {"method": task.rpartition("_")[2], "layerwise": {"enable": True}}
    if task == "fp8_gptq":
        config["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    return config


def calibrate_modelopt(model: nn.Module, job: Job) -> None:
    """The peer, in its layerwise mode; fails if it did not do its work."""
    import modelopt.torch.quantization as mtq

    data, config = batches(job), modelopt_config(job.task)

    def forward_loop(model: nn.Module) -> None:
        for batch in data:
            model(**batch)

    mtq.quantize(model, config, forward_loop=forward_loop)


def quantized_linears(model: nn.Module) -> dict[str, Any]:
    """The linears that ModelOpt quantizes."""
    found = {name: module for name, module in model.named_modules() if hasattr(module, "weight_quantizer")}
    return {name: module for name, module in found.items() if module.weight_quantizer.is_enabled}


@torch.no_grad()
def store_modelopt(model: nn.Module, job: Job) -> None:
    """Write into the weights what ModelOpt's scales round them to, and switch its quantizers off."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    linears = quantized_linears(model)
    for module in linears.values() if job.task == "nvfp4_max" else ():
        shared = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(module.weight_quantizer)
        stored, scales, shared = NVFP4QTensor.quantize(module.weight.data, 16, weights_scaling_factor_2=shared)
        how = {"scale": scales, "double_scale": shared, "block_sizes": {-1: 16}, "fast": False}
        module.weight.copy_(stored.dequantize(dtype=module.weight.dtype, **how))
    for module in linears.values():
        module.weight_quantizer.disable()
        module.input_quantizer.disable()


def check_modelopt(model: nn.Module, job: Job) -> None:
    """Raises unless every linear has what the algorithm leaves behind."""
    linears, before = quantized_linears(model), dict(pretrained().named_parameters())
    if len(linears) != 7 * job.layers:
        raise RuntimeError(f"ModelOpt quantized {len(linears)} linears of {job.layers} layers, expected 7 in each")
    for name, module in linears.items():
        written = not torch.equal(module.weight, before[f"{name}.weight"])
        if written != (job.task == "fp8_gptq"):
            raise RuntimeError(f"ModelOpt's {job.task}: {name}.weight is {'' if written else 'not '}written")
        if job.task == "nvfp4_max" and module.input_quantizer.amax is None:
            raise RuntimeError(f"ModelOpt's {job.task}: {name} has no amax of its input")


@contextlib.contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Only the first `count` decoder layers exist inside."""
    layers = model.model.layers
    model.model.layers = nn.ModuleList(list(layers)[:count])
    yield
    for number, layer in enumerate(model.model.layers):
        layers[number] = layer
    model.model.layers = layers


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Seconds on the wall and of all threads together."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def perform(job: Job) -> dict[str, Any]:
    """Does one job on a fresh copy of the model and says what was measured."""
    model = copy.deepcopy(pretrained())
    answer: dict[str, Any] = {}
    peer = job.side == "modelopt"
    calibrate = calibrate_modelopt if peer else calibrate_ours
    batches(job)  # tokenized before the clock starts
    with first_layers(model, job.layers):
        if job.measure == "memory":
            with LiveStorages(except_for=model.state_dict().values()) as live:
                calibrate(model, job)
            answer["peak_bytes"] = live.peak
        else:
            answer["calibrate"] = timed(lambda: calibrate(model, job))
        if peer:
            check_modelopt(model, job)
            answer["store"] = timed(lambda: store_modelopt(model, job))
    if job.measure == "result":
        answer["perplexity"] = perplexity(model, blocks(job.seq_len, "heldout")[: job.eval_blocks])
        linears = {f"{name}.weight" for name, child in model.named_modules() if "proj" in name.rpartition(".")[2]}
        torch.save({name: p.detach() for name, p in model.named_parameters() if name in linears}, job.out)
    return answer
