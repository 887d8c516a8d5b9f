"""Does learned rounding pay? Codes that are trained between two neighbours, beside GPTQ and Qronos with descent.

    python -m benchmarks.learned_rounding             # SmolLM2-135M, rotated, in NVFP4; seven minutes of one core

As AdaRound, and FAAR for NVFP4, do it: a value is low + h (high - low), between two neighbours of the grid, with
h = clip(1.2 sigmoid(v) - 0.1, 0, 1). Adam trains v to make an error small, and from a fifth of the steps on a penalty,
WEIGHT * (1 - |2 h - 1|^beta) with beta from 20 to 2, drives every h to 0 or 1. Scales are those of LocalHessian.

    linears    of one layer, each group by itself: tr(E^T H E), as GPTQ has it (damped), E = Q - W; judged with the
               Hessian of held-out tokens, as SNR of the output in dB
    layers     the first ones, one after the other: all codes of a layer together, from those of Qronos, on the squared
               error of its output (to the dense model's, on the inputs that it gets now); judged by that output, and
               by the KL of the model, whose other layers are dense

What is measured is written at once, and a later run adds what the file lacks. What follows from it:
docs/decisions/0009-no-learned-rounding.md.
"""

import argparse
import copy
import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks import dense_models
from benchmarks.calibration_sides import first_layers
from benchmarks.evaluation import Questions
from benchmarks.learned_rounding_linears import (
    ALONE,
    BATCH,
    GRID,
    RATE,
    RECIPE,
    ROWS,
    WEIGHT,
    Learned,
    decibels,
    of_linears,
)
from benchmarks.machine import machine_and_versions
from layerwise import LocalHessian, Qronos, calibrate
from qtensor import QuantizedTensor

RESULTS = Path(__file__).parent / "results"
DESCENTS = (1, 4)
START = "Qronos, descent 1"  # whose codes are where learning begins
BEGIN = 0.05  # h of those codes
States = list[Tensor]  # hidden states, batch by batch


@torch.no_grad()
def states_of(model: Any, rows: Tensor) -> tuple[States, dict[str, Any]]:
    """What reaches the first layer, and what it is called with beside that."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []
    first = model.model.layers[0]
    hook = first.register_forward_pre_hook(lambda _, args, kw: calls.append((args[0], kw)), with_kwargs=True)
    for ids in rows.split(BATCH):
        model.model(input_ids=ids, use_cache=False)
    hook.remove()
    context = {name: value for name, value in calls[0][1].items() if name not in ("past_key_values", "use_cache")}
    return [states for states, _ in calls], context


def output(layer: nn.Module, x: Tensor, context: dict[str, Any], params: Mapping[str, Tensor] | None = None) -> Tensor:
    found = functional_call(layer, dict(params or {}), (x,), context)
    states: Tensor = found[0] if isinstance(found, tuple) else found
    return states


@torch.no_grad()
def through(layer: nn.Module, states: States, context: dict[str, Any]) -> States:
    return [output(layer, x, context) for x in states]


def squared(these: States, others: States) -> float:
    return sum(float((a - b).double().square().sum()) for a, b in zip(these, others, strict=True))


def neighbours(stored: QuantizedTensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Stored values, and what leads from each to the next one on the side of the dense weight."""
    values, parts = stored.dequantize(torch.float32), stored.parts()
    dec = (parts["scale"].float() * parts["global_scale"]).repeat_interleave(16, -1)
    place = torch.searchsorted(GRID, (values / dec - 1e-3).contiguous())
    assert torch.allclose(GRID[place] * dec, values, rtol=1e-5, atol=0)
    beside = torch.where(weight > values, place + 1, place - 1).clamp(0, len(GRID) - 1)
    return values, GRID[beside] * dec - values


def learn(layer: nn.Module, codes: dict[str, Any], states: Sequence[States], context: Any, steps: int) -> float:
    """Trains the codes of a layer, in place, from its inputs and aims; the share that moved to the neighbour."""
    inputs, wanted = states
    others = {name: param.detach() for name, param in layer.named_parameters() if name not in codes}
    count = sum(values.numel() for values, _ in codes.values())
    unit = count / (squared(through(layer, inputs, context), wanted) / len(inputs))
    learned = {name: Learned(torch.full_like(values, BEGIN), steps) for name, (values, _) in codes.items()}
    drawn = torch.Generator(device="cpu").manual_seed(0)
    for number in range(steps):
        at = int(torch.randint(len(inputs), (1,), generator=drawn, device="cpu"))
        h = {name: one.h() for name, one in learned.items()}
        params = {name: (values + h[name] * step).requires_grad_() for name, (values, step) in codes.items()}
        loss = (output(layer, inputs[at], context, params | others) - wanted[at]).square().sum() * unit
        if number % 50 == 0:
            print(f"  step {number}: {loss.item() / count:.4f} of the error at the beginning", flush=True)
        slopes = torch.autograd.grad(loss, list(params.values()))
        for name, slope in zip(codes, slopes, strict=True):
            learned[name].take(slope * codes[name][1], h[name])
    moved = {name: one.h() > 0.5 for name, one in learned.items()}
    with torch.no_grad():
        for name, (values, step) in codes.items():
            layer.get_parameter(name).copy_(values + moved[name] * step)
    return sum(float(one.sum()) for one in moved.values()) / count


def calibrated(dense: Any, train: Tensor, descent: int) -> tuple[Any, dict[str, Any], float]:
    """The layers, what is stored of them, CPU seconds."""
    began, model = time.process_time(), copy.deepcopy(dense)
    batches = [{"input_ids": ids, "use_cache": False, "logits_to_keep": 1} for ids in train.split(8)]
    algorithm = Qronos(scales=LocalHessian(), descent=descent)
    done = calibrate(model, batches, recipe=RECIPE, algorithm=algorithm, exclude=("lm_head",), progress=False)
    return model.model.layers, dict(done.state_dict()), time.process_time() - began


def of_layers(dense: Any, train: Tensor, held_out: Tensor, steps: int, count: int) -> dict[str, Any]:
    """Way -> SNR after each layer, KL and loss of each held-out row, CPU seconds."""
    every, out = list(dense.model.layers), {}
    chains, stored = {}, {}
    with first_layers(dense, count):
        (states, context), (others, _) = states_of(dense, train), states_of(dense, held_out)
        for descent in DESCENTS:
            way = f"Qronos, descent {descent}"
            chains[way], stored[way], seconds = calibrated(dense, train, descent)
            out[way] = {"cpu_seconds": round(seconds, 1)}
    wanted = now = states
    learned, moved, began = [], [], time.process_time()
    for index, (plain, begin) in enumerate(zip(every[:count], chains[START], strict=True)):
        prefix = f"model.layers.{index}."
        of = {name.removeprefix(prefix): one for name, one in stored[START].items() if name.startswith(prefix)}
        codes = {name: neighbours(weight, plain.get_parameter(name).detach()) for name, weight in of.items()}
        wanted, layer = through(plain, wanted, context), copy.deepcopy(begin)
        moved.append(learn(layer, codes, (now, wanted), context, steps))
        learned.append(layer)
        now = through(layer, now, context)
    chains["learned"] = learned
    out["learned"] = {"cpu_seconds": round(time.process_time() - began, 1), "moved": moved}
    questions = Questions(held_out, dense)
    for way, layers in chains.items():
        for text, first in (("calibration_db", states), ("held_out_db", others)):
            out[way][text] = snrs(every, layers, first, context)
        dense.model.layers = nn.ModuleList([*layers, *every[count:]])
        out[way] |= questions.asked(dense)
        print(way, {name: figures for name, figures in out[way].items() if name.endswith("_db")}, flush=True)
    dense.model.layers = nn.ModuleList(every)
    return out


def snrs(dense: Sequence[nn.Module], layers: Sequence[nn.Module], states: States, context: Any) -> list[float]:
    """In dB, after each of the layers."""
    wanted, found, out = states, states, []
    for plain, layer in zip(dense, layers, strict=False):
        wanted, found = through(plain, wanted, context), through(layer, found, context)
        out.append(decibels(sum(float(x.double().square().sum()) for x in wanted), squared(wanted, found)))
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learned_rounding", description="Compares learned rounding with descent."
    )
    parser.add_argument("--steps", nargs=2, type=int, default=(1000, 200), metavar="N", help="of linears, of layers")
    parser.add_argument("--layers", type=int, default=3, metavar="N", help="how many are learned; 0: linears only")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the file of figures, ending in .json")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = asked.out or RESULTS / f"{dt.date.today().isoformat()}-learned-rounding.json"
    dense = dense_models.dense_model("smollm2")
    train, held_out = (dense_models.token_rows("smollm2", split)[:ROWS] for split in ("train", "heldout"))
    settings = {"tokens": train.numel(), "held_out_tokens": held_out.numel(), "format": "NVFP4", "rate": RATE}
    settings |= {"weight": WEIGHT, "begin": BEGIN, "steps": list(asked.steps), "layer_of_linears": ALONE}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if results and {name: results[name] for name in settings} != settings:
        raise ValueError(f"{path} has other settings than {settings}; give another --out")
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    results = results or {"date": now, **machine_and_versions(), **settings}

    def store(part: str, figures: dict[str, Any]) -> None:
        results[part] = figures
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if asked.layers and "layers" not in results:
        store("layers", of_layers(dense, train, held_out, asked.steps[1], asked.layers))
    done = results.get("linears", {})
    for names, figures in of_linears(dense, train, held_out, asked.steps[0], done):
        store("linears", done := {**done, names: figures})
    print(path)


if __name__ == "__main__":
    main()
