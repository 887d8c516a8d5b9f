"""Which modules of a model are the layers that are calibrated one after another.

By default these are the children of one module list: of the outermost lists (so not a list of experts inside a layer),
the one with the most parameters. Otherwise the user names them, by fqns, glob patterns, modules, or the list.
"""

from collections.abc import Iterable

from torch import nn

from fsdp_hooks.wrappers import plain_modules
from qtensor.spec.selection import matches

LISTS = (nn.ModuleList, nn.Sequential)


def find_layers(
    model: nn.Module, layers: str | nn.Module | Iterable[str | nn.Module] | None = None
) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model, in the order in which they are called.

    Args:
        model: the whole model.
        layers: None, or one or several of: the fqn of a module, a glob pattern over fqns (only its outermost matches
            count), a module of the model. A module list stands for its children.

    Returns:
        (fqn, layer) pairs; none if `layers` is None and the model holds no module list.

    Raises:
        ValueError: something is not in the model, or one layer is inside another.
        TypeError: something is neither a string nor a module.
    """
    fqns = {module: fqn for fqn, module in plain_modules(model)}
    if layers is None:
        lists = _outermost_lists(model)
        chosen = max(lists.values(), key=_numel, default=None)
        found = list(chosen.children()) if chosen is not None else []
    else:
        wanted = [layers] if isinstance(layers, str | nn.Module) else list(layers)
        found = [layer for one in wanted for match in _matches(model, fqns, one) for layer in _expand(match)]
        found = list(dict.fromkeys(found))
        if not found:
            raise ValueError(f"layers={layers!r} selects no module; {_what_there_is(model)}")
    _check_apart(fqns, found)
    return [(fqns[layer], layer) for layer in found]


def _outermost_lists(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for fqn, module in plain_modules(model):
        if isinstance(module, LISTS) and module not in inside:
            inside |= set(module.modules())
            # A list that holds no parameters (of activations, say) has nothing to calibrate.
            if _numel(module):
                found[fqn] = module
    return found


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _expand(module: nn.Module) -> list[nn.Module]:
    return list(module.children()) if isinstance(module, LISTS) else [module]


def _matches(model: nn.Module, fqns: dict[nn.Module, str], wanted: object) -> list[nn.Module]:
    if isinstance(wanted, nn.Module):
        if wanted not in fqns:
            raise ValueError(f"layers: a {type(wanted).__name__} was given that is not in the model")
        return [wanted]
    if not isinstance(wanted, str):
        raise TypeError(
            f"layers must be names, patterns or modules of the model, got a {type(wanted).__name__}: {wanted!r}"
        )
    # of a wrapper and what it wraps, which have one name, the wrapper: that is called, and holds what FSDP has sharded
    outermost: dict[str, nn.Module] = {}
    for module, fqn in fqns.items():
        outermost.setdefault(fqn, module)
    exact = outermost.get(wanted, dict(model.named_modules()).get(wanted))
    if exact is not None:
        return [exact]
    matching = {fqn: module for fqn, module in outermost.items() if matches(fqn, [wanted])}
    if not matching:
        raise ValueError(f"layers: {wanted!r} matches no module of the model; {_what_there_is(model)}")
    # `layers.*` matches what is inside of the layers, too, and no layer may be inside of another.
    return [module for fqn, module in matching.items() if not any(outer in matching for outer in _outside(fqn))]


def _outside(fqn: str) -> list[str]:
    """Return the fqns of all modules around this one but the model (a pattern like * means its children)."""
    steps = fqn.split(".")
    return [".".join(steps[:count]) for count in range(1, len(steps))]


def _what_there_is(model: nn.Module) -> str:
    lists = [f"{fqn!r} ({len(list(found.children()))} modules)" for fqn, found in _outermost_lists(model).items()]
    return f"its module lists are {', '.join(lists)}" if lists else "it has no module list"


def _check_apart(fqns: dict[nn.Module, str], layers: list[nn.Module]) -> None:
    chosen = set(layers)
    for layer in layers:
        inner = next((child for child in layer.modules() if child is not layer and child in chosen), None)
        if inner is not None:
            raise ValueError(
                f"layers: {fqns[inner]!r} is inside {fqns[layer]!r}; a layer is calibrated as a whole, name one of them"
            )
