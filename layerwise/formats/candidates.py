"""What could be done with each group of weights: for each recipe the bits that it takes and the error that it makes.

A group is what an engine runs as one, and so must have one format: q, k and v; gate and up; all experts of a module. A
recipe is a candidate for a group if it fits the shapes of all its weights. "Dense" (None) always fits, makes no error
and takes the bits of the model's dtype.

The error of a linear on its inputs x, all batches of all ranks together, with Q the rounded weight and H = E[x x^T]:

    noise = E |(Q - W) x|^2 = tr((Q - W) H (Q - W)^T)        signal = E |W x|^2 = tr(W H W^T)

Errors of different linears are added, so they need one unit. "relative" takes noise / signal. What a model computes
does not change if a linear's output is multiplied by c and the next module divides by c (v_proj by o_proj, a linear by
the norm behind it), so no order of linears may depend on c. The noise changes by c^2, and so does the signal: only
functions of their ratio are left, and if errors are small and independent, energies add. "absolute" takes the noise
alone.

Experts of one role (all up_proj of a module) are one linear here: each token passes through some of them, so noise and
signal are summed with the tokens of each expert before they are divided.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_adapters.hf.files.engine_names import fused_key
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import check_shape, registered, specs_of

COMPARE = ("relative", "absolute")
_EXPERT = re.compile(r"^(.*expert[^.]*)\.\d+\.(.*)$", re.IGNORECASE)  # <path>.experts.<number>.<the rest>


@dataclass(frozen=True)
class Menu:
    """The recipes to choose from; None: the weight stays as it is.

    Raises:
        TypeError, ValueError: something is no recipe, or is there twice, or nothing is there.
    """

    recipes: tuple[Recipe | None, ...]

    def __post_init__(self) -> None:
        for recipe in self.recipes:
            if recipe is not None and not isinstance(recipe, Recipe):
                raise TypeError(
                    f"search_formats: recipes has {recipe!r}; expected recipes, such as NVFP4BlockScaling(), or None "
                    "for weights that stay as they are"
                )
            if isinstance(recipe, Float8DelayedScaling):
                raise TypeError(
                    "search_formats: Float8DelayedScaling takes its scales from training steps; give "
                    "Float8CurrentScaling"
                )
            if recipe is not None:
                registered(recipe)
        if not any(self.recipes):
            raise ValueError("search_formats: recipes has no recipe; give some, such as [NVFP4BlockScaling(), None]")
        # Recipes are compared by value, so equal ones that were built apart are found, too.
        twice = [recipe for number, recipe in enumerate(self.recipes) if recipe in self.recipes[:number]]
        if twice:
            raise ValueError(f"search_formats: recipes has {twice[0]} twice; give each recipe once")

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint's fingerprint compares."""
        return {"type": "Menu", "recipes": [recipe and recipe.to_json() for recipe in self.recipes]}


@dataclass(frozen=True)
class Weight:
    """A weight to choose a format for.

    Attributes:
        name: its fqn.
        shape: [N, K] or [E, N, K].
        dtype: its own, which it keeps if no recipe is chosen.
        linears: the names of its 2-D weights.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    linears: tuple[str, ...]


@dataclass(frozen=True)
class LinearErrors:
    """What was measured of one 2-D weight.

    Attributes:
        name: fqn of the weight, with the number of the expert in brackets if it has several.
        tokens: rows of its input, over all ranks.
        signal: mean energy of a row of its output; if there are no tokens, the energy of the weight itself.
        noise: the same of its error, for each recipe of the menu; None if the shape does not fit.
    """

    name: str
    tokens: int
    signal: float
    noise: tuple[float | None, ...]


@dataclass(frozen=True)
class Candidate:
    """One way to store a group.

    Attributes:
        recipe: None: as it is.
        bits: of all parts of all its weights.
        error: comparable between groups.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> menu = [NVFP4BlockScaling(), MXFP8BlockScaling()]
        >>> assignment = search_formats(model, [torch.randn(8, 64)], recipes=menu, bits_per_weight=7, layers=["0", "1"])
        >>> [one.bits for one in assignment.groups[0].candidates]  # in the order of the menu
        [18464, 33792]
        ```
    """

    recipe: Recipe | None
    bits: int
    error: float


@dataclass(frozen=True)
class LinearGroup:
    """Weights that get one format.

    Attributes:
        names: their fqns, in the model's order.
        weights: how many elements they have together.
        candidates: in the order of the menu.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> menu = [NVFP4BlockScaling(), MXFP8BlockScaling()]
        >>> assignment = search_formats(model, [torch.randn(8, 64)], recipes=menu, bits_per_weight=7, layers=["0", "1"])
        >>> [(group.names, group.weights) for group in assignment.groups]
        [(('0.weight',), 4096), (('1.weight',), 4096)]
        ```
    """

    names: tuple[str, ...]
    weights: int
    candidates: tuple[Candidate, ...]


def fits(shape: Sequence[int], recipe: Recipe | None) -> bool:
    """Return whether a weight of this shape can be quantized under a recipe."""
    if recipe is None:
        return True
    try:
        check_shape(shape, recipe)
    except ValueError:
        return False
    return True


def bits_of(weight: Weight, recipe: Recipe | None) -> int:
    """Return the bits of all parts of a weight, scales included."""
    if recipe is None:
        return 8 * weight.dtype.itemsize * weight.shape.numel()
    return sum(8 * spec.dtype.itemsize * torch.Size(spec.shape(weight.shape)).numel() for spec in specs_of(recipe))


def together(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Return the weights in groups that get one format, in the order of their first members."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(_group_key(weight), []).append(weight)
    return list(groups.values())


def candidates_of(
    weights: Sequence[Weight], menu: Menu, measured: Mapping[str, LinearErrors], compare: str = "relative"
) -> tuple[LinearGroup, ...]:
    """Return all groups with their candidates.

    Args:
        weights: in the model's order.
        menu: the recipes.
        measured: for each 2-D weight.
        compare: "relative" or "absolute"; see the top of this file.
    """
    groups = []
    for group in together(weights):
        candidates = [
            Candidate(recipe, sum(bits_of(one, recipe) for one in group), _error(group, place, measured, compare))
            for place, recipe in _find_fitting(group, menu)
        ]
        names, elements = tuple(one.name for one in group), sum(one.shape.numel() for one in group)
        groups.append(LinearGroup(names, elements, tuple(candidates)))
    return tuple(groups)


def least_bits(weights: Sequence[Weight], menu: Menu) -> int:
    """Return the bits of all weights if each group takes as few as it can.

    Raises:
        ValueError: no recipe of the menu fits all weights of a group.
    """
    least = 0
    for group in together(weights):
        fitting = _find_fitting(group, menu)
        if not fitting:
            shapes = ", ".join(f"{weight.name} {tuple(weight.shape)}" for weight in group[:5])
            raise ValueError(
                f"search_formats: no recipe fits {shapes}; add None to recipes, which leaves such weights as they are, "
                "or another recipe, or exclude them"
            )
        least += min(sum(bits_of(weight, recipe) for weight in group) for _, recipe in fitting)
    return least


def _find_fitting(group: Sequence[Weight], menu: Menu) -> list[tuple[int, Recipe | None]]:
    """Return the recipes that fit all weights of a group, with their places in the menu."""
    return [(n, recipe) for n, recipe in enumerate(menu.recipes) if all(fits(one.shape, recipe) for one in group)]


def _group_key(weight: Weight) -> object:
    module, _, _ = weight.name.rpartition(".")
    if len(weight.shape) == 3:
        return "experts", module
    expert = _EXPERT.match(module)
    if expert:
        return "experts", expert[1]
    # q, k and v, or gate and up, have one key: engines run them as one matrix.
    return fused_key(module) or module


def _role(name: str) -> str:
    """Return the name of a linear without the number of its expert."""
    expert = _EXPERT.match(name)
    return f"{expert[1]}.*.{expert[2]}" if expert else re.sub(r"\[\d+\]$", "", name)


def _error(group: Sequence[Weight], place: int, measured: Mapping[str, LinearErrors], compare: str) -> float:
    """Return the error of a group under one recipe of the menu: the sum over its roles."""
    roles: dict[str, list[LinearErrors]] = {}
    for weight in group:
        for name in weight.linears:
            roles.setdefault(_role(name), []).append(measured[name])
    return math.fsum(_role_error(linears, place, compare) for linears in roles.values())


def _role_error(linears: Sequence[LinearErrors], place: int, compare: str) -> float:
    tokens = sum(linear.tokens for linear in linears)
    # Without any data all experts count alike; with data those count that tokens pass through.
    shares = [linear.tokens if tokens else 1 for linear in linears]
    noise = math.fsum(share * (linear.noise[place] or 0.0) for share, linear in zip(shares, linears, strict=True))
    signal = math.fsum(share * linear.signal for share, linear in zip(shares, linears, strict=True))
    if compare == "absolute":
        return noise / sum(shares)
    if signal == 0:  # nothing comes out of it, so any error is as large as can be
        return 1.0 if noise else 0.0
    return noise / signal
