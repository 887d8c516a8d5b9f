"""Linears that choose experts for tokens, which stay as they are where everything is quantized.

A router is small, a rounding of its weights sends tokens to other experts, and inference engines read it dense. It is
known by its class or its name:

    class Llama4Router(nn.Linear)      a class with "Router" in its name
    mlp.router, router.classifier      "router" in the last name or in the one before it
    mlp.gate beside mlp.experts        "gate" or "wg" beside experts
    mlp.shared_expert_gate             the same for an expert that all tokens go to

Most models of transformers have routers of classes that are no nn.Linear; those are never quantized. An include pattern
that matches nothing but routers asks for them.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fsdp_hooks.wrappers import plain_modules, plain_parameters
from qtensor.spec.selection import matches

GATES = ("gate", "wg")  # of a module that has experts, too
OF_SHARED = "shared_expert_gate"
EXPERTS = "experts"


def is_router_class(module: nn.Module) -> bool:
    """Return whether the class says so."""
    return "router" in type(module).__name__.lower()


def routers_of(model: nn.Module, linears: Iterable[str]) -> set[str]:
    """Return those of these modules of a model, by their plain names, that are routers."""
    modules = dict(plain_modules(model, remove_duplicate=False))
    names = [*modules, *(name for name, _ in plain_parameters(model))]
    named = routers_among(linears := list(linears), names)
    return named | {fqn for fqn in linears if is_router_class(modules[fqn])}


def routers_among(linears: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return those of these linears that are routers by their names.

    Args:
        linears: fqns of modules.
        names: of all that the model has, for experts beside them.
    """
    around = set()
    for name in names:
        keys = name.split(".")
        around |= {".".join(keys[:place]) for place, key in enumerate(keys) if key == EXPERTS}
    found = set()
    for fqn in linears:
        parent, _, own = fqn.rpartition(".")
        if named_router(own, parent.rpartition(".")[2]) or (own in GATES and parent in around):
            found.add(fqn)
    return found


def named_router(own: str, parent: str) -> bool:
    """Return whether a module of this name, in one of that name, is a router, whatever is beside it."""
    return own == OF_SHARED or "router" in own.lower() or "router" in parent.lower()


def left_alone(routers: Collection[str], linears: Collection[str], include: Sequence[str]) -> set[str]:
    """Return the routers that no include pattern asks for by itself."""
    asking = [pattern for pattern in include if all(name in routers for name in linears if fnmatchcase(name, pattern))]
    return {name for name in routers if not matches(name, asking)}
