"""Which tensors are gathered together: those of an FSDP module, else those of a layer by its name.

model with FSDP modules   the nearest one above each tensor, as FSDP itself gathers
anything else             model.layers.3.mlp.up_proj.weight -> model.layers.3        up to the first number
                          model.norm.weight                 -> model.norm            else its module
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcp_adapters.hf.exporting.making import GroupOf
from fsdp_hooks.wrappers import PlainNames


def groups_of(given: Any, prefix: str | None = None) -> GroupOf:
    """Return a function from the name of a tensor, without the prefix, to what stands for its group.

    Args:
        given: a module, or anything else that has tensors.
        prefix: what was cut off the names.
    """
    known = {} if not isinstance(given, nn.Module) else fsdp_groups(given)
    cut = prefix or ""

    def group_of(name: str) -> str:
        found = known.get(cut + name)
        return _layer(name) if found is None else found

    return group_of


def fsdp_groups(module: nn.Module) -> dict[str, str]:
    """Map the name of each tensor below an FSDP module to the nearest of these, by its fqn."""
    found: dict[str, str] = {}
    plain = PlainNames(module).plain
    # With duplicates: a state dict has a tied tensor under each of its names.
    for fqn, child in module.named_modules(remove_duplicate=False):
        # Outer modules come first here, so inner ones overwrite what they have said.
        if isinstance(child, FSDPModule):
            assert isinstance(child, nn.Module)
            for tensors in (child.named_parameters, child.named_buffers):
                names = (plain(name) for name, _ in tensors(prefix=fqn, remove_duplicate=False))
                found |= dict.fromkeys(names, f"FSDP module {plain(fqn)}")
    return found


def _layer(name: str) -> str:
    keys = name.split(".")
    number = next((place for place, key in enumerate(keys) if key.isdigit()), None)
    return name.rpartition(".")[0] if number is None else ".".join(keys[: number + 1])
