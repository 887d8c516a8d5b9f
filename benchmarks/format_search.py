"""What does a search of formats buy? SmolLM2-135M in NVFP4 and MXFP8, by several ways to choose, at equal bits.

    python -m benchmarks.format_search                                  # to benchmarks/results/, about 15 minutes
    python -m benchmarks.format_search --layers 2 --batches 2 --seq-len 32 --eval-blocks 2 --out runs/formats

    relative    search_formats: each linear's error in parts of its output
    absolute    search_formats(compare="absolute"): the energies of the errors
    weights     search_formats without data: the errors of the weights themselves
    in order    MXFP8 for the first groups of the model, as many as the budget allows
    shuffled    MXFP8 for groups in an order drawn by chance, the mean of several draws

All weights are rounded by Max, in fp32 surroundings. Two figures on held-out text: perplexity, and the mean KL
divergence of the next-token probabilities from those of the model before, which is the finer one of the two.
"""

import argparse
import dataclasses
import datetime as dt
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

import qtensor as qt
from benchmarks.machine import machine_and_versions
from layerwise import Assignment, Max, calibrate, search_formats
from layerwise.formats.candidates import LinearGroup
from qtensor.spec.recipes import Recipe

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import smollm2  # noqa: E402

NVFP4, MXFP8 = qt.NVFP4BlockScaling(), qt.MXFP8BlockScaling()
BUDGETS = (4.75, 5.25, 6.0)
EXCLUDE = ["lm_head"]  # the embedding


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is run."""

    batches: int = 16
    seq_len: int = 256
    eval_blocks: int = 8
    layers: int = 30
    draws: int = 2
    seed: int = 0


class Model:
    """The model in fp32, its weights to put back, and what it says of the held-out text."""

    def __init__(self, settings: Settings) -> None:
        config = smollm2.config()
        config.num_hidden_layers = settings.layers
        self.model: Any = LlamaForCausalLM(config).float().eval()
        params = dict(self.model.named_parameters())
        with torch.no_grad():
            for fqn, weight in smollm2.iter_weights(params):
                params[fqn].copy_(weight)
        self.dense = {name: param.detach().clone() for name, param in params.items()}
        tokenizer = smollm2.tokenizer()
        rows = smollm2.token_blocks(tokenizer, settings.seq_len)[: settings.batches]
        self.data = [{"input_ids": row[None], "use_cache": False} for row in rows]
        self.held_out = smollm2.token_blocks(tokenizer, settings.seq_len, split="heldout")[: settings.eval_blocks]
        self.before = [self._log_probabilities(block) for block in self.held_out]

    @torch.no_grad()
    def figures(self, recipe: Recipe | Assignment | None) -> dict[str, float]:
        """Perplexity and KL with weights rounded so; None: as they are."""
        params = dict(self.model.named_parameters())
        for name, values in self.dense.items():
            params[name].copy_(values)
        if recipe is not None:
            exclude = [] if isinstance(recipe, Assignment) else EXCLUDE
            calibrate(self.model, None, recipe=recipe, algorithm=Max(), exclude=exclude, progress=False)
        losses, divergences = [], []
        for block, before in zip(self.held_out, self.before, strict=True):
            now = self._log_probabilities(block)
            losses.append(float(F.nll_loss(now[:-1], block[1:])))
            divergences.append(float(F.kl_div(now, before, log_target=True, reduction="batchmean")))
        return {"perplexity": math.exp(statistics.fmean(losses)), "kl": statistics.fmean(divergences)}

    @torch.no_grad()
    def _log_probabilities(self, block: Tensor) -> Tensor:
        return F.log_softmax(self.model(input_ids=block[None], use_cache=False).logits[0], dim=-1)  # [tokens, words]


def filled(groups: Sequence[LinearGroup], order: Sequence[int], bits_per_weight: float) -> Assignment:
    """MXFP8 for groups in this order, as long as it fits; NVFP4 for the others."""
    left = bits_per_weight * sum(group.weights for group in groups)
    left -= sum(group.candidates[0].bits for group in groups)
    recipes: dict[str, Recipe | None] = {name: NVFP4 for group in groups for name in group.names}
    for index in order:
        low, high = groups[index].candidates
        if high.bits - low.bits <= left:
            left -= high.bits - low.bits
            recipes |= dict.fromkeys(groups[index].names, MXFP8)
    return Assignment(recipes)


def run(settings: Settings) -> dict[str, Any]:
    """All ways at all budgets."""
    model, draw = Model(settings), random.Random(settings.seed)

    def searched(data: Any, compare: str) -> Assignment:
        return search_formats(
            model.model,
            data,
            recipes=[NVFP4, MXFP8],
            bits_per_weight=BUDGETS[0],
            compare=compare,
            exclude=EXCLUDE,
            checkpoint_dir=directory / ("with data" if data else "without"),  # so that each is measured once
            progress=False,
        )

    with tempfile.TemporaryDirectory() as temporary:
        directory, began = Path(temporary), time.process_time()
        relative = searched(model.data, "relative")
        seconds = time.process_time() - began
        absolute, weights = searched(model.data, "absolute"), searched((), "relative")
    found = {"relative": relative, "absolute": absolute, "weights": weights}
    figures: dict[str, Any] = {"search_cpu_seconds": round(seconds, 1), "uniform": {}, "ways": {}, "chosen": {}}
    for name, recipe in (("fp32", None), ("NVFP4", NVFP4), ("MXFP8", MXFP8)):
        figures["uniform"][name] = model.figures(recipe)
        print(name, figures["uniform"][name], flush=True)
    groups = relative.groups
    orders = [draw.sample(range(len(groups)), len(groups)) for _ in range(settings.draws)]
    for budget in BUDGETS:
        assignments = {way: [assignment.at(budget)] for way, assignment in found.items()}
        assignments["in order"] = [filled(groups, range(len(groups)), budget)]
        assignments["shuffled"] = [filled(groups, order, budget) for order in orders]
        figures["chosen"][str(budget)] = {way: _kinds(each[0]) for way, each in assignments.items()}
        best = assignments["relative"][0]
        figures["chosen"][str(budget)]["gap"] = (best.error or 0.0) / (best.bound or 1.0) - 1
        for way, each in assignments.items():
            all_figures = [model.figures(one) for one in each]
            mean = {key: statistics.fmean(one[key] for one in all_figures) for key in all_figures[0]}
            figures["ways"].setdefault(way, {})[str(budget)] = mean
            print(budget, way, mean, flush=True)
    return figures


def _kinds(assignment: Assignment) -> dict[str, int]:
    """How many weights of each kind of linear are in MXFP8."""
    kinds: dict[str, int] = {}
    for name, recipe in assignment.recipes.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        kinds[kind] = kinds.get(kind, 0) + (recipe == MXFP8)
    return kinds


def markdown(figures: dict[str, Any]) -> str:
    """A table for each figure: ways against budgets."""
    lines = []
    for key, title, digits in (("kl", "KL from fp32, nats per token", 4), ("perplexity", "perplexity", 3)):
        uniform = {name: f"{one[key]:.{digits}f}" for name, one in figures["uniform"].items()}
        lines += [f"{title}: {', '.join(f'{name} {value}' for name, value in uniform.items())}", ""]
        lines += [f"| {' | '.join(['', *(f'{budget} bits' for budget in BUDGETS)])} |"]
        lines += [f"|---|{'---:|' * len(BUDGETS)}"]
        for way, at in figures["ways"].items():
            lines += [f"| {' | '.join([way, *(f'{at[str(budget)][key]:.{digits}f}' for budget in BUDGETS)])} |"]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the results")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    about = {"command": "python -m benchmarks.format_search", "settings": dataclasses.asdict(settings)}
    began = time.perf_counter()
    figures = {**about, **machine_and_versions(), **run(settings)}
    figures["seconds"] = round(time.perf_counter() - began, 1)
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"{dt.date.today().isoformat()}-format-search-smollm2-135m.json"
    out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{markdown(figures)}\nwritten to {out}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
