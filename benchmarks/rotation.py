"""Does a rotation leave more of a model in 4 bits? SmolLM2-135M in MXFP4 and NVFP4, rotated or as it is.

    python -m benchmarks.rotation                     # 12 rows of 256 held-out tokens; minutes

Weights are rounded to nearest under the scales of `Max`, so nothing is fitted to data and a rotation alone makes the
difference. Each model is judged with weights alone quantized, and with inputs of linears too, each token by itself:
mean KL from the dense model in nats a token, and perplexity. Differences of KL are taken row by row of text.

The weights come from a file in 4 bits (Q4_1), so blocks of 32 weights are on grids that no dense checkpoint has, and a
rotation takes them off. Inputs are those of the real model, outliers too.
"""

import argparse
import copy
import datetime as dt
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtensor as qt
from benchmarks import dense_models
from benchmarks.evaluation import Judged, Questions, mean_and_error
from benchmarks.evaluation_contenders import quantizing_inputs
from benchmarks.machine import machine_and_versions
from layerwise import Max, calibrate, rotate_
from qtensor.spec.recipes import Recipe

RESULTS = Path(__file__).parent / "results"
SEQ_LEN = 256
FORMATS: dict[str, Recipe] = {
    "MXFP4": qt.MXFP4BlockScaling(activations="dynamic"),
    "NVFP4": qt.NVFP4BlockScaling(activations="dynamic"),
}
AS_IS = "as it is"
# (format, name of the rotation) -> its options; None: not rotated
ROWS: dict[tuple[str, str], dict[str, Any] | None] = {
    ("MXFP4", AS_IS): None,
    ("MXFP4", "stream, blocks of 32"): {"where": ("stream",), "block": 32},
    ("MXFP4", "stream and values, blocks of 32"): {"block": 32},
    ("MXFP4", "inputs of down_proj, blocks of 32"): {"where": (), "online": {"*down_proj": 32}},
    ("MXFP4", "inputs of down_proj, blocks of 512"): {"where": (), "online": {"*down_proj": 512}},
    ("MXFP4", "stream, values and inputs of down_proj, blocks of 32"): {"block": 32, "online": ["*down_proj"]},
    ("NVFP4", AS_IS): None,
    ("NVFP4", "stream and values, blocks of 16"): {"block": 16},
    ("NVFP4", "stream and values, blocks of 32"): {"block": 32},
    ("NVFP4", "inputs of down_proj, blocks of 16"): {"where": (), "online": {"*down_proj": 16}},
    ("NVFP4", "stream, values and inputs of down_proj, blocks of 16"): {"block": 16, "online": ["*down_proj"]},
}


def judged(model: nn.Module, recipe: Recipe, questions: Questions) -> dict[str, Judged]:
    """With weights alone quantized, and with inputs too."""
    calibrate(model, None, recipe=recipe.stored, algorithm=Max(), exclude=("lm_head",), progress=False)
    found = {"A16": questions.asked(model)}
    hooks = quantizing_inputs(model, dense_models.linear_names(model), recipe)
    found["dynamic"] = questions.asked(model)
    for hook in hooks:
        hook.remove()
    return found


def measure(dense: nn.Module, held_out: Tensor) -> dict[str, Any]:
    """Every row, and what the dense model comes to."""
    questions = Questions(held_out, dense)
    rows: dict[str, Any] = {}
    for (name, rotation), options in ROWS.items():
        began, model, row = time.perf_counter(), copy.deepcopy(dense), {}
        if options is not None:
            report = rotate_(model, {"input_ids": held_out[:1, :32], "use_cache": False}, **options)
            row = {"difference": report.difference, "rotating_seconds": time.perf_counter() - began}
        row |= judged(model, FORMATS[name], questions)
        rows[f"{name} | {rotation}"] = row | {"seconds": time.perf_counter() - began}
        print(f"{name} | {rotation}: KL {statistics.fmean(row['A16']['kl']):.5f}", flush=True)
    return {"dense": questions.asked(dense), "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    """A table of all rows."""
    lines = ["| | KL, weights alone | to that as it is | perplexity | KL, inputs too | to that as it is | perplexity |"]
    lines.append(f"|---|{'---:|' * 6}")
    for name, row in results["rows"].items():
        base, cells = results["rows"][f"{name.partition(' | ')[0]} | {AS_IS}"], []
        for inputs in ("A16", "dynamic"):
            mine, theirs = row[inputs], base[inputs]
            gap = mean_and_error([a - b for a, b in zip(mine["kl"], theirs["kl"], strict=True)])
            cells += [f"{statistics.fmean(mine['kl']):.4f}", "" if row is base else f"{gap[0]:+.4f} ± {gap[1]:.4f}"]
            cells.append(f"{math.exp(statistics.fmean(mine['loss'])):.2f}")
        lines.append(f"| {name.replace(' | ', ', ')} | {' | '.join(cells)} |")
    dense = math.exp(statistics.fmean(results["dense"]["loss"]))
    return f"Dense perplexity: {dense:.2f}, {results['tokens']} tokens.\n\n" + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write figures and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rotation", description="Judges rotations.")
    parser.add_argument("--eval-blocks", type=int, default=12, metavar="N", help="rows of 256 held-out tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the file of figures, ending in .json")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    model, smollm2 = dense_models.untied_smollm2(), dense_models.smollm2
    held_out = smollm2.token_blocks(smollm2.tokenizer(), SEQ_LEN, split="heldout")[: asked.eval_blocks]
    results = machine_and_versions()  # with the load from before
    results |= {"command": f"python -m benchmarks.rotation --eval-blocks {asked.eval_blocks}"}
    results |= {"tokens": held_out.numel()} | measure(model, held_out)
    path = asked.out or RESULTS / f"{dt.date.today().isoformat()}-rotation-smollm2-135m.json"
    rounded = json.loads(json.dumps(results), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    print(markdown(results))


if __name__ == "__main__":
    main()
