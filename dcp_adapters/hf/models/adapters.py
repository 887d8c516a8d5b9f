"""Adapters of peft in what is exported: refused, or left out if the model below them is asked for.

A module tells which of its tensors are an adapter's, and whether adapters are merged into the weights that they adapt.
Of a state dict or a checkpoint only the names tell: peft puts `base_layer` into those of what it adapts, and adapters
beside it; whether they were merged is not known then.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from torch import nn

from dcp_adapters.plain.words import few_of
from fsdp_hooks.wrappers import merged, plain_state_dict, unmerged

T = TypeVar("T")

ADAPTERS = ("raise", "base")
STEPS = ("base_layer", "original_module", "token_adapter")  # into what is adapted, in names
WORDS = ("lora_", "modules_to_save")  # what adapters' own names begin with, if nothing is adapted beside them
AROUND = "base_model.model."
WAYS = "merge them and take them off (peft's merge_and_unload(), or qtensor.merge_ and then unload())"


def check_adapters(caller: str, adapters: str) -> None:
    """Raise ValueError for an unknown value of `adapters=`."""
    if adapters not in ADAPTERS:
        raise ValueError(f'{caller}: adapters={adapters!r} is not one of "raise", "base"')


def state_of_module(module: nn.Module, adapters: str) -> dict[str, object]:
    """Return a module's state dict by plain names, without adapters.

    Raises:
        ValueError: adapters="raise", and some are not merged; adapters="base", and some are.
    """
    found = unmerged(module) if adapters == "raise" else merged(module)
    if found and adapters == "raise":
        raise ValueError(
            f"{few_of(found)}: an adapter of peft is not merged into it, and would be lost; {WAYS}, or take the model "
            'below the adapters by adapters="base" (--adapters base)'
        )
    # The weights hold the adapter's product already, and nothing here can take it out.
    if found:
        raise ValueError(
            f'{few_of(found)}: an adapter is merged into it, and adapters="base" asks for the model without; call '
            "unmerge_adapter() first, or leave adapters= out"
        )
    return plain_state_dict(module, adapters=False)


def own_tensors(named: Mapping[str, T], adapters: str) -> dict[str, T]:
    """Take those of a state dict's or a checkpoint's entries that are the model's own, by its own names.

    Raises:
        ValueError: adapters="raise", and names are those of adapters or of what they adapt; without adapters nothing is
            left, or two entries have one name.
    """
    adapted = {base for name in named for base in _adapted(name)}
    others = {name for name in named if _is_adapter(name, adapted)}
    found = [*dict.fromkeys(base or name for name in named for base in _adapted(name)), *sorted(others)]
    if not found:
        return dict(named)
    if adapters == "raise":
        raise ValueError(
            f"{few_of(found)}: the names are those of adapters of peft and of what they adapt, and whether they are "
            f"merged does not show in names; {WAYS}, give the module itself, or take the model below the adapters by "
            'adapters="base" (--adapters base)'
        )
    kept = [name for name in named if name not in others]
    # peft puts the whole model into two modules of its own.
    around = AROUND if kept and all(name.startswith(AROUND) for name in kept) else ""
    return renamed(named, ((name, _without_steps(name.removeprefix(around))) for name in kept), "adapters")


def renamed(named: Mapping[str, T], pairs: Iterable[tuple[str, str]], what: str) -> dict[str, T]:
    """Return entries under other names. Raises ValueError if two get one name, or if there is none."""
    taken: dict[str, str] = {}
    for old, new in pairs:
        if new in taken:
            raise ValueError(f"{taken[new]} and {old} have the same name without {what}: {new}; give one of them")
        taken[new] = old
    if not taken:
        raise ValueError(f"without {what} nothing is left to take of {few_of(list(named))}")
    return {new: named[old] for new, old in taken.items()}


def _adapted(name: str) -> Iterator[str]:
    """Yield the modules around a tensor that are adapted."""
    keys = name.split(".")
    yield from (".".join(keys[:place]) for place, key in enumerate(keys[:-1]) if key in STEPS)


def _is_adapter(name: str, adapted: set[str]) -> bool:
    keys = name.split(".")
    if any(key.startswith(WORDS) for key in keys):
        return True
    # peft puts adapters beside `base_layer`, inside of the module that it adapts.
    above = (place for place in range(len(keys) - 1) if ".".join(keys[:place]) in adapted)
    return any(keys[place] not in STEPS for place in above)


def _without_steps(name: str) -> str:
    return ".".join(key for key in name.split(".") if key not in STEPS)
