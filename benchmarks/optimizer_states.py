"""What do compressed optimizer states cost in quality, against masters and moments in fp32? Same data, same seeds.

    python -m benchmarks.optimizer_states                        # all that is missing; hours of one core
    python -m benchmarks.optimizer_states --minutes 30           # starts no run after so many minutes
    python -m benchmarks.optimizer_states --questions scratch --only 'mxfp8 | *' --rates 1 --seeds 0
    python -m benchmarks.optimizer_states --questions            # asks nothing: draws and writes the table anew

    rates        which learning rate is best for fp32 weights with AdamW, by the mean of three seeds
    scratch      the model of small_training.py, trained for `--steps`: held-out loss at the end, for 0.3, 1 and 3 times
                 the best rate, and three seeds (of initial values and the order of the data)
    small-rate   1,000 steps with a rate of 1e-6 from weights that were trained so. How much of the update of fp32
                 states arrives: with u the way that the masters went (the weights, where there are none), and r that of
                 fp32 states,   cosine = u.r / |u||r|,   projection = u.r / |r|^2,   and the share of weights whose
                 stored codes differ from those of fp32 states, and from those at the start
    finetune     SmolLM2-135M as in loss_curves.py: held-out loss, and seconds a step (`--finetune-steps 5` times it)

Contenders are in optimizer_contenders.py; one that cannot run here is listed with the reason. Each run is written as it
ends, and not run again; runs of the three seeds come first for the best rate. A run of `scratch` takes half a
minute to two minutes of one core. Beside the file of figures are a table and a picture of the curves.
"""

import argparse
import contextlib
import datetime as dt
import fnmatch
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

import qtensor as qt
from benchmarks import optimizer_states_report, small_training
from benchmarks.evaluation import store
from benchmarks.machine import machine_and_versions
from benchmarks.optimizer_contenders import PLAIN, RECIPES, Contender, master_of, set_rate, table, unsupported
from dcp_adapters import expand

RESULTS = Path(__file__).parent / "results"
RUNS = Path(__file__).parents[1] / "runs" / "optimizer_states"  # tensors that later runs begin from
QUESTIONS = ("rates", "scratch", "small-rate", "finetune")
STEPS, EVERY, SEEDS = 2000, 250, (0, 1, 2)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)  # of which the best is taken; it should lie between others
MULTIPLES = (1.0, 0.3, 3.0)
SMALL_RATE, SMALL_STEPS, START_RATE = 1e-6, 1000, 2e-3  # the last: of the run that the small steps go on from
FINETUNE_STEPS = 300


class Asking:
    """A file of figures, and whether there is time to start another run."""

    def __init__(self, path: Path, settings: Mapping[str, Any], minutes: float, command: str) -> None:
        settings = json.loads(json.dumps(settings))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if found and found["settings"] != settings:
            raise ValueError(f"{path} is of {found['settings']}, and this run of {settings}; give another --out")
        self.path, self._until = path, time.monotonic() + 60 * minutes
        self.results = found or {"commands": [], "settings": settings, **machine_and_versions()}
        if command not in self.results["commands"]:
            self.results["commands"].append(command)

    def fill(self, keys: Sequence[str], run: Callable[[], Any], done: Callable[[Any], bool] = lambda _: True) -> Any:
        """What the file has under these keys, or what `run` finds, written at once; None: no time, or no way."""
        found: Any = functools.reduce(lambda at, key: at.get(key, {}), keys, self.results)
        if found and done(found):
            return found
        if time.monotonic() > self._until:
            return None
        began = time.process_time()
        try:
            found = run()
        except NotImplementedError as reason:
            self.results.setdefault("not_run", {})[" / ".join(keys)] = str(reason)
            return None
        functools.reduce(lambda at, key: at.setdefault(key, {}), keys[:-1], self.results)[keys[-1]] = found
        store(self.path, self.results)
        print(f"{' / '.join(keys)}: {found}, {time.process_time() - began:.0f} CPU seconds", flush=True)
        return found


def model_for(contender: Contender, seed: int) -> nn.Module:
    """The small model with the weights that a contender has."""
    dtype = torch.float32 if contender.weights == "fp32" else torch.bfloat16
    return small_training.model_of(RECIPES.get(contender.weights), seed, dtype)


def optimizer_for(contender: Contender, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Its optimizer; values from before they were quantized are in the masters then, and freed, or wait for a step."""
    made = contender.build(list(model.parameters()), rate)
    if not contender.remainders:
        for param in model.parameters():
            qt.clear_high_precision_init_val(param)
    return made


def steps_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rates: Sequence[float], label: str
) -> Iterator[int]:
    """Trains a step for each rate, and yields how many were done."""
    rows, order = small_training.rows_of("train"), small_training.order_of(seed, len(rates))
    params = list(model.parameters())
    for step, rate in enumerate(tqdm(rates, desc=label, mininterval=10)):
        set_rate(optimizer, rate)
        small_training.loss_of(model, rows[order[step]]).mean().backward()
        nn.utils.clip_grad_norm_(params, small_training.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1


def scratch(contender: Contender, seed: int, rate: float, steps: int, keep: Path | None = None) -> dict[str, Any]:
    """One curve from initial values; the trained weights go into the file `keep`."""
    model = model_for(contender, seed)
    optimizer = optimizer_for(contender, model, rate)
    rates = [rate * small_training.rate_at(step, steps) for step in range(steps)]
    curve: dict[str, float | None] = {}
    for step in steps_of(model, optimizer, seed, rates, f"{contender.name}, seed {seed}, rate {rate:g}"):
        if step % EVERY == 0 or step == steps:
            curve[str(step)] = loss = _finite(small_training.held_out_loss(model))
            if loss is None:
                break
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: param.detach().contiguous() for name, param in model.named_parameters()}, keep)
    return {"held_out": curve, "last": curve[max(curve, key=int)]}


def _finite(loss: float) -> float | None:
    """None for a run that diverged: JSON has no other word for it."""
    return loss if math.isfinite(loss) else None


def _start(rate: float, steps: int) -> Path:
    """The file of weights that `small-rate` begins with."""
    return RUNS / f"start-{rate:g}-{steps}.safetensors"


def ask_rates(asking: Asking, steps: int) -> float | None:
    """The rate with the least mean loss over seeds, for fp32 weights and states; None where some have not run yet."""
    plain = table()[f"fp32 | {PLAIN}"]
    losses: dict[float, list[float]] = {rate: [] for rate in RATES}
    for seed, rate in itertools.product(SEEDS, RATES):
        keep = _start(rate, steps) if (seed, rate) == (0, START_RATE) else None
        run = functools.partial(scratch, plain, seed, rate, steps, keep)
        found = asking.fill(["rates", f"{rate:g}", str(seed)], run)
        if found is None:
            return None
        losses[rate].append(math.inf if found["last"] is None else found["last"])
    return min(losses, key=lambda rate: sum(losses[rate]))


def ask_scratch(
    asking: Asking, contenders: Sequence[Contender], best: float, cases: Sequence[tuple[float, int]], steps: int
) -> None:
    """All curves; a case is a multiple of the best rate and a seed, and all contenders run it before the next."""
    for (multiple, seed), each in itertools.product(cases, contenders):
        run = functools.partial(scratch, each, seed, best * multiple, steps)
        asking.fill(["scratch", each.name, f"{multiple:g}", str(seed)], run)


def codes_of(param: Tensor) -> Tensor:
    """What is stored for each weight: the code in its payload, or the bits of a dense weight; int32, one dimension."""
    if not isinstance(param, qt.QuantizedTensor):
        return param.detach().reshape(-1).view(torch.int16 if param.element_size() == 2 else torch.int32).int()
    payload = expand({"weight": param.detach()})["weight.payload"].reshape(-1).view(torch.uint8).int()
    return payload if len(payload) == param.numel() else torch.stack([payload & 15, payload >> 4], 1).reshape(-1)


def small_rate(contender: Contender, start: Path, seed: int = 0) -> dict[str, Tensor]:
    """1,000 small steps from trained weights: where the masters went, and the codes before and after."""
    model = model_for(contender, seed)
    values = load_file(start)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name].to(param.dtype))  # masters begin with these values, quantized ones too
    begun = torch.cat([values[name].to(param.dtype).float().reshape(-1) for name, param in model.named_parameters()])
    optimizer = optimizer_for(contender, model, SMALL_RATE)
    before = torch.cat([codes_of(param) for param in model.parameters()])
    for _ in steps_of(model, optimizer, seed, [SMALL_RATE] * SMALL_STEPS, f"{contender.name}, small rate"):
        pass
    after = torch.cat([codes_of(param) for param in model.parameters()])
    ended = torch.cat([master_of(optimizer, param).reshape(-1) for param in model.parameters()])
    return {"way": ended - begun, "before": before, "after": after}


def compared(mine: Mapping[str, Tensor], baseline: Mapping[str, Tensor]) -> dict[str, float]:
    """The figures of `small-rate`."""
    way, wanted = mine["way"].double(), baseline["way"].double()
    both = torch.dot(way, wanted)
    return {
        "cosine": (both / (way.norm() * wanted.norm()).clamp_min(1e-300)).item(),
        "projection": (both / wanted.square().sum()).item(),
        "codes_differ": (mine["after"] != baseline["after"]).double().mean().item(),
        "codes_moved": (mine["after"] != mine["before"]).double().mean().item(),
    }


def ask_small_rate(asking: Asking, contenders: Sequence[Contender], steps: int) -> None:
    """Each contender against the baseline with the same weights, whose tensors stay in `RUNS`."""
    start = _start(START_RATE, steps)

    def answer(each: Contender) -> dict[str, float]:
        if not start.exists():
            scratch(table()[f"fp32 | {PLAIN}"], 0, START_RATE, steps, start)
        kept = RUNS / f"small-rate-{each.weights}-{steps}.safetensors"
        if not kept.exists():
            save_file(small_rate(table()[each.baseline], start), kept)
        baseline = load_file(kept)
        return compared(baseline if each.name == each.baseline else small_rate(each, start), baseline)

    for each in contenders:
        asking.fill(["small-rate", each.name], functools.partial(answer, each))


def finetune(contender: Contender, steps: int) -> dict[str, Any]:
    """SmolLM2-135M on the text and with the settings of loss_curves.py."""
    import smollm2  # an example, which dense_models.py makes importable
    from transformers import LlamaForCausalLM

    from benchmarks import loss_curves

    settings = loss_curves.Settings()
    recipe = RECIPES.get(contender.weights)
    with qt.quantized_model_init(recipe, preserve_high_precision_init_val=True) if recipe else contextlib.nullcontext():
        model: Any = LlamaForCausalLM(smollm2.config())
    model = model.to(torch.float32 if contender.weights == "fp32" else torch.bfloat16)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in smollm2.iter_weights(params):
            params[name].copy_(weight)
    optimizer = optimizer_for(contender, model, settings.lr)
    rows = smollm2.token_blocks(smollm2.tokenizer(), settings.seq_len)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
    held_out = smollm2.token_blocks(smollm2.tokenizer(), settings.eval_seq_len, split="heldout")[: settings.eval_blocks]
    curve: dict[str, float] = {}
    seconds: list[float] = []
    for step in tqdm(range(steps), desc=contender.name, mininterval=10):
        began = time.perf_counter()
        set_rate(optimizer, settings.lr * min(1.0, (step + 1) / settings.warmup))
        batch = rows[order[torch.arange(step * settings.batch, (step + 1) * settings.batch) % len(order)]]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        if (step + 1) % settings.eval_every == 0:
            losses = loss_curves.block_losses(model, held_out)
            curve[str(step + 1)] = sum(losses) / len(losses)
    ordered = sorted(seconds)
    return {"steps": steps, "first_step_seconds": seconds[0], "step_seconds": ordered[len(ordered) // 2]} | (
        {"held_out": curve} if curve else {}
    )


def ask_finetune(asking: Asking, contenders: Sequence[Contender], steps: int) -> None:
    """A curve of each contender; one with fewer steps than are asked for is run again."""
    for each in contenders:
        run = functools.partial(finetune, each, steps)
        asking.fill(["finetune", each.name], run, lambda found: bool(found["steps"] >= steps))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="*", choices=QUESTIONS, default=list(QUESTIONS[:-1]))
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="contenders, 'mxfp8 | *'")
    parser.add_argument("--rates", nargs="+", type=float, default=list(MULTIPLES), help="multiples of the best")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run from initial values")
    parser.add_argument("--rate", type=float, help="the best rate, where `rates` is not to look for it")
    parser.add_argument("--finetune-steps", type=int, default=FINETUNE_STEPS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after these no run is started")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the file of figures, ending in .json")
    return parser.parse_args(arguments)


def newest() -> Path:
    """The file to go on with: the last one that there is, or one of today."""
    today = RESULTS / f"{dt.date.today().isoformat()}-optimizer-states.json"
    return max(RESULTS.glob("*-optimizer-states.json"), default=today)


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, and write figures, a table and a picture."""
    asked = options(arguments)
    torch.set_num_threads(1)
    settings = {
        **small_training.SETTINGS,
        "steps": asked.steps,
        "small_rate": SMALL_RATE,
        "small_steps": SMALL_STEPS,
    } | {"start_rate": START_RATE}
    if asked.rate is not None:
        settings["rate"] = asked.rate
    command = " ".join(["python -m benchmarks.optimizer_states", *([] if arguments is None else arguments)])
    asking = Asking(asked.out or newest(), settings, asked.minutes, command)
    chosen = [each for each in table().values() if any(fnmatch.fnmatchcase(each.name, glob) for glob in asked.only)]
    asking.results["not_run"] = unsupported(chosen)
    able = [each for each in chosen if each.name not in asking.results["not_run"]]
    best = asked.rate
    if best is None and {"rates", "scratch"} & set(asked.questions):
        best = ask_rates(asking, asked.steps)
    if best is not None and "scratch" in asked.questions:
        ask_scratch(asking, able, best, list(itertools.product(asked.rates, asked.seeds)), asked.steps)
    if "small-rate" in asked.questions:
        ask_small_rate(asking, able, asked.steps)
    if "finetune" in asked.questions:
        ask_finetune(asking, able, asked.finetune_steps)
    store(asking.path, asking.results)
    shown = optimizer_states_report.markdown(asking.results)
    asking.path.with_suffix(".md").write_text(shown, encoding="utf-8")
    optimizer_states_report.draw(asking.results, asking.path.with_suffix(".png"))
    print(shown)


if __name__ == "__main__":
    main(sys.argv[1:])
