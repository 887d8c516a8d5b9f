"""Quantized parameters in third-party models: `quantized_model_init` while they are built, `quantize_` afterwards.

`quantized_model_init` watches every parameter registration (torch's public registration hook) and replaces the weight
of each nn.Linear by a quantized parameter as soon as it is registered. What the constructor then writes into it
(`uniform_`, `normal_`, `copy_`) goes through the op table and is quantized. On the meta device the same happens without
bytes.

Tied weights stay as they are. A weight that some other module registered first (an embedding given to lm_head) is never
quantized. A quantized weight that is later given to a module other than nn.Linear becomes a dense parameter again, in
both modules.
"""

import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp_hooks.torch_private import local_of
from fsdp_hooks.wrappers import plain_modules
from qtensor.model.loading import watch_loads
from qtensor.model.log import LOG, log_built, log_quantized
from qtensor.model.routers import EXPERTS, GATES, is_router_class, left_alone, named_router, routers_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, check_shape, describe, keeps_history, registered, specs_of
from qtensor.spec.selection import check_lists, matches, unmatched
from qtensor.tensor.contents import initial_value, preserve, values_of
from qtensor.tensor.quantized_tensor import QuantizedTensor, quantize

STORAGES = ("quantized", "high_precision")


@contextmanager
def quantized_model_init(
    recipe: Recipe,
    *,
    enabled: bool = True,
    storage: str = "quantized",
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Context manager: nn.Linear weights built inside become quantized parameters.

    Works under `torch.device("meta")` and for unmodified third-party models. Biases, norms, embeddings, tied weights
    and routers, which choose experts (qtensor/model/routers.py), stay as they are.

    Args:
        recipe: how to quantize.
        enabled: False makes it a no-op.
        storage: "quantized": the shards are quantized. "high_precision": they stay dense and are quantized on their way
            into the all-gather (any torch optimizer, dense checkpoints; see `fsdp_hooks.sync_scales`).
        preserve_high_precision_init_val: also keep the high-precision values that are written into the weights, sharded
            as the weights are, so that MasterWeightOptimizer starts from them; this costs a dense copy until
            `clear_high_precision_init_val`. No effect with storage="high_precision", which keeps these values anyway.

    Raises:
        ValueError: an unknown storage; storage="high_precision" with a recipe that keeps a history; a
            Linear whose shape does not fit the recipe's blocks.
        TypeError: `recipe` is not a recipe.

    Example:
        ```python
        >>> with torch.device("meta"), quantized_model_init(MXFP8BlockScaling()):
        ...     model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        >>> type(model[0].weight).__name__, type(model[1].weight).__name__
        ('MXFP8Tensor', 'Parameter')
        ```
    """
    registered(recipe)
    if storage not in STORAGES:
        raise ValueError(f"quantized_model_init: storage={storage!r} is not one of {', '.join(map(repr, STORAGES))}")
    if storage == "high_precision" and keeps_history(recipe):
        raise ValueError(
            f'quantized_model_init: {recipe} keeps a history, which storage="high_precision" has no place for; use '
            'storage="quantized", or a recipe with current scaling'
        )
    if not enabled:
        yield
        return
    watch = _Registrations(recipe, storage, preserve=preserve_high_precision_init_val)
    handles = [
        register_module_parameter_registration_hook(watch),  # type: ignore[arg-type] # it may return a parameter
        register_module_module_registration_hook(watch.note_parent),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    watch_loads(watch.modules())
    if LOG.isEnabledFor(logging.INFO):
        log_built(recipe, [module for module in watch.modules() if _uses_linear(module)])


class _Registrations:
    """The registration hook: sees (module, name, parameter) and may answer with another parameter."""

    def __init__(self, recipe: Recipe, storage: str, *, preserve: bool) -> None:
        self.recipe, self.storage, self.preserve = recipe, storage, preserve
        # id -> dense parameters registered outside nn.Linear.weight
        self.seen: dict[int, weakref.ref[Tensor]] = {}
        # id of a quantized parameter -> the Linears that hold it
        self.linears: dict[int, list[weakref.ref[nn.Module]]] = {}
        # id of a dense parameter given to a Linear -> (the dense parameter, the quantized one that took its place), for
        # as long as somebody else holds the dense one. The quantized one is held strongly: swap_tensors refuses tensors
        # with weak references.
        self.replaced: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}
        # where dense parameters were registered outside nn.Linear.weight
        self.elsewhere: list[tuple[weakref.ref[nn.Module], str]] = []
        # for each module, the module that it was last registered in
        self.parents: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()

    def __call__(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None:
            return None
        is_linear_weight = _uses_linear(module) and name == "weight" and not is_router_class(module)
        if isinstance(param, QuantizedTensor | HighPrecisionWeight):
            if not is_linear_weight:
                return self._untie(param)
            self.linears.setdefault(id(param), []).append(weakref.ref(module))
            return None
        if is_linear_weight:
            return self._linear_weight(module, param)
        self._elsewhere(param)
        self.elsewhere.append((weakref.ref(module), name))
        return None

    def note_parent(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Remember the parent of each module; a module registration hook."""
        if child is not None:
            self.parents[child] = weakref.ref(parent)
            for router in _routers_with(parent, name, child):
                held: Any = router._parameters.get("weight")
                if isinstance(held, QuantizedTensor | HighPrecisionWeight):
                    self._untie(held)

    def modules(self) -> set[nn.Module]:
        """Return what was built: Linears, and every module that became a parent or a child, with deep copies."""
        linears = {ref() for refs in self.linears.values() for ref in refs}
        parents = {ref() for ref in self.parents.values()}
        return {module for module in {*linears, *parents, *self.parents} if module is not None}

    def _elsewhere(self, param: nn.Parameter) -> None:
        """Remember a dense parameter that is not a Linear's weight, and give it back to Linears that had it first."""
        self.seen[id(param)] = weakref.ref(param)
        stood_for = self._stands_for(param)
        if stood_for is not None:
            self._replace(stood_for, param)

    def _linear_weight(self, module: nn.Module, param: nn.Parameter) -> nn.Parameter | None:
        if isinstance(param, DTensor):
            _refuse_dense_shards(module, param)
            return None
        known = self.seen.get(id(param))
        if (known is not None and known() is param) or self._is_held_elsewhere(param):
            return None  # tied to a parameter that another module owns
        quantized = self._stands_for(param)
        if quantized is None:
            quantized = self._quantize(param)
            # such as a loader's mark "needs no init"
            for name in vars(param).keys() - vars(quantized).keys():
                setattr(quantized, name, getattr(param, name))
            key = id(param)
            self.replaced[key] = (weakref.ref(param, lambda _: self.replaced.pop(key, None)), quantized)
        # more than one if Linears share it
        self.linears.setdefault(id(quantized), []).append(weakref.ref(module))
        return quantized

    def _is_held_elsewhere(self, param: nn.Parameter) -> bool:
        """Return whether a module holds this parameter outside of nn.Linear.weight, never registered there.

        Who wraps register_parameter (accelerate's init_empty_weights) may exchange what was registered.
        """
        if nn.Module.register_parameter.__module__ == nn.Module.__module__:
            return False
        holders = ((ref(), name) for ref, name in self.elsewhere)
        return any(module is not None and module._parameters.get(name) is param for module, name in holders)

    def _stands_for(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return the quantized parameter that took the place of this dense one, if any."""
        dense, quantized = self.replaced.get(id(param), (None, None))
        return quantized if dense is not None and dense() is param else None

    def _replace(self, quantized: Tensor, dense: nn.Parameter) -> int:
        """Put `dense` into all Linears that hold `quantized`; returns how many there were."""
        count = 0
        refs = self.linears.pop(id(quantized), None)
        # somebody exchanged what was registered, see _is_held_elsewhere
        if refs is None:
            refs = [ref for refs in self.linears.values() for ref in refs]
        for ref in refs:
            linear = ref()
            held: Any = None if linear is None else linear._parameters.get("weight")
            if linear is not None and held is quantized:
                linear._parameters["weight"] = dense
                count += 1
        return count

    def _quantize(self, param: nn.Parameter) -> nn.Parameter:
        _check_weight(param, self.recipe, "weight of nn.Linear")
        if self.storage == "high_precision":
            return nn.Parameter(HighPrecisionWeight(param.detach(), self.recipe), requires_grad=param.requires_grad)
        q = _meta(param, self.recipe) if param.is_meta else quantize(param, self.recipe)
        if self.preserve:
            preserve(q, param.detach().clone())
        return nn.Parameter(q, requires_grad=param.requires_grad)

    def _untie(self, param: QuantizedTensor | HighPrecisionWeight) -> nn.Parameter:
        value = param.dense if isinstance(param, HighPrecisionWeight) else values_of(param)
        dense = nn.Parameter(value.detach().clone(), requires_grad=param.requires_grad)
        if not self._replace(param, dense):
            raise RuntimeError(
                f"{describe(param.shape, param.recipe)} is given to a module that is no nn.Linear, and which nn.Linear "
                "holds it is not known (was it deep-copied?); tie the dense weight, or leave it out of "
                "quantized_model_init"
            )
        self.seen[id(dense)] = weakref.ref(dense)
        return dense


def _routers_with(parent: nn.Module, name: str, child: nn.Module) -> list[nn.Module]:
    """Return the linears that turn out to be routers, now that a module becomes a parent's child."""
    found = [child] if named_router(name, "") else []
    found += [inner for own, inner in child.named_children() if named_router(own, name)]
    beside = {**dict(parent.named_children()), name: child} if name == EXPERTS or name in GATES else {}
    if EXPERTS in beside:
        found += [inner for own in GATES if (inner := beside.get(own)) is not None]
    return [module for module in found if _uses_linear(module)]


def _refuse_dense_shards(module: nn.Module, param: nn.Parameter) -> None:
    """Raise if a loader replaces quantized shards by dense ones of its own, which would leave a dense model."""
    held: Any = module._parameters.get("weight")
    kinds = QuantizedTensor | HighPrecisionWeight
    if isinstance(held, DTensor) and isinstance(local_of(held), kinds) and not isinstance(local_of(param), kinds):
        raise RuntimeError(
            f"quantized_model_init: a dense DTensor of shape {tuple(param.shape)} replaces a quantized weight "
            "(transformers' from_pretrained does this with a distributed_config); shard the model by fully_shard, and "
            "read the checkpoint by dcp.load with QuantizedLoadPlanner(on_mismatch='convert')"
        )


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
    registered(recipe)
    check_lists("quantize_", include=include, exclude=exclude)
    include, exclude = tuple(include), tuple(exclude)
    linears: dict[str, Any] = {fqn: child for fqn, child in plain_modules(model) if _uses_linear(child)}
    for pattern in unmatched(include, linears):
        raise ValueError(f"quantize_: include pattern {pattern!r} matches no nn.Linear of the model")
    for pattern in unmatched(exclude, linears):
        warnings.warn(f"quantize_: exclude pattern {pattern!r} matches no nn.Linear of the model", stacklevel=2)
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
        return "tied" if uses[id(child.weight)] > 1 else None

    reasons = {fqn: why_dense(fqn, child) for fqn, child in linears.items()}
    chosen = {f"{fqn}.weight".lstrip("."): child for fqn, child in linears.items() if reasons[fqn] is None}
    for fqn, child in chosen.items():
        # a shard that is quantized by itself would have scales of its own
        if isinstance(child.weight, DTensor):
            raise ValueError(
                f"quantize_: {fqn} is a DTensor already; quantize before fully_shard and parallelize_module"
            )
        _check_weight(child.weight, recipe, fqn)
    for child in chosen.values():
        weight = child.weight
        q = _meta(weight, recipe) if weight.is_meta else quantize(weight, recipe)
        child.weight = nn.Parameter(q, requires_grad=weight.requires_grad)
    watch_loads(model.modules() if chosen else ())
    if LOG.isEnabledFor(logging.INFO):
        dense = [(fqn, why) for fqn, why in reasons.items() if why is not None]
        log_quantized("quantize_", recipe, [child.weight for child in chosen.values()], dense)
    return list(chosen)


def high_precision_init_val(param: Tensor) -> Tensor | None:
    """Return the high-precision value that was written into a parameter, or None.

    It has the parameter's dtype and shape; for a DTensor, it has the shape of the local shard.
    Only parameters built under `quantized_model_init(preserve_high_precision_init_val=True)` have one.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        ...     layer = nn.Linear(64, 64)
        >>> high_precision_init_val(layer.weight).dtype
        torch.float32
        ```
    """
    local = local_of(param)
    return initial_value(local) if isinstance(local, QuantizedTensor) else None


def clear_high_precision_init_val(param: Tensor) -> None:
    """Free the preserved value. Call it once the optimizer is built.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        ...     layer = nn.Linear(64, 64)
        >>> clear_high_precision_init_val(layer.weight)
        >>> high_precision_init_val(layer.weight) is None
        True
        ```
    """
    local = local_of(param)
    if isinstance(local, QuantizedTensor):
        preserve(local, None)


def _uses_linear(module: nn.Module) -> bool:
    """Return whether a module hands its weight to F.linear: MultiheadAttention reads out_proj.weight directly."""
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _check_weight(weight: Tensor, recipe: Recipe, what: str) -> None:
    check_shape(weight.shape, recipe, what)
    if weight.dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"{what} is {weight.dtype}; expected bfloat16, float16 or float32")


def _meta(param: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Return a quantized tensor without bytes, shaped like `param`."""
    parts = {
        spec.name: torch.empty(spec.shape(param.shape), dtype=spec.dtype, device="meta") for spec in specs_of(recipe)
    }
    return QuantizedTensor.from_parts(parts, recipe, param.dtype)
