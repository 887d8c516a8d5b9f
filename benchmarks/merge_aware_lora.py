"""What is left of an adapter once it is merged into a quantized base: trained beside the weight, or through its merge.

    python -m benchmarks.merge_aware_lora                            # about 40 minutes of a core
    python -m benchmarks.merge_aware_lora --rates 3e-3 --recipes mxfp4    # some of these runs
    python -m benchmarks.merge_aware_lora --seed 1 --out runs/seed1.json
    python -m benchmarks.merge_aware_lora --recipes mxfp4 --steps 4 --out runs/few.json

SmolLM2-135M, whose last layers are quantized and get LoRA on all their linears. All runs have the same text in the same
order, and the same first factors. AdamW, fp32 factors, one row of tokens a step; the rate rises, and falls to a tenth.
What enters the last layers never changes, so it is computed once.

    plain         y = x @ W.T + s (x @ a.T) @ b.T, as peft computes it
    through       merge_aware from the first step on
    last quarter  plain, and merge_aware for the last quarter of the steps

    adapter    held-out loss with the adapter beside its weight, nats a token
    merged     held-out loss of the merged model. For the runs through the merge it is what was trained
    lost       merged minus the adapter of the plain run, and its standard error over the held-out rows, pairwise
    gain       merged minus the merged model of the plain run, likewise
    survived   <update, W' - W> / <update, update> over all weights: the share of the update that a merge keeps
    norm       |update| / |W| over all weights
    beyond     the share of elements whose update is larger than half a step of E2M1, to the nearer neighbour
    error      |W' - (W + update)| / |update|, what rounding adds

`layer` is one linear with its adapter, forward and backward: seconds against peft's own, and the bytes that its forward
leaves for backward beside input, weight and factors.

Finished runs stay in the file, so an interrupted run continues where it stopped.
"""

import argparse
import copy
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.evaluation import store
from benchmarks.machine import machine_and_versions
from benchmarks.timing import medians
from qtensor import MXFP4BlockScaling, NVFP4BlockScaling, QuantizedTensor, merge_, merge_aware, quantize_

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import smollm2  # type: ignore[import-not-found, unused-ignore] # noqa: E402

RECIPES: dict[str, Callable[[], Any]] = {"nvfp4": NVFP4BlockScaling, "mxfp4": MXFP4BlockScaling}
MODES = ("plain", "through", "last quarter")
RATES = (3e-3, 1e-2, 1e-3, 1e-4)
COLUMNS = ("recipe", "rate", "trained", "adapter", "merged", "lost (s.e.)", "gain (s.e.)", "survived")
FIGURES = ("norm", "beyond", "error")
Say = Callable[[str], object]
Ways = tuple[list[str], list[float], list[str]]
Pair = tuple[Tensor, Tensor]  # what enters the last layers, [n, T, hidden], and the tokens, [n, T]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of a file share."""

    steps: int = 160
    layers: int = 2
    rank: int = 8
    alpha: int = 16
    seq_len: int = 96
    warmup: int = 8
    eval_blocks: int = 32
    seed: int = 0

    def command(self) -> str:
        """What asks for them."""
        own = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        asked = [f" --{name.replace('_', '-')} {value}" for name, value, default in own if value != default]
        return "python -m benchmarks.merge_aware_lora" + "".join(asked)


def text(settings: Settings) -> tuple[Tensor, Tensor]:
    """Rows to train on in their order, int64 [steps, seq_len], and held-out ones, [eval_blocks, seq_len]."""
    tokenizer = smollm2.tokenizer()
    rows = smollm2.token_blocks(tokenizer, settings.seq_len)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
    held_out = smollm2.token_blocks(tokenizer, settings.seq_len, split="heldout")
    return rows[order[: settings.steps]], held_out[:: len(held_out) // settings.eval_blocks][: settings.eval_blocks]


@torch.no_grad()
def tail_of(settings: Settings, rows: Tensor) -> tuple[nn.Module, Tensor]:
    """The last layers with norm and head, in bf16, and what enters them for rows [n, T]: [n, T, hidden]."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(smollm2.config()).to(torch.bfloat16).eval()
    params = dict(model.named_parameters())
    for fqn, weight in smollm2.iter_weights(params):
        params[fqn].copy_(weight)
    entered: list[Tensor] = []
    own = model.model.layers[-settings.layers :]
    handle = own[0].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    for batch in rows.split(8):
        model.model(input_ids=batch)
    handle.remove()
    model.model.layers, model.config.num_hidden_layers = own, settings.layers
    return model, torch.cat(entered)


def losses_of(model: nn.Module, hidden: Tensor, rows: Tensor) -> Tensor:
    """Next-token loss in nats of each row, [n]."""
    logits: Tensor = model(inputs_embeds=hidden, use_cache=False).logits[:, :-1].float()  # [n, T - 1, vocabulary]
    losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1).mean(1)


@torch.no_grad()
def block_losses(model: nn.Module, held_out: Sequence[Tensor]) -> list[float]:
    """That of the held-out rows."""
    pairs = zip(*(each.split(8) for each in held_out), strict=True)
    return [loss for hidden, rows in pairs for loss in losses_of(model, hidden, rows).tolist()]


def adapted(base: nn.Module, settings: Settings) -> Any:
    """A copy of the base with LoRA on all linears of its last layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(settings.seed)
    return get_peft_model(
        copy.deepcopy(base),
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules="all-linear",
        ),
    )


def rate_at(step: int, settings: Settings) -> float:
    """The share of the rate in a step: up over `warmup`, then down to a tenth in the last one, both linearly."""
    left = (settings.steps - 1 - step) / max(1, settings.steps - settings.warmup)
    return min((step + 1) / settings.warmup, 0.1 + 0.9 * left)


def train(base: nn.Module, way: tuple[str, float], data: Pair, held_out: Pair, settings: Settings) -> Any:
    """One run: its losses and what a merge leaves of the update."""
    (mode, rate), model, began = way, adapted(base, settings), time.perf_counter()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=rate)
    aware = merge_aware(model, keep="merged")
    starts = {"plain": settings.steps, "through": 0, "last quarter": settings.steps * 3 // 4}[mode]
    losses = []
    for step, (hidden, row) in enumerate(zip(*data, strict=True)):
        if step == starts:
            aware.start()
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_at(step, settings)
        loss = losses_of(model, hidden[None], row[None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    some = tuple(each[:8] for each in held_out)
    with aware:
        through = block_losses(model, some)
    beside = block_losses(model, held_out)
    updates: Any = aware.updates()
    beyond = beyond_half_a_step(model, updates)
    lines = merge_(model, updates).weights
    merged = block_losses(model.unload(), held_out)
    if merged[:8] != through:
        raise RuntimeError("the merged model is not the one that was trained")
    update = sum(line.update_norm**2 for line in lines)
    weight = sum(float(param.detach().dequantize().double().norm()) ** 2 for param in quantized(base))
    return {
        "adapter": beside,
        "merged": merged,
        "survived": sum(line.survived * line.update_norm**2 for line in lines) / update,
        "norm": math.sqrt(update / weight),
        "error": math.sqrt(sum(line.error_norm**2 for line in lines) / update),
        "changed": sum(line.changed for line in lines) / sum(line.elements for line in lines),
        "beyond": beyond,
        "seconds": time.perf_counter() - began,
        "train": losses,
    }


@torch.no_grad()
def beyond_half_a_step(model: nn.Module, updates: dict[str, Any]) -> float:
    """The share of elements whose update is larger than half the step to the nearer neighbour in E2M1."""
    params: dict[str, Any] = dict(model.named_parameters())
    larger = elements = 0
    for name, update in updates.items():
        weight = params[name]
        ones = {**weight.parts(), "payload": torch.full_like(weight.payload, 0x22)}  # two codes of 1.0 in each byte
        unit = QuantizedTensor.from_parts(ones, weight.recipe, weight.dtype).dequantize(torch.float32)  # [N, K]
        code = weight.dequantize(torch.float32).abs() / unit
        # 0, 0.5, 1, 1.5, 2, 3, 4, 6: the quotient of the decoded numbers may be off by a rounding
        step = torch.where(code < 2.5, 0.5, torch.where(code < 5, 1.0, 2.0))
        larger += int((update((slice(None), slice(None))).abs() > unit * step / 2).sum())
        elements += code.numel()
    return larger / elements


def quantized(model: nn.Module) -> list[Any]:
    """Its quantized weights."""
    return [param for param in model.parameters() if hasattr(param, "recipe")]


# -- one layer ---------------------------------------------------------------------------------------------------------


def layer_figures(recipe: str, *, rows: int = 1536, columns: int = 576, rank: int = 8) -> dict[str, Any]:
    """Seconds of forward and backward of one linear with its adapter, over peft's own, and what it keeps."""
    from peft import LoraConfig, get_peft_model

    net = nn.Sequential(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))
    quantize_(net, RECIPES[recipe]())
    payload = sum(part.nbytes for param in quantized(net) for part in param.parts().values())
    model = get_peft_model(net, LoraConfig(r=rank, target_modules=["0"], init_lora_weights=False)).to(torch.bfloat16)
    found: dict[str, Any] = {"shape": [rows, columns], "payload_bytes": payload}
    for tokens in (48, 512):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()

        def call(x: Tensor = x) -> None:
            model(x).sum().backward()

        told: dict[str, Any] = {"times peft": {}, "kept_bytes": {"peft": kept_for_backward(model, x)}}
        keeps: dict[str, Any] = {"through": "nothing", "kept": "merged"}
        for way, keep in keeps.items():
            aware = merge_aware(model, keep=keep)

            def through(aware: Any = aware, call: Callable[[], None] = call) -> None:
                with aware:
                    call()

            seconds = medians({"peft": call, way: through}, repeats=7)
            told["times peft"][way] = round(seconds[way] / seconds["peft"], 2)
            with aware:
                told["kept_bytes"][way] = kept_for_backward(model, x)
            aware.remove()
        found[f"{tokens} tokens"] = told
    return found


def kept_for_backward(model: nn.Module, x: Tensor) -> int:
    """Bytes of storages that autograd keeps between forward and backward, but for the input and the parameters."""
    there = {part.untyped_storage().data_ptr() for tensor in (x, *model.parameters()) for part in _plain(tensor)}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        for part in _plain(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in there:
                kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # else an address might come twice
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x)
    y.sum().backward()
    return sum(kept.values())


def _plain(tensor: Any) -> list[Tensor]:
    return list(tensor.parts().values()) if hasattr(tensor, "recipe") else [tensor]


# -- the report --------------------------------------------------------------------------------------------------------


def gap(losses: Sequence[float], others: Sequence[float]) -> str:
    """The mean difference over rows, and its standard error."""
    gaps = [a - b for a, b in zip(losses, others, strict=True)]
    return f"{statistics.fmean(gaps):+.4f} ({statistics.stdev(gaps) / len(gaps) ** 0.5:.4f})"


def markdown(results: dict[str, Any]) -> str:
    """The table of all runs, and that of one layer."""
    settings, runs = results["settings"], results["runs"]
    lines = [
        "# Adapters, trained beside the weight or through its merge",
        "",
        "SmolLM2-135M, its last {layers} layers quantized and adapted: rank {rank}, alpha {alpha}, {steps} steps of "
        "{seq_len} tokens. Held-out loss in nats a token.".format(**settings),
        "",
        f"| {' | '.join(COLUMNS + FIGURES)} |",
        "|" + "---|" * 3 + "---:|" * (len(COLUMNS + FIGURES) - 3),
    ]
    for name, run in sorted(runs.items()):
        recipe, rate, mode = name.split(" | ")
        plain = runs[f"{recipe} | {rate} | plain"]
        own, merged = statistics.fmean(run["adapter"]), statistics.fmean(run["merged"])
        gaps = [gap(run["merged"], plain[which]) for which in ("adapter", "merged")]
        figures = [f"{run[name]:.4f}" for name in FIGURES]
        cells = recipe, rate, mode, f"{own:.4f}", f"{merged:.4f}", *gaps, f"{run['survived']:.3f}", *figures
        lines.append(f"| {' | '.join(cells)} |")
    bases = ", ".join(f"{name} {statistics.fmean(losses):.4f}" for name, losses in results["base"].items())
    lines += ["", f"Before the training: {bases}.", ""]
    lines += [
        "| recipe | tokens | keep | time / peft | bytes kept for backward | by peft |",
        "|---|---|---|---:|---:|---:|",
    ]
    for recipe, layer in results["layer"].items():
        for tokens in (key for key in layer if key.endswith("tokens")):
            told = layer[tokens]
            for way, keep in (("through", "nothing"), ("kept", "merged")):
                lines.append(
                    f"| {recipe} | {tokens.split()[0]} | {keep} | {told['times peft'][way]:.2f} | "
                    f"{told['kept_bytes'][way]:,} | {told['kept_bytes']['peft']:,} |"
                )
    shape = next(iter(results["layer"].values()))["shape"]
    lines += ["", f"One linear of {shape[0]} x {shape[1]}, bf16 factors of rank 8, forward and backward, one core."]
    return "\n".join(lines) + "\n"


def answer(path: Path, ways: Ways, settings: Settings, say: Say = print) -> dict[str, Any]:
    """Run what is missing in the file, of all combinations of recipes, rates and modes."""
    recipes, rates, modes = ways
    results = json.loads(path.read_text()) if path.exists() else {}
    about = {"command": settings.command(), "settings": dataclasses.asdict(settings)}
    if results and results["settings"] != about["settings"]:
        raise SystemExit(f"{path} is of other settings; take another file")
    results = {**about, **machine_and_versions(), "base": {}, "layer": {}, "runs": {}} | results
    rows, held = text(settings)
    dense, entered = tail_of(settings, torch.cat([rows, held]))
    data, held_out = (entered[: len(rows)], rows), (entered[len(rows) :], held)
    bases = {}
    for recipe in recipes:
        base = bases[recipe] = copy.deepcopy(dense)
        quantize_(base.get_submodule("model.layers"), RECIPES[recipe]())
        results["base"][recipe] = [round(loss, 5) for loss in block_losses(base, held_out)]
    for rate, recipe, mode in itertools.product(rates, recipes, modes):
        name = f"{recipe} | {rate:g} | {mode}"
        if name not in results["runs"]:
            run = train(bases[recipe], (mode, rate), data, held_out, settings)
            say(f"{name}: survived {run['survived']:.3f}, merged {statistics.fmean(run['merged']):.4f}")
            results["runs"][name] = run
            store(path, results)
    for recipe in recipes:
        if recipe not in results["layer"]:
            results["layer"][recipe] = layer_figures(recipe)
            store(path, results)
    return results


def main() -> None:
    """Run, and write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "2026-11-29-merge-aware-lora.json"
    )
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args()
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    results = answer(args.out, (args.recipes, args.rates, args.modes), settings)
    args.out.with_suffix(".md").write_text(markdown(results))


if __name__ == "__main__":
    main()
