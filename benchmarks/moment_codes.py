"""Which 8 bits should hold Adam's moments? Encodings, simulated in a plain training loop.

    python -m benchmarks.moment_codes                    # all codes, two seeds; about 15 minutes of one core
    python -m benchmarks.moment_codes --codes 'E4M3*' --seeds 0 --steps 300 --out runs/few.json

The model of small_training.py learns in fp32. After each step of AdamW both moments are encoded and decoded: blocks of
32 along rows, each with a power of two as scale, rounded up so that nothing saturates (the scales of MXFP8). The second
moment v is stored as its square root, which has half the range of exponents and is what the update divides by.

    E4M3, E5M2           floats of 8 bits, both moments
    int8                 even steps: -127 .. 127 for m, 0 .. 255 for sqrt(v)
    U4M4                 m in E4M3; sqrt(v) needs no sign, and has a fourth bit of mantissa in its place
    E4M3 of root         m in E4M3; sqrt(sqrt(v)) in E4M3: half the range again, twice the relative error
    E4M3, never 0        E4M3, but a positive sqrt(v) is rounded to 0 never, at least to the smallest code
    bf16                 16 bits without scales, for comparison

Each rounds to the nearest, or stochastically (up or down, with the chances that make the mean exact), or stochastically
in v alone: v is averaged over a thousand steps, and what a step changes in it is less than half a step of any code.

    loss         held-out, at the end, and its distance from fp32 moments with the same seed
    once         RMS error of one encoding over the RMS of the moment, every 50th step
    carried      the same of what all encodings so far add up to: beside the moments that are stored run those that the
                 same gradients give without encoding
    zeros        share of weights whose sqrt(v) is 0 where m is not, every 50th step: their next update is too large
    largest      the largest update of any weight in any step, over the learning rate; Adam's own stays below 10 or so

Finished runs stay in the file, so an interrupted run continues where it stopped.
"""

import argparse
import dataclasses
import datetime as dt
import fnmatch
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import small_training
from benchmarks.evaluation import store
from benchmarks.machine import machine_and_versions

RESULTS = Path(__file__).parent / "results"
BLOCK, EPS, EVERY = 32, 1e-8, 50
SEEDS, STEPS, RATE = (0, 1), 1500, 4e-3
_EXPONENT = 0x7F800000  # of fp32, in its place
REFERENCE_RUN = "fp32 | none"
COLUMNS: tuple[str, ...] = ("moments", "rounding", "held-out loss", "minus fp32", "m once", "sqrt(v) once", "m carried")
COLUMNS += ("sqrt(v) carried", "zeros", "largest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of a code: floats with bits of mantissa, whose steps are even below 2^lowest; or integers (`even`)."""

    largest: float
    mantissa: int = 0
    lowest: int = 0
    even: bool = False
    never_zero: bool = False  # what is positive becomes at least the smallest code


E4M3 = Grid(mantissa=3, lowest=-6, largest=448.0)
E5M2 = Grid(mantissa=2, lowest=-14, largest=57344.0)
U4M4 = Grid(mantissa=4, lowest=-6, largest=496.0)  # 4 bits of exponent, no sign, no NaN
INT8, UINT8 = Grid(largest=127.0, even=True), Grid(largest=255.0, even=True)
Rounding = Literal["nearest", "stochastic", "v stochastic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """How both moments are kept: grids of m and of sqrt(v) or its root; None: fp32, or with `bf16` in bf16."""

    first: Grid | None = None
    second: Grid | None = None
    root: bool = False  # sqrt(sqrt(v)) is kept
    bf16: bool = False


CODES = {
    "E4M3": Code(first=E4M3, second=E4M3),
    "E4M3, never 0": Code(first=E4M3, second=dataclasses.replace(E4M3, never_zero=True)),
    "E5M2": Code(first=E5M2, second=E5M2),
    "int8": Code(first=INT8, second=UINT8),
    "U4M4": Code(first=E4M3, second=U4M4),
    "E4M3 of root": Code(first=E4M3, second=E4M3, root=True),
    "bf16": Code(bf16=True),
}
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "v stochastic")


def names() -> list[str]:
    """The runs of a seed, as `code | rounding`; the reference comes first."""
    return [REFERENCE_RUN, *(f"{code} | {rounding}" for code in CODES for rounding in ROUNDINGS)]


def rounded(values: Tensor, grid: Grid, noise: Tensor | None) -> Tensor:
    """A vector on the grid, block by block under powers of two; `noise` in [0, 1) rounds stochastically.

    All of it is exact in fp32 but the rounding itself: scales and steps are powers of two.
    """
    blocks = values.view(-1, BLOCK)
    amax = blocks.abs().amax(1, keepdim=True)
    fraction, exponent = torch.frexp(amax / grid.largest)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp_min(-126)  # 2^exponent >= the quotient
    scaled = torch.ldexp(blocks, -exponent)
    if grid.even:
        step = torch.tensor(1.0)
    else:
        binades = (scaled.view(torch.int32) & _EXPONENT).clamp_min((grid.lowest + 127) << 23)  # powers of two, as bits
        step = binades.view(torch.float32) * 2.0**-grid.mantissa
    steps = scaled / step
    whole = torch.round(steps) if noise is None else torch.floor(steps + noise.view(-1, BLOCK))
    found = (whole * step).clamp(-grid.largest, grid.largest)
    if grid.never_zero:
        found = torch.where((blocks > 0) & (found <= 0), 2.0 ** (grid.lowest - grid.mantissa), found)
    return torch.ldexp(found, exponent).view(-1)


def in_bf16(values: Tensor, noise: Tensor | None) -> Tensor:
    """fp32 values that bf16 has."""
    if noise is None:
        return values.bfloat16().float()
    bits = values.view(torch.int32) + (noise * 65536).to(torch.int32)  # carries into the 16 bits that are kept
    return (bits & -65536).view(torch.float32)


def kept(values: Tensor, grid: Grid | None, noise: Tensor | None, *, bf16: bool) -> Tensor:
    """A moment (or the root of one) as it is read back."""
    if bf16:
        return in_bf16(values, noise)
    return values if grid is None else rounded(values, grid, noise)


def flat_model(seed: int) -> tuple[Any, Tensor, Tensor]:
    """The model in fp32, and all of its parameters and gradients as one vector each, which it shares."""
    model: Any = small_training.model_of(None, seed, torch.float32)
    params = list(model.parameters())
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    gradients, at = torch.zeros_like(flat), 0
    for param in params:
        assert param.shape[-1] % BLOCK == 0, "a block would hold the end of a row and the start of the next"
        param.data = flat[at : at + param.numel()].view(param.shape)
        param.grad = gradients[at : at + param.numel()].view(param.shape)
        at += param.numel()
    return model, flat, gradients


@dataclasses.dataclass
class Moments:
    """AdamW over one vector; both moments (v as its root) are kept in a code."""

    code: Code
    rounding: str
    drawn: torch.Generator
    weights: Tensor
    steps: int = 0
    largest: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self.m, self.root, self.true_m, self.true_v = (torch.zeros_like(self.weights) for _ in range(4))

    def step(self, gradients: Tensor, rate: float) -> dict[str, float]:
        """One step; the errors of the moments, if it is one of those that are looked at."""
        first, second = small_training.BETAS
        self.steps += 1
        m = torch.lerp(self.m, gradients, 1 - first)
        v = torch.addcmul(second * self.root.square(), gradients, gradients, value=1 - second)
        self.true_m.lerp_(gradients, 1 - first)
        self.true_v.mul_(second).addcmul_(gradients, gradients, value=1 - second)
        root = v.sqrt()
        update = m / (1 - first**self.steps) / (root / (1 - second**self.steps) ** 0.5 + EPS)
        self.largest = torch.maximum(self.largest, update.abs().max())
        self.weights.mul_(1 - rate * small_training.WEIGHT_DECAY).sub_(update, alpha=rate)
        self.m = kept(m, self.code.first, self._noise("stochastic"), bf16=self.code.bf16)
        noise, bf16 = self._noise("stochastic", "v stochastic"), self.code.bf16
        if self.code.root:
            self.root = kept(root.sqrt(), self.code.second, noise, bf16=bf16).square()
        else:
            self.root = kept(root, self.code.second, noise, bf16=bf16)
        return {} if self.steps % EVERY else self._errors(m, root)

    def _noise(self, *roundings: str) -> Tensor | None:
        """Random numbers in [0, 1), for runs that round so."""
        if self.rounding not in roundings:
            return None
        return torch.rand(len(self.weights), generator=self.drawn, device="cpu")

    def _errors(self, m: Tensor, root: Tensor) -> dict[str, float]:
        return {
            "m once": _relative(self.m, m),
            "sqrt(v) once": _relative(self.root, root),
            "m carried": _relative(self.m, self.true_m),
            "sqrt(v) carried": _relative(self.root, self.true_v.sqrt()),
            "zeros": ((self.root == 0) & (self.m != 0)).float().mean().item(),
        }


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def train(name: str, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """One run: its last held-out loss, and the means of the errors over the steps that were looked at."""
    chosen, _, rounding = name.partition(" | ")
    model, weights, gradients = flat_model(seed)
    drawn = torch.Generator(device="cpu").manual_seed(1000 + seed)

    moments = Moments(CODES.get(chosen, Code()), rounding, drawn, weights)
    rows, order = small_training.rows_of("train"), small_training.order_of(seed, steps)
    seen: list[dict[str, float]] = []
    for step in tqdm(range(steps), desc=f"{name}, seed {seed}", mininterval=10):
        gradients.zero_()
        small_training.loss_of(model, rows[order[step]]).mean().backward()
        with torch.no_grad():
            gradients.mul_((small_training.CLIP / (gradients.norm() + 1e-6)).clamp(max=1))
            seen += [errors] if (errors := moments.step(gradients, rate * small_training.rate_at(step, steps))) else []
    found = {key: statistics.fmean(each[key] for each in seen) for key in (seen[0] if seen else ())}
    return {"held_out": small_training.held_out_loss(model), "largest": moments.largest.item(), **found}


def answer(  # noqa: PLR0913 - the options of a run, keyword-only
    path: Path, *, wanted: Sequence[str], seeds: Sequence[int], steps: int, rate: float, say: Callable[[str], object]
) -> dict[str, Any]:
    """Fills the file with the runs that it lacks, and returns all of it.

    Raises:
        ValueError: the file is of other settings.
    """
    settings = json.loads(json.dumps({**small_training.SETTINGS, "steps": steps, "rate": rate, "block": BLOCK}))
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if results and results["settings"] != settings:
        raise ValueError(f"{path} is of {results['settings']}, and this run of {settings}; give another --out")
    command = f"python -m benchmarks.moment_codes --steps {steps} --rate {rate}"
    results = results or {"command": command, "settings": settings, **machine_and_versions(), "runs": {}}
    for seed in seeds:
        for name in wanted:
            if str(seed) not in (runs := results["runs"].setdefault(name, {})):
                runs[str(seed)] = train(name, seed, steps, rate)
                store(path, results)
                say(f"{name}, seed {seed}: {runs[str(seed)]}")
    return results


def markdown(results: dict[str, Any]) -> str:
    """A row for each code and rounding: means over seeds, and the distance from fp32 of each seed."""
    settings, runs = results["settings"], results["runs"]
    lines = [
        "# Codes for Adam's moments",
        "",
        f"{settings['steps']} steps, learning rate {settings['rate']}, betas {settings['betas']}; blocks of {BLOCK}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|---|{'---:|' * (len(COLUMNS) - 2)}",
    ]
    lines += [f"| {' | '.join(_cells(name, runs))} |" for name in names() if runs.get(name)]
    return "\n".join(lines) + "\n"


def _cells(name: str, runs: dict[str, dict[str, Any]]) -> list[str]:
    found = list(runs[name].values())
    means = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
    gaps = [
        f"{run['held_out'] - runs[REFERENCE_RUN][seed]['held_out']:+.4f}"
        for seed, run in runs[name].items()
        if name != REFERENCE_RUN and seed in runs.get(REFERENCE_RUN, {})
    ]
    shares = [f"{means[key]:.2%}" if key in means else "-" for key in COLUMNS[4:8]]
    zeros = f"{means['zeros']:.1e}" if "zeros" in means else "-"
    return [*name.split(" | "), f"{means['held_out']:.4f}", ", ".join(gaps), *shares, zeros, f"{means['largest']:.1f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codes", nargs="+", default=["*"], metavar="GLOB", help="runs, such as 'E4M3* | nearest'")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=RATE, help="the largest learning rate")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{dt.date.today().isoformat()}-moment-codes.json")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wanted = [name for name in names() if any(fnmatch.fnmatchcase(name, glob) for glob in asked.codes)]
    results = answer(asked.out, wanted=wanted, seeds=asked.seeds, steps=asked.steps, rate=asked.rate, say=print)
    asked.out.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))


if __name__ == "__main__":
    main()
