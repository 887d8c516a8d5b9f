"""Who is measured by `memory`, here and on a GPU: what the weights are, and who steps them.

A further one is an entry of CONTENDERS. `missing` tells why one cannot be asked here: its library is not installed, or
its option is not one of this version's.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from qtensor import Float8CurrentScaling, MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.spec.recipes import Recipe

Weights = Literal["fp32", "bf16"]
Params = Iterable[Tensor]
RECIPES: dict[str, Recipe] = {
    "MXFP8": MXFP8BlockScaling(),
    "NVFP4": NVFP4BlockScaling(),
    "Float8 row": Float8CurrentScaling(),
    "Float8 tensor": Float8CurrentScaling(granularity="tensor"),
}
LR = 1e-3
# Of the compressed ones, those that are asked in the short version, too.
BRIEF = (
    "bf16, masters remainder, moments float8",
    "MXFP8, masters remainder, moments float8",
    "NVFP4, masters remainder, moments float8",
    "Float8 row, masters remainder, moments float8",
    "bf16, masters remainder, moments float8, on the host",
    "MXFP8, masters remainder, moments float8, on the host",
    "NVFP4, masters remainder, moments float8, on the host",
    "Float8 row, masters remainder, moments float8, on the host",
    "MXFP8, fp32 masters, on the host",
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of them.

    Attributes:
        optimizer: what steps the parameters.
        weights: what the linears' weights are; embedding and norms are bf16 beside a recipe.
        library: what has to be installed.
        options: arguments that MasterWeightOptimizer has to know.
        at_length: it is asked with --full alone (and on a GPU).
    """

    optimizer: Callable[[Params], torch.optim.Optimizer]
    weights: Weights | Recipe = "bf16"
    library: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    at_length: bool = False

    def missing(self) -> str:
        """Why it cannot be asked here; "" if it can."""
        if self.library and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        known = inspect.signature(MasterWeightOptimizer).parameters
        unknown = [f"{name}=" for name in self.options if name not in known]
        return f"MasterWeightOptimizer takes no {' and no '.join(unknown)} here" if unknown else ""


def _adamw(params: Params, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, **how)


def _of(library: str, name: str) -> Callable[[Params], torch.optim.Optimizer]:
    """An optimizer of a library that is imported where it is made."""

    def make(params: Params) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(importlib.import_module(f"{library}.optim"), name)(params, lr=LR)
        return made

    return make


def _masters(weights: Weights | Recipe, *, at_length: bool = False, **options: Any) -> Contender:
    """MasterWeightOptimizer(AdamW); foreach, which is torch's own choice on a GPU."""
    make = partial(_master_weight_optimizer, options)
    return Contender(weights=weights, optimizer=make, options=options, at_length=at_length)


def _master_weight_optimizer(options: dict[str, Any], params: Params) -> torch.optim.Optimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, params, lr=LR, foreach=True, **options)


def _compressed() -> dict[str, Contender]:
    """Masters and moments in fewer bytes than fp32's, or in host memory."""
    ours: dict[str, Weights | Recipe] = {"bf16": "bf16", **RECIPES}
    ways: dict[str, dict[str, Any]] = {
        "masters remainder, moments float8": {"masters": "remainder", "moments": "float8"},
        "masters remainder, moments bfloat16": {"masters": "remainder", "moments": "bfloat16"},
        "masters remainder": {"masters": "remainder"},
        "masters remainder, moments float8, on the host": {
            "masters": "remainder",
            "moments": "float8",
            "states": "host",
        },
        "fp32 masters, on the host": {"states": "host"},
    }
    return {
        f"{name}, {title}": _masters(weights, at_length=f"{name}, {title}" not in BRIEF, **options)
        for name, weights in ours.items()
        for title, options in ways.items()
    }


BF16_MASTERS = "bf16, fp32 masters"
CONTENDERS: dict[str, Contender] = {
    "fp32, AdamW": Contender(weights="fp32", optimizer=partial(_adamw, foreach=True)),
    "fp32, AdamW fused": Contender(weights="fp32", optimizer=partial(_adamw, fused=True), at_length=True),
    "bf16, AdamW": Contender(optimizer=partial(_adamw, foreach=True)),
    "bf16, AdamW fused": Contender(optimizer=partial(_adamw, fused=True), at_length=True),
    "bf16, torchao AdamW8bit": Contender(library="torchao", optimizer=_of("torchao", "AdamW8bit")),
    "bf16, torchao AdamWFp8": Contender(library="torchao", optimizer=_of("torchao", "AdamWFp8"), at_length=True),
    "bf16, bitsandbytes AdamW8bit": Contender(library="bitsandbytes", optimizer=_of("bitsandbytes", "AdamW8bit")),
    BF16_MASTERS: _masters("bf16"),
    **{
        f"{name}, fp32 masters": _masters(recipe, at_length=name == "Float8 tensor") for name, recipe in RECIPES.items()
    },
    **_compressed(),
}
