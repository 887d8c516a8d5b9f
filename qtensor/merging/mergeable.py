"""Which layers of peft can be merged in each forward, and why others can not: what `merge_aware` looks at first."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from fsdp_hooks.torch_private import hook_tables, local_of
from qtensor.merging.through_merge import why_unfit

LIBRARY = "peft.tuners.lora"
HOOKS = ("forward_pre_hooks", "forward_hooks")  # that a merged product would not run


class Hooked:
    """Whose bound methods are hooks on modules of one model.

    A deepcopy of a model has copies of its hooks, which nobody can switch.
    """

    made_as: int = 0

    def __post_init__(self) -> None:
        """Note who it is, which a copy will not be."""
        self.made_as = id(self)

    def hook(self) -> Iterator[RemovableHandle]:
        """Register its hooks."""
        raise NotImplementedError


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks on a module's forward that a merged product would not run."""
    tables = hook_tables(module)
    return [hook for name in HOOKS for hook in tables[name].values()]


def owner_of(hook: Any) -> Hooked | None:
    """Return whose hook it is, if it is one of merge_aware."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Hooked) else None


def is_left(hook: Any) -> bool:
    """Return whether a hook is one of merge_aware that a copy of its model has got."""
    owner = owner_of(hook)
    return owner is not None and owner.made_as != id(owner)


def active_of(layer: Any) -> list[str]:
    """Return the active adapters that a layer has."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and layer of all that peft adapts, whatever the method."""
    if LIBRARY in sys.modules:  # else no such layer can be there
        kind = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer
        # peft's name for a module in which it has put others is known by no class of ours
        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def why_not(layer: Any) -> Iterator[str]:
    """Yield what keeps a layer of peft from being merged in each forward, and what to do."""
    kind = sys.modules[LIBRARY].Linear
    base: Any = getattr(layer, "base_layer", None)
    if not isinstance(layer, kind) or getattr(layer.forward, "__func__", None) is not kind.forward:
        yield (
            f"it is a {type(layer).__name__} of peft; LoRA on linears is known here, not on embeddings, convolutions, "
            "attention or stacks of experts, and no other method. Leave it out of target_modules, or train it beside "
            "its weight"
        )
    elif not isinstance(base, nn.Linear) or getattr(base.forward, "__func__", None) is not nn.Linear.forward:
        yield f"it adapts a {type(base).__name__}, expected torch.nn.Linear with its own forward; leave it out"
    else:
        yield from _why_not_layer(layer, base)
        for name in active_of(layer):
            yield from _why_not_adapter(layer, name)


def _why_not_layer(layer: Any, base: nn.Linear) -> Iterator[str]:
    if layer.fan_in_fan_out:
        yield "fan_in_fan_out says that its weight is transposed, which that of torch.nn.Linear is not; set it to False"
    if layer.merged:
        yield "peft has merged its adapters into the weight; call unmerge_adapter()"
    if any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer):
        yield (
            "fully_shard has taken a module inside of it, which is not gathered when the others need it; call "
            "fully_shard on the layer, or on a module around it"
        )
    if not all(map(is_left, hooks_of(base))):
        yield (
            "its base layer has hooks on its forward, as tensor parallelism and rotated inputs put there, which a "
            "merged product would not run; remove them (those of an earlier merge_aware by its remove()), or leave it "
            "out"
        )
    if why := _why_unfit_weight(base.weight):
        yield f"its base weight {why}"


def _why_unfit_weight(weight: Any) -> str | None:
    local: Any = local_of(weight)
    # its shard, if it is sharded: what is known of that is known of the gathered weight
    return why_unfit(local if weight.requires_grad is local.requires_grad else local.detach())


def why_not_linear(module: Any) -> Iterator[str]:
    """Yield what keeps a linear without an adapter from following the scale of adapted ones, and what to do."""
    if not isinstance(module, nn.Linear) or getattr(module.forward, "__func__", None) is not nn.Linear.forward:
        yield f"it is a {type(module).__name__}, expected torch.nn.Linear with its own forward; share no scale with it"
    elif why := _why_unfit_weight(module.weight):
        yield f"its weight {why}"


def why_not_alone(names: Sequence[str]) -> Iterator[str]:
    """Yield why a base weight that has several names cannot be merged into."""
    if len(names) > 1:
        yield (
            f"its base weight is tied, as {' and '.join(names)}: merge_ would change all of them, and this forward "
            "one; untie it, or leave it out of target_modules"
        )


def _why_not_adapter(layer: Any, name: str) -> Iterator[str]:
    variant = layer.lora_variant.get(name)
    if variant is not None:
        yield f"the adapter {name!r} is a {type(variant).__name__}; plain LoRA is known here: set use_dora=False, say"
    if getattr(layer.lora_B[name], "bias", None) is not None:
        yield f"the adapter {name!r} has a bias of its own, which no merged weight holds; set lora_bias=False"
    dropout = getattr(layer.lora_dropout[name], "p", 0.0)
    if dropout:
        yield f"the adapter {name!r} has dropout {dropout}, which a merged weight cannot have; set lora_dropout=0"
