"""The contenders of optimizer_states.py: which weights a model has, and which optimizer steps them.

A contender is a line of `CONTENDERS`: name, weights, what builds the optimizer from parameters and a rate, and what it
needs here. Its baseline is the contender with the same weights, and masters and moments in fp32. Those named after a
larger eps are that baseline again, but for what no update shows: a difference that they have, too, is chance.
"""

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

import qtensor as qt
from benchmarks.small_training import BETAS, WEIGHT_DECAY
from qtensor.optim.compressed.masters import expand_master
from qtensor.spec.recipes import Recipe

Weights = Literal["fp32", "bf16", "mxfp8", "nvfp4"]
RECIPES: dict[Weights, Recipe] = {"mxfp8": qt.MXFP8BlockScaling(), "nvfp4": qt.NVFP4BlockScaling()}
FULL = "masters fp32, moments fp32"
PLAIN = "AdamW on fp32 weights"  # finds the best rate, and is the start of those that fine-tune
# What matters to no update, and lets two runs drift apart: how far pairs are from one another by chance.
CONTROL = f"{FULL}, eps 1.1e-8"
Build = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the tables."""

    weights: Weights
    states: str
    build: Build
    bytes_per_weight: float  # that its master and moments take beside it, scales included
    missing: Callable[[], str | None] = lambda: None  # why it cannot run here
    remainders: bool = False  # masters take over values from before quantizing in the first step, not before

    @property
    def name(self) -> str:
        """As results name it."""
        return f"{self.weights} | {self.states}"

    @property
    def baseline(self) -> str:
        """The contender that it is compared with."""
        return f"{self.weights} | {PLAIN if self.weights == 'fp32' else FULL}"


class AdamWWithBf16Moments(torch.optim.AdamW):
    """AdamW whose moments are rounded to bf16 (to nearest) after each step; they stay in fp32 tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step, then round what moved; rounding twice changes nothing."""
        loss = super().step(closure)
        moved = [self.state[p] for group in self.param_groups for p in group["params"] if p.grad is not None]
        for state in moved:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        return loss


def adamw(params: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW of torch, whose moments have the dtype of the parameters."""
    return torch.optim.AdamW(params, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def with_masters(
    params: list[nn.Parameter], rate: float, *, inner: str = "AdamW", **options: Any
) -> torch.optim.Optimizer:
    """MasterWeightOptimizer over an optimizer of this name, from this module, torch or torchao."""
    kinds: dict[str, Callable[[], Any]] = {
        "AdamW": lambda: torch.optim.AdamW,
        "AdamWWithBf16Moments": lambda: AdamWWithBf16Moments,
        "AdamW8bit": lambda: importlib.import_module("torchao.optim").AdamW8bit,
    }
    if inner != "AdamW8bit":
        options["fused"] = True
    kind = kinds[inner]()
    return qt.MasterWeightOptimizer(kind, params, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY, **options)


def of_torchao(params: list[nn.Parameter], rate: float, *, kind: str, stochastic: bool) -> torch.optim.Optimizer:
    """One of torchao's optimizers, on the weights themselves."""
    made: torch.optim.Optimizer = getattr(importlib.import_module("torchao.optim"), kind)(
        params, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY, bf16_stochastic_round=stochastic
    )
    return made


def of_bitsandbytes(params: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW8bit of bitsandbytes, on the weights themselves."""
    module = importlib.import_module("bitsandbytes.optim")
    made: torch.optim.Optimizer = module.AdamW8bit(params, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    return made


def lacks_package(name: str) -> str | None:
    """Why a row cannot run that needs this package."""
    return None if importlib.util.find_spec(name) else f"the package {name} is not installed"


def lacks_options(**options: str) -> str | None:
    """Why a row cannot run that needs these options of MasterWeightOptimizer."""
    known = inspect.signature(qt.MasterWeightOptimizer.__init__).parameters
    unknown = [name for name in options if name not in known]
    return f"MasterWeightOptimizer has no {' and '.join(unknown)}" if unknown else None


def table() -> dict[str, Contender]:
    """All contenders by name, baselines first."""
    torchao, bitsandbytes = (
        functools.partial(lacks_package, "torchao"),
        functools.partial(lacks_package, "bitsandbytes"),
    )
    low: tuple[Weights, ...] = ("bf16", "mxfp8", "nvfp4")
    rows = [Contender(weights="fp32", states=PLAIN, build=adamw, bytes_per_weight=8)]
    rows += [Contender(weights=weights, states=FULL, build=with_masters, bytes_per_weight=12) for weights in low]
    build = functools.partial(with_masters, eps=1.1e-8)
    rows += [Contender(weights=weights, states=CONTROL, build=build, bytes_per_weight=12) for weights in low]
    rows += [Contender(weights="bf16", states="no masters, torch AdamW", build=adamw, bytes_per_weight=4)]
    for kind, size in (("AdamW8bit", 2 + 8 / 256), ("AdamWFp8", 2 + 8 / 256)):
        for stochastic in (False, True):
            build = functools.partial(of_torchao, kind=kind, stochastic=stochastic)
            states = f"no masters, torchao {kind}{', stochastic' if stochastic else ''}"
            rows.append(Contender(weights="bf16", states=states, build=build, bytes_per_weight=size, missing=torchao))
    rows.append(
        Contender(
            weights="bf16",
            states="no masters, bitsandbytes AdamW8bit",
            build=of_bitsandbytes,
            bytes_per_weight=2 + 8 / 256,
            missing=bitsandbytes,
        )
    )
    for weights in low:
        build = functools.partial(with_masters, inner="AdamWWithBf16Moments")
        rows.append(
            Contender(weights=weights, states="masters fp32, moments cast to bf16", build=build, bytes_per_weight=8)
        )
        build = functools.partial(with_masters, inner="AdamW8bit")
        states = "masters fp32, torchao AdamW8bit"
        rows.append(
            Contender(weights=weights, states=states, build=build, bytes_per_weight=6 + 8 / 256, missing=torchao)
        )
        rows += [compressed(weights, masters, moments) for masters, moments in COMPRESSED]
    return {row.name: row for row in rows}


KEPT_IN = {"fp32": 4, "remainder": 2, "bfloat16": 2}  # bytes
# What MasterWeightOptimizer keeps itself: (masters, moments).
COMPRESSED = (("remainder", "float8"), ("remainder", "fp32"), ("fp32", "float8"), ("fp32", "bfloat16"))


def compressed(weights: Weights, masters: str, moments: str) -> Contender:
    """A row of MasterWeightOptimizer's own compressed states."""
    options: dict[str, Any] = {"masters": masters, "moments": moments}
    return Contender(
        weights=weights,
        states=f'masters="{masters}", moments="{moments}"',
        build=functools.partial(with_masters, **options),
        bytes_per_weight=KEPT_IN[masters] + 2 * (1 + 1 / 32 if moments == "float8" else KEPT_IN[moments]),
        missing=functools.partial(lacks_options, **options),
        remainders=masters == "remainder",
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all groups this learning rate; torchao's optimizers keep it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def master_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """What a parameter accumulates its updates in, in fp32: its master, or itself.

    Raises:
        NotImplementedError: MasterWeightOptimizer keeps the master in a form that is not known here.
    """
    if not isinstance(optimizer, qt.MasterWeightOptimizer) or (
        param.dtype == torch.float32 and not isinstance(param, qt.QuantizedTensor)
    ):
        return param.detach().float()
    state = optimizer.state[param]
    if isinstance(remainder := state.get("master_remainder"), Tensor):
        return expand_master(param, remainder)
    kept = state.get("master_weight")
    if not isinstance(kept, Tensor) or kept.dtype != torch.float32:
        raise NotImplementedError(f"a master is kept as {kept!r:.80}; master_of needs to know how to read it in fp32")
    return kept.detach()


def unsupported(contenders: Iterable[Contender]) -> dict[str, str]:
    """Of those that cannot run here, name and reason."""
    return {each.name: reason for each in contenders if (reason := each.missing())}
