"""Targets: the weights that a calibration quantizes, found in the module tree before anything runs.

A target is the weight [N, K] of an nn.Linear or a parameter [E, N, K] of a module of experts. Some models store the
transpose, [K, N] or [E, K, N] (Conv1D of transformers, the experts of gpt-oss and Llama 4): everything here sees their
linears, [N, K] all the same. Targets are read from the tree, never from what a forward happened to use, so that ranks
agree even if their batches reach different experts.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dcp_adapters.hf.files.engine_names import fused_key
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.wrappers import plain_modules
from layerwise.formats.assignment import Assignment, Formats, all_recipes, recipe_of
from layerwise.formats.candidates import Menu
from layerwise.stages.caller import caller
from qtensor.formats.float8_delayed import Float8DelayedScaling
from qtensor.model.routers import left_alone, routers_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, check_shape, registered, shared_amax, tensor_wide
from qtensor.spec.selection import check_lists, matches, unmatched
from qtensor.tensor.quantized_tensor import QuantizedTensor

NOTHING = "no module with a weight to quantize (an nn.Linear, a Conv1D of transformers, or experts [E, N, K])"
OTHERS = "Other layers (embeddings, convolutions) are not calibrated"


@dataclass(frozen=True, eq=False)
class Target:
    """One weight to quantize.

    Attributes:
        name: fqn of the parameter.
        module_name: fqn of the module that owns it.
        owner: that module.
        attribute: the parameter's name in that module.
        shape: the global shape of its linears, [N, K] or [E, N, K].
        dtype: of the parameter, which is the appearance dtype of the result.
        transposed: whether the parameter is stored [K, N] or [E, K, N].
    """

    name: str
    module_name: str
    owner: nn.Module
    attribute: str
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool = False

    @property
    def param(self) -> nn.Parameter:
        """Return the parameter at this moment: a shard, a gathered weight or a working copy."""
        param = self.owner._parameters[self.attribute]
        assert param is not None
        return param

    @property
    def weight(self) -> Tensor:
        """Return its linears [N, K] or [E, N, K] at this moment, aliased; a view of a transposed parameter."""
        held = self.param.data
        return held.mT if self.transposed else held

    @property
    def experts(self) -> int:
        """Return how many experts it holds; 1 for a 2-D weight."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def linears(self) -> tuple[str, ...]:
        """Return the names of its 2-D weights, as statistics and reports use them."""
        return linear_names(self.name, self.shape)

    def matrices(self) -> Iterable[tuple[str, Tensor]]:
        """Return the name and the [N, K] of each of its 2-D weights at this moment, aliased."""
        weight = self.weight
        return zip(self.linears(), weight.unbind(0) if weight.ndim == 3 else (weight,), strict=True)


def linear_names(fqn: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return the names of a weight's linears: its fqn, for a 3-D weight with the number of the expert in brackets."""
    return (fqn,) if len(shape) == 2 else tuple(f"{fqn}[{expert}]" for expert in range(shape[0]))


def find_targets(
    model: nn.Module, recipe: Formats, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> list[Target]:
    """Return the targets of a model, in the model's order; weights that are tied to others are left out.

    Args:
        model: sharded or not.
        recipe: how they will be quantized; what an assignment leaves dense, or does not name, is no target.
        include: globs over module fqns; every one must match a module with a weight to quantize. Routers, which choose
            experts (qtensor/model/routers.py), are taken if a pattern matches nothing else.
        exclude: globs over the fqns of modules to leave out; one that matches nothing warns.

    Raises:
        ValueError: a pattern of `include` matches nothing or only tied weights, a shape does not fit the recipe, a
            weight is stored quantized under another recipe.
        TypeError: a string instead of a list of patterns; a weight or a recipe that cannot be calibrated.
    """
    check_lists(caller(), include=include, exclude=exclude)
    for one in all_recipes(recipe):
        registered(one)
        if isinstance(one, Float8DelayedScaling):
            raise TypeError(
                f"{caller()}: Float8DelayedScaling takes its scales from training steps; calibrate with "
                "Float8CurrentScaling"
            )
    candidates = _find_quantizable(model)
    # A weight that is registered twice is used in another way elsewhere (an embedding looks its rows up), where
    # its quantized values would count, too.
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    free = {name for name, target in candidates.items() if uses[id(target.param)] == 1}
    modules = {candidates[name].module_name for name in candidates}
    for pattern in unmatched(include, modules):
        raise ValueError(f"{caller()}: include pattern {pattern!r} matches {NOTHING}")
    for pattern in unmatched(include, {candidates[name].module_name for name in free}):
        raise ValueError(
            f"{caller()}: include pattern {pattern!r} matches only weights that are tied to others, such as an "
            f"embedding; untie them first (two parameters), or leave them out. {OTHERS}"
        )
    for pattern in unmatched(exclude, modules):
        warnings.warn(
            f"{caller()}: exclude pattern {pattern!r} matches {NOTHING}",
            stacklevel=4,  # the caller of `calibrate`
        )
    left = left_alone(routers_of(model, modules), modules, include)
    chosen = [
        target
        for name, target in candidates.items()
        if name in free
        and target.module_name not in left
        and matches(target.module_name, include)
        and not matches(target.module_name, exclude)
    ]
    if isinstance(recipe, Assignment):
        _check_assigned(recipe, candidates, free)
        chosen = [target for target in chosen if recipe.recipes.get(target.name) is not None]
    for target in chosen:
        _check(target, None if isinstance(recipe, Menu) else recipe_of(recipe, target.name))
    return chosen


def agree_on_amaxes(targets: Iterable[Target], recipe: Formats) -> dict[str, Tensor | None]:
    """Return the amax of every 2-D weight's shared scale, agreed between the weights that share it.

    For recipes of blocks under a global scale, the weights that an engine fuses share one, if their recipe is the same.
    """
    sets: dict[tuple[Recipe, tuple[str, ...]], list[Target]] = {}
    for target in targets:
        own_recipe = recipe_of(recipe, target.name)
        linear = target.name if len(target.shape) == 3 else target.module_name  # a parameter of experts, or a module
        # Engines run q, k and v as one product under one global scale, so calibration must give them the
        # same.
        fused = fused_key(linear) if tensor_wide(own_recipe) == "global_scale" else None
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
    """Return `shared_amax` of the whole target, one expert at a time."""
    # One by one, so that only one expert is there in fp32.
    found = [shared_amax(matrix.float(), recipe) for _, matrix in target.matrices()]
    if found[0] is None or len(target.shape) == 2:
        return found[0]
    stacked = torch.stack([amax for amax in found if amax is not None])  # [E] or [E, N, 1]
    return stacked.amax() if stacked.ndim == 1 else stacked


def _find_quantizable(model: nn.Module) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for fqn, module in plain_modules(model):
        if isinstance(module, NonDynamicallyQuantizableLinear):
            continue  # nn.MultiheadAttention uses its weight without calling the module
        for attribute, param in module._parameters.items():
            is_linear = attribute == "weight" and (isinstance(module, nn.Linear) or _is_conv1d(module))
            is_experts = "expert" in fqn.rpartition(".")[2].lower() and param is not None and param.ndim == 3
            if param is not None and (is_linear or is_experts):
                name = f"{fqn}.{attribute}".lstrip(".")
                turned = is_stored_transposed(module, attribute)
                shape = torch.Size((*param.shape[:-2], *param.shape[:-3:-1])) if turned else param.shape
                found[name] = Target(name, fqn, module, attribute, shape, param.dtype, turned)
    return found


def is_stored_transposed(module: nn.Module, attribute: str) -> bool:
    """Return whether a parameter of a module is multiplied as it is, x @ W with W [K, N] or [E, K, N].

    Asked of linears and of experts; of another parameter the answer means nothing.
    """
    param = module._parameters[attribute]
    if param is None:
        return False
    return (attribute == "weight" and _is_conv1d(module)) or (param.ndim == 3 and _has_transposed_experts(module))


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, or made like it: x @ W + b with W [K, N]."""
    weight, width = module._parameters.get("weight"), getattr(module, "nf", None)
    return type(module).__name__ == "Conv1D" and weight is not None and weight.ndim == 2 and weight.shape[1] == width


def _has_transposed_experts(owner: nn.Module) -> bool:
    """Return whether experts are stored [E, K, N]: the module says so, or a fused gate and up beside a down shows it.

    With I columns inside an expert and H outside, these are [2I, H] and [H, I], or else [H, 2I] and [I, H].
    """
    if getattr(owner, "is_transposed", False):
        return True
    shapes = [param.shape[1:] for param in owner._parameters.values() if param is not None and param.ndim == 3]
    pairs = [*itertools.permutations(shapes, 2)]
    upright = any(up[1] == down[0] and up[0] == 2 * down[1] for up, down in pairs)
    return not upright and any(up[0] == down[1] and up[1] == 2 * down[0] for up, down in pairs)


def _check_assigned(assignment: Assignment, candidates: Collection[str], free: Collection[str]) -> None:
    """Raise ValueError if an assignment quantizes what is no weight of the model, or a tied one."""
    for name, recipe in assignment.recipes.items():
        if recipe is not None and name not in free:
            what = "which is tied to another weight" if name in candidates else f"but the model has {NOTHING} there"
            raise ValueError(
                f"{caller()}: the assignment gives {name!r} {recipe}, {what}; search formats for this model, or give "
                "it None"
            )


def _check(target: Target, recipe: Recipe | None) -> None:
    """Raise if a target cannot be calibrated; recipe None: it is not known yet."""
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
    if recipe is not None and isinstance(local, HighPrecisionWeight) and local.recipe.stored != recipe.stored:
        raise ValueError(
            f'{target.name} was built under quantized_model_init({local.recipe}, storage="high_precision"), expected '
            f"{recipe}: its gathers go on in that format; calibrate with that recipe, or load the values into a dense "
            "model"
        )
    if target.transposed and isinstance(local, QuantizedTensor | HighPrecisionWeight):
        raise ValueError(
            f"{target.name} {tuple(target.param.shape)} is stored transposed and quantized under {local.recipe}: its "
            "blocks run along the output; exclude it, or load it dense"
        )
