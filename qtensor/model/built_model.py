"""`quantize_`: the weights of a model that is built already, replaced by quantized parameters."""

import logging
import warnings
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.wrappers import plain_modules
from qtensor.model.loading import watch_loads
from qtensor.model.log import LOG, log_quantized
from qtensor.model.model_init import check_weight, quantize_weight, uses_linear
from qtensor.model.routers import left_alone, routers_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import registered
from qtensor.spec.selection import check_lists, matches, unmatched
from qtensor.tensor.quantized_tensor import QuantizedTensor


def quantize_(
    model: nn.Module, recipe: Recipe, *, include: Iterable[str] = ("*",), exclude: Iterable[str] = ()
) -> list[str]:
    """Replace nn.Linear weights of a built model by quantized parameters, in place; call it before fully_shard.

    Args:
        model: any module; tied weights, weights that are quantized already and adapters of peft are left alone.
        recipe: how to quantize.
        include: globs over module fqns ("lm_head", "model.layers.*.mlp.*"); every one must match some nn.Linear.
            Routers, which choose experts (qtensor/model/routers.py), are taken if a pattern matches nothing else.
        exclude: globs over the fqns of modules to leave out.

    Returns:
        The fqns of the parameters that were quantized, in model order: those of the plain model, without what wrappers
        (torch.compile, activation checkpointing, DDP, peft) put into them, as patterns have them, too.

    Raises:
        ValueError: an include pattern matches no nn.Linear; a shape does not fit the blocks; a weight is sharded
            already. Nothing has been changed then. An exclude pattern that matches nothing warns.
        TypeError: a weight is not bf16, fp16 or fp32; a string instead of a list of patterns. Nothing has been changed.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> quantize_(model, MXFP8BlockScaling(), exclude=["2"])
        ['0.weight']
        ```
    """
    chosen, left = choose_linears(model, recipe, include=include, exclude=exclude)
    for child in chosen.values():
        weight = child.weight
        child.weight = nn.Parameter(quantize_weight(weight, recipe), requires_grad=weight.requires_grad)
    watch_loads(model.modules() if chosen else ())
    if LOG.isEnabledFor(logging.INFO):
        log_quantized("quantize_", recipe, [child.weight for child in chosen.values()], left.items())
    return list(chosen)


class Choice(NamedTuple):
    """Which weights of a model are to be quantized.

    Attributes:
        linears: fqn of a weight -> the linear that has it, in model order.
        dense: fqn of another linear -> why it stays as it is.
    """

    linears: dict[str, Any]
    dense: dict[str, str]


def choose_linears(
    model: nn.Module,
    recipe: Recipe,
    *,
    include: Iterable[str] = ("*",),
    exclude: Iterable[str] = (),
    tied: Collection[str] = (),
) -> Choice:
    """Return which weights `quantize_` quantizes; nothing is changed.

    Args:
        model: any module.
        recipe: how to quantize.
        include: as of `quantize_`.
        exclude: likewise.
        tied: fqns of weights that will be tied, though they are not yet.

    Raises:
        ValueError, TypeError: as `quantize_` does.
    """
    registered(recipe)
    check_lists("quantize_", include=include, exclude=exclude)
    include, exclude = tuple(include), tuple(exclude)
    linears: dict[str, Any] = {fqn: child for fqn, child in plain_modules(model) if uses_linear(child)}
    for pattern in unmatched(include, linears):
        raise ValueError(f"quantize_: include pattern {pattern!r} matches no nn.Linear of the model")
    for pattern in unmatched(exclude, linears):
        warnings.warn(f"quantize_: exclude pattern {pattern!r} matches no nn.Linear of the model", stacklevel=3)
    left = left_alone(routers_of(model, linears), linears, include)
    # a weight that two modules hold stays as it is: the other one may be an embedding, which looks up rows
    uses: dict[int, int] = {}
    for child in model.modules():
        for param in child._parameters.values():
            uses[id(param)] = uses.get(id(param), 0) + 1

    def why_dense(fqn: str, child: Any) -> str | None:
        if not matches(fqn, include):
            return "not included"
        if matches(fqn, exclude):
            return "excluded"
        if fqn in left:
            return "a router"
        if isinstance(child.weight, QuantizedTensor | HighPrecisionWeight):
            return "quantized already"
        return "tied" if uses[id(child.weight)] > 1 or f"{fqn}.weight" in tied else None

    reasons = {fqn: why_dense(fqn, child) for fqn, child in linears.items()}
    chosen = {f"{fqn}.weight".lstrip("."): child for fqn, child in linears.items() if reasons[fqn] is None}
    for fqn, child in chosen.items():
        # a shard that is quantized by itself would have scales of its own
        if isinstance(child.weight, DTensor):
            raise ValueError(
                f"quantize_: {fqn} is a DTensor already; quantize before fully_shard and parallelize_module"
            )
        check_weight(child.weight, recipe, fqn)
    return Choice(chosen, {fqn: why for fqn, why in reasons.items() if why is not None})
