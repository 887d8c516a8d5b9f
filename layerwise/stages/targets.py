"""Targets: the weights that a calibration quantizes, found in the module tree before anything runs.

A target is the weight [N, K] of an nn.Linear or a parameter [E, N, K] of a module of experts. Targets are read from the
tree, never from what a forward happened to use, so that ranks agree even if their batches reach different experts.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dcp_adapters.hf.names import fused_key
from fsdp_hooks.torch_private import local_of
from layerwise.formats.assignment import Assignment, Formats, all_recipes, recipe_of
from layerwise.formats.candidates import Menu
from qtensor.float8_delayed import Float8DelayedScaling
from qtensor.formats import APPEARANCE_DTYPES, check_shape, registered, shared_amax, tensor_wide
from qtensor.high_precision import HighPrecisionWeight
from qtensor.recipes import Recipe
from qtensor.selection import check_lists, matches, unmatched
from qtensor.tensor import QuantizedTensor

NOTHING = "no module with a weight to quantize (an nn.Linear, or experts [E, N, K])"
OTHERS = "Other layers (embeddings, convolutions, Conv1D of transformers) are not calibrated"


@dataclass(frozen=True, eq=False)
class Target:
    """One weight to quantize.

    Attributes:
        name: fqn of the parameter.
        module_name: fqn of the module that owns it.
        owner: that module.
        attribute: the parameter's name in that module.
        shape: the global shape, [N, K] or [E, N, K].
        dtype: of the parameter, which is the appearance dtype of the result.
    """

    name: str
    module_name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def param(self) -> nn.Parameter:
        """The parameter at this moment: a shard, a gathered weight or a working copy."""
        param = self.owner._parameters[self.attribute]
        assert param is not None
        return param

    @property
    def experts(self) -> int:
        """How many experts it holds; 1 for a 2-D weight."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def linears(self) -> tuple[str, ...]:
        """The names of its 2-D weights, as statistics and reports use them."""
        return linear_names(self.name, self.shape)

    def matrices(self) -> Iterable[tuple[str, Tensor]]:
        """(name, [N, K]) of its 2-D weights at this moment, aliased."""
        weight = self.param.detach()
        return zip(self.linears(), weight.unbind(0) if weight.ndim == 3 else (weight,), strict=True)


def linear_names(fqn: str, shape: Sequence[int]) -> tuple[str, ...]:
    """The names of a weight's linears: its fqn, with the number of the expert in brackets for a 3-D weight."""
    return (fqn,) if len(shape) == 2 else tuple(f"{fqn}[{expert}]" for expert in range(shape[0]))


def find_targets(
    model: nn.Module, recipe: Formats, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> list[Target]:
    """The targets of a model, in the model's order; weights that are tied to others are left out.

    Args:
        model: sharded or not.
        recipe: how they will be quantized; what an assignment leaves dense, or does not name, is no target.
        include: globs over module fqns; every one must match a module with a weight to quantize.
        exclude: globs over the fqns of modules to leave out; one that matches nothing warns.

    Raises:
        ValueError: a pattern of `include` matches nothing or only tied weights, a shape does not fit the recipe, a
            weight is stored quantized under another recipe.
        TypeError: a string instead of a list of patterns; a weight or a recipe that cannot be calibrated.
    """
    check_lists("calibrate", include=include, exclude=exclude)
    for one in all_recipes(recipe):
        registered(one)
        if isinstance(one, Float8DelayedScaling):
            raise TypeError(
                "calibrate: Float8DelayedScaling takes its scales from training steps; calibrate with "
                "Float8CurrentScaling"
            )
    candidates = _quantizable(model)
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    free = {name for name, target in candidates.items() if uses[id(target.param)] == 1}
    modules = {candidates[name].module_name for name in candidates}
    for pattern in unmatched(include, modules):
        raise ValueError(f"calibrate: include pattern {pattern!r} matches {NOTHING}")
    for pattern in unmatched(include, {candidates[name].module_name for name in free}):
        raise ValueError(
            f"calibrate: include pattern {pattern!r} matches only weights that are tied to others, such as an "
            f"embedding; untie them first (two parameters), or leave them out. {OTHERS}"
        )
    for pattern in unmatched(exclude, modules):
        warnings.warn(
            f"calibrate: exclude pattern {pattern!r} matches {NOTHING}",
            stacklevel=4,  # the caller of `calibrate`
        )
    chosen = [
        target
        for name, target in candidates.items()
        if name in free and matches(target.module_name, include) and not matches(target.module_name, exclude)
    ]
    if isinstance(recipe, Assignment):
        _check_assigned(recipe, candidates, free)
        chosen = [target for target in chosen if recipe.recipes.get(target.name) is not None]
    for target in chosen:
        _check(target, None if isinstance(recipe, Menu) else recipe_of(recipe, target.name))
    return chosen


def agreed_amaxes(targets: Iterable[Target], recipe: Formats) -> dict[str, Tensor | None]:
    """The amax of every 2-D weight's shared scale, agreed between the weights that share it.

    For recipes of blocks under a global scale, the weights that an engine fuses share one, if their recipe is the same.
    """
    sets: dict[tuple[Recipe, tuple[str, ...]], list[Target]] = {}
    for target in targets:
        own_recipe = recipe_of(recipe, target.name)
        fused = fused_key(target.module_name) if tensor_wide(own_recipe) == "global_scale" else None
        sets.setdefault((own_recipe, fused or (target.name,)), []).append(target)
    found: dict[str, Tensor | None] = {}
    for (shared, _), together in sets.items():
        own = [_own_amax(target, shared) for target in together]
        for target, amax in zip(together, own, strict=True):
            agreed = torch.stack(own).amax() if len(own) > 1 else amax  # type: ignore[arg-type]
            for index, name in enumerate(target.linears()):
                per_row = agreed is not None and agreed.ndim == 3  # [E, N, 1]
                found[name] = agreed[index] if per_row and agreed is not None else agreed
    return found


def _own_amax(target: Target, recipe: Recipe) -> Tensor | None:
    """`shared_amax` of the whole target, one expert at a time."""
    found = [shared_amax(matrix.float(), recipe) for _, matrix in target.matrices()]
    if found[0] is None or len(target.shape) == 2:
        return found[0]
    stacked = torch.stack([amax for amax in found if amax is not None])  # [E] or [E, N, 1]
    return stacked.amax() if stacked.ndim == 1 else stacked


def _quantizable(model: nn.Module) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, NonDynamicallyQuantizableLinear):
            continue  # nn.MultiheadAttention uses its weight without calling the module
        for attribute, param in module._parameters.items():
            is_linear = isinstance(module, nn.Linear) and attribute == "weight"
            is_experts = "expert" in fqn.rpartition(".")[2].lower() and param is not None and param.ndim == 3
            if param is not None and (is_linear or is_experts):
                name = f"{fqn}.{attribute}".lstrip(".")
                found[name] = Target(name, fqn, module, attribute, param.shape, param.dtype)
    return found


def _transposed(owner: nn.Module) -> bool:
    """Whether experts are stored [E, K, N]: the module says so, or a fused gate and up beside its down shows it.

    With I columns inside an expert and H outside, these are [2I, H] and [H, I], or else [H, 2I] and [I, H].
    """
    if getattr(owner, "is_transposed", False):
        return True
    shapes = [param.shape[1:] for param in owner._parameters.values() if param is not None and param.ndim == 3]
    pairs = [*itertools.permutations(shapes, 2)]
    upright = any(up[1] == down[0] and up[0] == 2 * down[1] for up, down in pairs)
    return not upright and any(up[0] == down[1] and up[1] == 2 * down[0] for up, down in pairs)


def _check_assigned(assignment: Assignment, candidates: Collection[str], free: Collection[str]) -> None:
    """Raise ValueError where an assignment quantizes what is no weight of the model, or a tied one."""
    for name, recipe in assignment.recipes.items():
        if recipe is not None and name not in free:
            what = "which is tied to another weight" if name in candidates else f"but the model has {NOTHING} there"
            raise ValueError(
                f"calibrate: the assignment gives {name!r} {recipe}, {what}; search formats for this model, or give "
                "it None"
            )


def _check(target: Target, recipe: Recipe | None) -> None:
    """Raise where a target cannot be calibrated; recipe None: it is not known yet."""
    local: Tensor = local_of(target.param)
    if recipe is not None:
        check_shape(target.shape, recipe, target.name)
    elif isinstance(local, QuantizedTensor):
        raise ValueError(
            f"{target.name} is stored quantized under {local.recipe}: formats are searched for dense weights; load the "
            "checkpoint into a dense model, or exclude it"
        )
    if target.dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"{target.name} is {target.dtype}; expected bfloat16, float16 or float32")
    if recipe is not None and isinstance(local, QuantizedTensor) and local.recipe.stored != recipe.stored:
        raise ValueError(
            f"{target.name} is stored quantized under {local.recipe}, expected {recipe}: quantized storage keeps its "
            "format; calibrate with that recipe, or load the checkpoint into dense weights"
        )
    if isinstance(local, HighPrecisionWeight):
        raise TypeError(
            f'{target.name} was built under quantized_model_init(storage="high_precision"), which quantizes it in '
            "every gather; calibrate the plain dense model"
        )
    if len(target.shape) == 3 and _transposed(target.owner):
        raise ValueError(
            f"{target.name} {tuple(target.shape)} is stored [experts, K, N]: its blocks would run along the output; "
            "exclude it, or store it [experts, N, K]"
        )
    placements: Any = getattr(target.param, "placements", ())
    cuts = [place.dim for place in placements if hasattr(place, "dim")]
    if cuts not in ([], [0]):
        raise ValueError(
            f"{target.name} is placed {placements}: tensor parallelism is not supported by calibrate; "
            "shard the model with fully_shard alone"
        )
