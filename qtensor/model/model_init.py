"""Quantized parameters in third-party models while they are built (afterwards: built_model.py).

`quantized_model_init` watches every parameter registration (torch's public registration hook) and replaces the weight
of each nn.Linear by a quantized parameter as soon as it is registered. What the constructor then writes into it
(`uniform_`, `normal_`, `copy_`) goes through the op table and is quantized. On the meta device the same happens without
bytes.

Tied weights stay as they are. A weight that some other module registered first (an embedding given to lm_head) is never
quantized. A quantized weight that is later given to a module other than nn.Linear becomes a dense parameter again, in
both modules.
"""

import logging
import weakref
from collections.abc import Iterator
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
from qtensor.model.loading import watch_loads
from qtensor.model.log import LOG, log_built
from qtensor.model.routers import EXPERTS, GATES, is_router_class, named_router
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import APPEARANCE_DTYPES, check_shape, describe, keeps_history, registered, specs_of
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
        log_built(recipe, [module for module in watch.modules() if uses_linear(module)])


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
        is_linear_weight = uses_linear(module) and name == "weight" and not is_router_class(module)
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
        check_weight(param, self.recipe, "weight of nn.Linear")
        if self.storage == "high_precision":
            return nn.Parameter(HighPrecisionWeight(param.detach(), self.recipe), requires_grad=param.requires_grad)
        q = quantize_weight(param, self.recipe)
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
    return [module for module in found if uses_linear(module)]


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


def uses_linear(module: nn.Module) -> bool:
    """Return whether a module hands its weight to F.linear: MultiheadAttention reads out_proj.weight directly."""
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def check_weight(weight: Tensor, recipe: Recipe, what: str) -> None:
    """Raise ValueError if a weight's shape does not fit the blocks, TypeError if its dtype is not a floating one."""
    check_shape(weight.shape, recipe, what)
    if weight.dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"{what} is {weight.dtype}; expected bfloat16, float16 or float32")


def quantize_weight(weight: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Quantize a weight; one on the meta device becomes a quantized tensor without bytes."""
    if not weight.is_meta:
        return quantize(weight, recipe)
    parts = {
        spec.name: torch.empty(spec.shape(weight.shape), dtype=spec.dtype, device="meta") for spec in specs_of(recipe)
    }
    return QuantizedTensor.from_parts(parts, recipe, weight.dtype)
