"""The names that a model itself gives its modules and tensors, whatever is wrapped around it or around its modules.

    torch.compile(module)                     _orig_mod.                        known by the step's name alone
    checkpoint_wrapper, offload_wrapper       _checkpoint_wrapped_module.
    FullyShardedDataParallel (FSDP1)          _fsdp_wrapped_module.
    DistributedDataParallel, DataParallel     module.                           known by the class alone
    AveragedModel of torch.optim              module., and a counter beside it
    peft                                      base_model., model., base_layer., original_module.

A model may well have an attribute called `module` or `model`, so plain names need the modules (`plain_modules`,
`PlainNames`). Of names alone (`plain_name`) only what no model has is taken away.

What else a module of peft holds is an adapter: tensors beside the model's own, which change what it computes until they
are merged. They keep the names that they have, after the plain name of what they adapt (`l.0.q_proj.lora_A.default`).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

COMPILED, CHECKPOINTED, SHARDED = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
STEPS = (COMPILED, CHECKPOINTED, SHARDED)
HOLDERS = (DistributedDataParallel, DataParallel, AveragedModel)
ADAPTED = ("base_layer", "original_module")  # where a layer of peft has the module that it adapts
AROUND = ("base_model", "lora_model", "model", "token_adapter")  # where what peft puts around those, or a model, has it


def plain_name(name: str) -> str:
    """Return a name without the steps into wrappers that no model has by itself."""
    if not any(step in name for step in STEPS):
        return name
    return ".".join(key for key in name.split(".") if key not in STEPS)


@dataclass(frozen=True, eq=False)
class ModulePlace:
    """A module, once for each path to it.

    Attributes:
        path: of `named_modules()`.
        name: in the plain model; a wrapper has that of what it wraps.
        module: it.
        inner: the attribute under which it has the module that it wraps; "" if it is no wrapper.
        adapter: whether the tensors of its own belong to an adapter.
    """

    path: str
    name: str
    module: nn.Module
    inner: str = ""
    adapter: bool = False

    def merged(self) -> bool:
        """Return whether peft has merged adapters into the module that it adapts, and could take them out again."""
        return self.inner in ADAPTED and self.adapter and bool(getattr(self.module, "merged_adapters", None))

    def not_merged(self) -> bool:
        """Return whether it adapts a module in a way that is not in that module's own tensors."""
        if not self.inner or not self.adapter:
            return False
        if self.inner in ADAPTED:
            return not self.merged() or bool(getattr(self.module, "disable_adapters", False))
        own = {id(param) for param in self.module._modules[self.inner].parameters()}  # type: ignore[union-attr]
        others = [child for key, child in self.module._modules.items() if child is not None and key != self.inner]
        held = [*self.module._parameters.values(), *(param for child in others for param in child.parameters())]
        return any(param is not None and id(param) not in own for param in held)


def places(model: nn.Module) -> Iterator[ModulePlace]:
    """Yield all modules, in the order of `named_modules(remove_duplicate=False)`."""
    yield from _places(model, "", "", adapter=False)


def plain_modules(
    model: nn.Module, *, remove_duplicate: bool = True, adapters: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `named_modules()` does, by plain names; `adapters`: with what only adapters consist of.

    A wrapper comes before what it wraps, under the same name: a dict of them has the innermost modules.
    """
    seen: set[int] = set()
    for place in places(model):
        left_out = place.adapter and not place.inner and not adapters
        if left_out or (remove_duplicate and id(place.module) in seen):
            continue
        seen.add(id(place.module))
        yield place.name, place.module


def module_named(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost module of that plain name. Raises AttributeError if there is none."""
    found = [module for own, module in plain_modules(model, remove_duplicate=False) if own == name]
    if not found:
        raise AttributeError(f"the model has no module {name!r}")
    return found[-1]


def plain_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what `named_parameters()` does, by plain names; adapters are among them."""
    names = PlainNames(model)
    for name, param in model.named_parameters(remove_duplicate=remove_duplicate):
        yield names.plain(name), param


def plain_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield what `named_buffers()` does, by plain names; adapters are among them."""
    names = PlainNames(model)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        yield names.plain(name), buffer


def without_replication(model: nn.Module) -> nn.Module:
    """Return the model that replicas wrap: a forward of theirs would wait for the other ranks, whatever these do."""
    inside = module = model
    while inner := _inner(module):
        held = module._modules[inner]
        assert held is not None
        inside = held if isinstance(module, HOLDERS) else inside
        module = held
    return inside


def unwrap(module: nn.Module) -> nn.Module:
    """Return what all wrappers around a module wrap."""
    while inner := _inner(module):
        module = module._modules[inner]  # type: ignore[assignment]
    return module


def unmerged(model: nn.Module) -> list[str]:
    """Return the plain names of modules that compute with adapters which are not in the modules' own tensors."""
    return list(dict.fromkeys(place.name for place in places(model) if place.not_merged()))


def merged(model: nn.Module) -> list[str]:
    """Return the plain names of modules into which peft has merged adapters."""
    return list(dict.fromkeys(place.name for place in places(model) if place.merged()))


class PlainNames:
    """Plain names of a model's modules and tensors, from those of `named_parameters()`, `state_dict()` and the like."""

    def __init__(self, model: nn.Module) -> None:
        # inner modules come later, and take the place of steps into them
        self._places = {plain_name(place.path): place for place in places(model)}

    def plain(self, name: str) -> str:
        """Return the plain name of a tensor or a module."""
        key = plain_name(name)
        if key in self._places:
            return self._places[key].name
        place, own = self._owner(key)
        return f"{place.name}.{own}".removeprefix(".")

    def is_adapter(self, name: str) -> bool:
        """Return whether a tensor belongs to an adapter."""
        return self._owner(plain_name(name))[0].adapter

    def is_counter(self, name: str) -> bool:
        """Return whether it is what a wrapper counts by, and no tensor of the model."""
        place, own = self._owner(plain_name(name))
        return isinstance(place.module, AveragedModel) and own == "n_averaged"

    def _owner(self, key: str) -> tuple[ModulePlace, str]:
        parent, _, own = key.rpartition(".")
        while parent not in self._places:
            parent, _, step = parent.rpartition(".")
            own = f"{step}.{own}"
        return self._places[parent], own


def plain_state_dict(model: nn.Module, *, keep_vars: bool = False, adapters: bool = True) -> dict[str, Any]:
    """Return `state_dict()` by plain names, with or without adapters; counters of wrappers are not in it."""
    names = PlainNames(model)
    return {
        names.plain(name): value
        for name, value in model.state_dict(keep_vars=keep_vars).items()
        if not names.is_counter(name) and (adapters or not names.is_adapter(name))
    }


def _places(module: nn.Module, path: str, name: str, *, adapter: bool) -> Iterator[ModulePlace]:
    inner = "" if adapter else _inner(module)
    of_peft = not adapter and _of_peft(module)
    yield ModulePlace(path, name, module, inner, adapter or of_peft)
    for key, child in module._modules.items():
        if child is not None:
            own = name if key == inner else f"{name}.{key}".removeprefix(".")
            below = adapter or (of_peft and key != inner)
            yield from _places(child, f"{path}.{key}".removeprefix("."), own, adapter=below)


def _inner(module: nn.Module) -> str:
    """Return the attribute under which a wrapper has what it wraps; "" for a module that is none."""
    held = module._modules
    if isinstance(module, HOLDERS):
        return "module"
    known = (*ADAPTED, *AROUND) if _of_peft(module) else STEPS
    return next((key for key in known if held.get(key) is not None), "")


def _of_peft(module: nn.Module) -> bool:
    """Return whether its class is one of peft, or made of one (by fully_shard, say)."""
    return "peft" in sys.modules and any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)
