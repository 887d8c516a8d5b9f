"""Which scales, and which rounding? Errors of linears of SmolLM2 on text that was held out, format by format.

For each format the weights are rounded under the scales of Max, Mse and LocalHessian, in five ways:

    nearest       each element by itself
    gptq          column by column; later columns make up for earlier ones; damping 0.01
    act order     and the columns of the largest inputs come first
    damping       and there is more damping, as there are few tokens
    descent       and each column is rounded once more, given all others

and, by GPTQ() as it is, behind factors for columns of SmoothQuant or AWQ, where these can be folded in. NVFP4 is asked
once more with a quarter of the tokens.

The figure is the signal-to-noise ratio of a linear's output, |X W^T|^2 over |X (Q - W)^T|^2 in dB, with X the inputs on
held-out text: tr(W H W^T) over tr((Q - W) H (Q - W)^T) with H of these inputs. All inputs are those of the model as it
is, unquantized. Decisions come from `Algorithm.decide` itself. CPU seconds are those of one thread, scales and rounding
apart, and each the sum over all linears.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import qtensor as qt
from benchmarks.report import at_least, at_most
from layerwise import AWQ, GPTQ, Algorithm, Decision, Group, Inputs, Linear, LocalHessian, Max, Mse, SmoothQuant
from layerwise.algorithms.algorithm import COLUMNS, HESSIAN
from layerwise.algorithms.solvers.clipping import local_hessian_of
from layerwise.folding.folds import transformed
from layerwise.statistics.collector import Collector
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, shared_amax

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # the examples are scripts, which import one another by bare name
import smollm2  # noqa: E402

RECIPES: dict[str, Recipe] = {
    "NVFP4": qt.NVFP4BlockScaling(),
    "MXFP4": qt.MXFP4BlockScaling(),
    "INT4, 32": qt.Int4GroupScaling(),
    "MXFP8": qt.MXFP8BlockScaling(),
}
SCALES: dict[str, Algorithm] = {"Max": Max(), "Mse": Mse(), "LocalHessian": LocalHessian()}
ROUNDING: dict[str, dict[str, Any] | None] = {
    "nearest": None,
    "gptq": {"damping": 0.01, "act_order": False, "descent": 0},
    "act order": {"damping": 0.01, "act_order": True, "descent": 0},
    "damping": {"damping": None, "act_order": True, "descent": 0},
    "descent": {"damping": None, "act_order": True, "descent": 1},
}
FACTORS: dict[str, Algorithm] = {"SmoothQuant": SmoothQuant(), "AWQ": AWQ(variant="lite")}
DEFAULT = GPTQ()
FEW = type(DEFAULT.scales).__name__  # the scales that few tokens are tried with
# Linears with one input each; o_proj has no module in front that factors could be folded into.
GROUPS = (
    ("model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.v_proj"),
    ("model.layers.2.self_attn.o_proj",),
    ("model.layers.7.mlp.gate_proj", "model.layers.7.mlp.up_proj"),
    ("model.layers.7.mlp.down_proj",),
)
LAYERS = 8  # of the model that are run
ROWS, SEQ_LEN = 16, 256  # of text, for statistics, and as many for errors
WITHIN = 0.25  # dB below the best of all, at most, for the defaults: what takes far longer may be a little better
LEAST_GAIN = 1.0  # dB


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A group of linears, and H of its inputs on held-out text."""

    group: Group
    held_out: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found(Algorithm):
    """Scales that were found before."""

    writes_weights: ClassVar[bool] = False
    decisions: Mapping[str, Decision]

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        """The decisions of these linears."""
        return [self.decisions[linear.name] for linear in group.linears]


def pretrained() -> nn.Module:
    """The first layers of SmolLM2-135M in fp32."""
    from transformers import LlamaForCausalLM

    config = smollm2.config()
    config.num_hidden_layers = LAYERS
    model = LlamaForCausalLM(config).float().eval()
    params = dict(model.named_parameters())
    with torch.no_grad():
        for fqn, weight in smollm2.iter_weights(params):
            params[fqn].copy_(weight)
    return model


@torch.no_grad()
def inputs_of(
    model: Any, split: Literal["train", "heldout"], needs: frozenset[str], rows: int = ROWS
) -> dict[str, Inputs | None]:
    """The statistics of every linear's input on some text."""
    names = [name for names in GROUPS for name in names]
    collector = Collector({name: model.get_parameter(f"{name}.weight") for name in names}, needs)
    for ids in smollm2.token_blocks(smollm2.tokenizer(), SEQ_LEN, split=split)[:rows]:
        with collector.batch():
            model.model(ids[None], use_cache=False)
    statistics = collector.agree(None)
    totals = [(facts.names, statistics.total(index, owner=0)) for index, facts in enumerate(statistics.facts)]
    return {name: inputs for names, inputs in totals for name in names}


def known() -> tuple[list[Known], list[Known]]:
    """All groups; and with a quarter of the tokens behind their statistics."""
    model = pretrained()
    needs, held_out = frozenset({COLUMNS, HESSIAN}), inputs_of(model, "heldout", frozenset({HESSIAN}))
    many, few = (of_inputs(model, inputs_of(model, "train", needs, rows), held_out) for rows in (ROWS, ROWS // 4))
    return many, few


def of_inputs(
    model: nn.Module, seen: Mapping[str, Inputs | None], held_out: Mapping[str, Inputs | None]
) -> list[Known]:
    """All groups, with these statistics."""
    out = []
    for names in GROUPS:
        linears = tuple(Linear(name, model.get_parameter(f"{name}.weight").detach()) for name in names)
        inputs, errors = seen[names[0]], held_out[names[0]]
        assert inputs is not None
        assert inputs.hessian is not None
        assert errors is not None
        assert errors.hessian is not None
        local = dataclasses.replace(inputs, local_hessian=local_hessian_of(inputs.hessian))
        out.append(Known(Group(linears, local), errors.hessian.double()))
    return out


def under(group: Group, recipe: Recipe) -> Group:
    """The group with the amax of its shared scale, which its linears agree on."""
    own = [shared_amax(linear.weight, recipe) for linear in group.linears]
    amaxes = [amax for amax in own if amax is not None]
    amax = torch.stack(amaxes).amax() if amaxes else None
    linears = tuple(dataclasses.replace(linear, amax=amax) for linear in group.linears)
    return dataclasses.replace(group, linears=linears)


def snr(
    one: Known, decided: Group, decisions: Sequence[Decision], recipe: Recipe, factors: Tensor | None
) -> list[float]:
    """Of each linear, in dB."""
    fmt, out = format_of(recipe), []
    for linear, own, decision in zip(one.group.linears, decided.linears, decisions, strict=True):
        values = own.weight if decision.weight is None else decision.weight
        stored = fmt.decode(fmt.encode_with(values, recipe, decision.quantizer), recipe)
        weight = linear.weight.double()
        off = (stored if factors is None else stored / factors).double() - weight
        signal, noise = (float(((each @ one.held_out) * each).sum()) for each in (weight, off))
        out.append(10 * math.log10(signal / noise))
    return out


class Figures:
    """SNRs and CPU seconds by name, each over all linears."""

    def __init__(self) -> None:
        self.snr: dict[str, list[float]] = {}
        self.seconds: dict[str, float] = {}

    def add(self, name: str, values: list[float], seconds: float) -> None:
        """Those of one group."""
        self.snr.setdefault(name, []).extend(values)
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        """The mean over linears, and each."""
        return {
            name: {
                "snr_db": round(sum(values) / len(values), 3),
                "each": [round(value, 2) for value in values],
                "seconds": round(self.seconds[name], 2),
            }
            for name, values in self.snr.items()
        }


def compare(
    groups: Sequence[Known], recipe: Recipe, tried: Mapping[str, Algorithm], factors: Mapping[str, Algorithm]
) -> dict[str, Any]:
    """All ways for one format: the figures of each, and the seconds that scales take."""
    figures, scales_take = Figures(), dict.fromkeys(tried, 0.0)
    for one in groups:
        group = under(one.group, recipe)
        for scales, algorithm in tried.items():
            began = time.process_time()
            decisions = algorithm.decide(group, recipe)
            scales_take[scales] += time.process_time() - began
            found = Found(decisions={linear.name: own for linear, own in zip(group.linears, decisions, strict=True)})
            for rounding, options in ROUNDING.items():
                began = time.process_time()
                if options is not None:
                    decisions = GPTQ(scales=found, **options).decide(group, recipe)
                took = time.process_time() - began
                figures.add(f"{scales}, {rounding}", snr(one, group, decisions, recipe, None), took)
        for name, smoothing in factors.items():
            began = time.process_time()
            folded, divided_by = folded_by(smoothing, group, recipe)
            decisions = DEFAULT.decide(folded, recipe)
            took = time.process_time() - began
            figures.add(f"{name}, then GPTQ()", snr(one, folded, decisions, recipe, divided_by), took)
    return {
        "ways": figures.to_json(),
        "seconds_of_scales": {name: round(seconds, 2) for name, seconds in scales_take.items()},
    }


def folded_by(smoothing: Algorithm, group: Group, recipe: Recipe) -> tuple[Group, Tensor | None]:
    """The group behind its factors, and these; as it was where they cannot be folded, or are not worth it."""
    found = None if group.linears[0].name.endswith("o_proj") else smoothing.smooth(group, recipe)
    if found is None or group.inputs is None:
        return group, None
    linears = tuple(Linear(one.name, one.weight * found.factors) for one in group.linears)
    return under(Group(linears, transformed(group.inputs, found.factors)), recipe), found.factors


def run() -> dict[str, Any]:
    """All formats."""
    torch.set_num_threads(1)
    groups, few = known()
    results: dict[str, Any] = {
        "linears": [name for names in GROUPS for name in names],
        "tokens": ROWS * SEQ_LEN,
        "held_out_tokens": ROWS * SEQ_LEN,
        "formats": {},
    }
    for name, recipe in RECIPES.items():
        print(f"  {name} ...", flush=True)
        results["formats"][name] = compare(groups, recipe, SCALES, FACTORS)
    print("  few tokens ...", flush=True)
    results["few_tokens"] = ROWS // 4 * SEQ_LEN
    results["few"] = compare(few, RECIPES["NVFP4"], {FEW: SCALES[FEW]}, {})
    results["targets"] = targets(results)
    return results


def targets(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Whether the defaults are the right ones."""
    out = {}
    for name, figures in results["formats"].items():
        mean = {way: one["snr_db"] for way, one in figures["ways"].items()}
        default, best = mean[default_way()], max(mean.values())
        leader = max(mean, key=lambda way: mean[way])
        out[f"{name}: GPTQ(), dB below the best"] = at_most(round(best - default, 3), WITHIN, f"the best is {leader}")
        gain = round(default - mean["Max, nearest"], 3)
        out[f"{name}: GPTQ(), dB above Max, rounded to nearest"] = at_least(gain, LEAST_GAIN)
    few = {rounding: results["few"]["ways"][f"{FEW}, {rounding}"]["snr_db"] for rounding in ROUNDING}
    gain = round(few["damping"] - few["nearest"], 3)
    out[f"NVFP4, {results['few_tokens']} tokens: GPTQ(), dB above nearest under its scales"] = at_least(gain, 0.0)
    return out


def default_way() -> str:
    """What GPTQ() is called here."""
    options = {"damping": DEFAULT.damping, "act_order": DEFAULT.act_order, "descent": DEFAULT.descent}
    rounding = next(name for name, own in ROUNDING.items() if own == options)
    return f"{type(DEFAULT.scales).__name__}, {rounding}"


def markdown(results: dict[str, Any]) -> str:
    """A table a format, scales by rounding; then factors, and seconds."""
    count, tokens = len(results["linears"]), results["held_out_tokens"]
    lines = [f"Output SNR in dB, mean of {count} linears of SmolLM2-135M, on {tokens} tokens that were held out;"]
    lines += [f"statistics of {results['tokens']} tokens. GPTQ() is: {default_way()}."]
    for name, figures in results["formats"].items():
        ways = figures["ways"]
        lines += ["", f"{name}", "", f"| scales | {' | '.join(ROUNDING)} | CPU seconds for the scales |"]
        lines += [f"|---|{'---:|' * (len(ROUNDING) + 1)}"]
        for scales in SCALES:
            cells = [f"{ways[f'{scales}, {rounding}']['snr_db']:.2f}" for rounding in ROUNDING]
            lines.append(f"| {scales} | {' | '.join(cells)} | {figures['seconds_of_scales'][scales]:.1f} |")
        seconds = ", ".join(f"{rounding} {ways[f'{FEW}, {rounding}']['seconds']:.1f}" for rounding in ROUNDING)
        factors = ", ".join(f"{way} {ways[way]['snr_db']:.2f}" for way in (f"{own}, then GPTQ()" for own in FACTORS))
        lines += ["", f"With factors: {factors}. CPU seconds for rounding: {seconds}."]
    few = {rounding: results["few"]["ways"][f"{FEW}, {rounding}"]["snr_db"] for rounding in ROUNDING}
    told = ", ".join(f"{rounding} {value:.2f}" for rounding, value in few.items())
    lines += ["", f"NVFP4 with statistics of {results['few_tokens']} tokens, scales of {FEW}: {told}."]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel a format: groups of bars for scales, a bar for each way to round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(2, 2).flat
    for axes, (name, figures) in zip(grid, results["formats"].items(), strict=True):
        ways = figures["ways"]
        for number, rounding in enumerate(ROUNDING):
            values = [ways[f"{scales}, {rounding}"]["snr_db"] for scales in SCALES]
            at = [place + (number - (len(ROUNDING) - 1) / 2) * 0.16 for place in range(len(SCALES))]
            axes.bar(at, values, 0.15, color=f"C{number}", label=rounding)
        for number, smoothing in enumerate(FACTORS):
            axes.bar(len(SCALES) + (number - 0.5) * 0.4, ways[f"{smoothing}, then GPTQ()"]["snr_db"], 0.35, color="C7")
        values = [one["snr_db"] for one in ways.values()]
        axes.set_ylim(min(values) - 1, max(values) + 0.5)
        default = ways[default_way()]["snr_db"]
        axes.axhline(default, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"{name} (dashed: GPTQ(), {default:.2f} dB)", loc="left")
        axes.set(xticks=range(len(SCALES) + 1), xticklabels=[*SCALES, "\n".join([*FACTORS, "then GPTQ()"])])
        axes.set_ylabel("output SNR in dB")
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ROUNDING), frameon=False)
    figure.suptitle("Weights of SmolLM2-135M: scales (groups) and rounding (bars), on held-out text")
    figure.savefig(path, dpi=110)
