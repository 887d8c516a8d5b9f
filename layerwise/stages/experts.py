"""Blocks of experts: modules that send each token to some of their experts, found in the module tree.

    list       a list of modules with "expert" in its name; each is called with rows of the tokens that its block, the
               module around the list, is called with
    stacked    a module with "expert" in its name and parameters [E, N, K], which is its own block; it is called with
               the tokens [T, K], the numbers of each token's experts, [T, k], and their weights, [T, k]

Which calls a block really gets shows when it runs (statistics/every_token.py); what its forward takes shows here.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fsdp_hooks.wrappers import plain_modules
from layerwise.stages.caller import caller
from layerwise.stages.targets import Target

EXPERT_INPUTS = ("routed", "all")
LISTS = (nn.ModuleList, nn.ModuleDict)
INSTEAD = 'use expert_inputs="routed", or exclude them'
STACKED_CALL = "expected experts(tokens [T, K], numbers of experts [T, k], their weights [T, k])"


@dataclass(frozen=True, eq=False)
class Expert:
    """One expert of a block.

    Attributes:
        number: its place in the block.
        fqn: its name in the model.
        names: its linears that are quantized.
        module: what is called with its tokens; None in a stacked block.
        columns: how many columns its tokens may have, for one of its weights to take them.
    """

    number: int
    fqn: str
    names: tuple[str, ...]
    module: nn.Module | None = None
    columns: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """Experts among which tokens are shared out.

    Attributes:
        name: fqn in the model of the list, or of the stacked module.
        module: what is called with the tokens.
        experts: those with linears to quantize.
    """

    name: str
    module: nn.Module
    experts: tuple[Expert, ...]

    @property
    def stacked(self) -> bool:
        """Return whether its experts are in one parameter."""
        return self.experts[0].module is None


def find_blocks(model: nn.Module, targets: Sequence[Target]) -> list[ExpertBlock]:
    """Return the blocks with experts to quantize, in the order of the module tree.

    Raises:
        ValueError: there is none.
        NotImplementedError: a forward takes something else than tokens, or than a stacked block gets.
    """
    modules = dict(plain_modules(model, remove_duplicate=False))
    lists = list(_lists(model))
    owned = {id(inner) for block in lists for inner in modules[block].modules()}
    blocks = [_list_block(modules, name, targets) for name in lists]
    # Experts in a list may themselves hold parameters [E, N, K]; these belong to the list's block.
    stacked = {target.module_name: target.owner for target in targets if len(target.shape) == 3}
    blocks += [_stacked_block(name, owner, targets) for name, owner in stacked.items() if id(owner) not in owned]
    places = {name: place for place, name in enumerate(modules)}
    found = sorted((block for block in blocks if block is not None), key=lambda block: places[block.name])
    if not found:
        raise ValueError(
            f'{caller()}: expert_inputs="all": the model has no experts to quantize; expected a list of modules, or a '
            'module with parameters [E, N, K], with "expert" in its name. Leave expert_inputs out for this model'
        )
    return found


def _lists(model: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost lists of experts."""
    inside: set[int] = set()
    for fqn, module in plain_modules(model):
        if isinstance(module, LISTS) and "expert" in fqn.rpartition(".")[2].lower() and id(module) not in inside:
            inside |= {id(inner) for inner in module.modules()}
            yield fqn


def _list_block(modules: Mapping[str, nn.Module], name: str, targets: Sequence[Target]) -> ExpertBlock | None:
    found = modules[name]
    experts = []
    for number, (key, module) in enumerate(found.named_children()):
        owners = {id(inner) for inner in module.modules()}
        owned = [target for target in targets if id(target.owner) in owners]
        names = tuple(linear for target in owned for linear in target.linears())
        if names:
            fqn = f"{name}.{key}"
            _check_one_argument(fqn, module)
            experts.append(Expert(number, fqn, names, module, _columns(module, owned)))
    around, called = name, found
    # Nobody calls a list: the tokens come to the nearest module around it that has a forward.
    while around and isinstance(called, LISTS) and type(called).forward in [one.forward for one in LISTS]:
        around = around.rpartition(".")[0]
        called = modules[around]
    return ExpertBlock(name, called, tuple(experts)) if experts else None


def _columns(module: nn.Module, targets: Sequence[Target]) -> frozenset[int]:
    """Return how many columns an expert's tokens may have: K of its targets, or any size of its other weights."""
    known = {id(target.param) for target in targets}
    # Which side of an unknown weight takes tokens is not known, so either size may be theirs.
    others = [param for param in module.parameters() if param.ndim > 1 and id(param) not in known]
    return frozenset({target.shape[-1] for target in targets} | {size for param in others for size in param.shape})


def _check_one_argument(name: str, module: nn.Module) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind in _ONE_VALUE]
    if len(needed) > 1:
        raise NotImplementedError(
            f'{caller()}: expert_inputs="all": {name} takes {", ".join(needed)}; expected an expert that takes its '
            f"tokens alone. For such experts {INSTEAD}"
        )


def _stacked_block(name: str, owner: nn.Module, targets: Sequence[Target]) -> ExpertBlock:
    linears = [target.linears() for target in targets if target.owner is owner and len(target.shape) == 3]
    parameters = inspect.signature(owner.forward).parameters.values()
    taken = [one.name for one in parameters if one.kind in _ONE_VALUE]
    if len(taken) < 3:
        raise NotImplementedError(
            f'{caller()}: expert_inputs="all": {name} takes {", ".join(taken) or "nothing"}; {STACKED_CALL}. For such '
            f"experts {INSTEAD}"
        )
    if len({len(names) for names in linears}) > 1:
        raise NotImplementedError(
            f'{caller()}: expert_inputs="all": {name} has parameters of {sorted({len(one) for one in linears})} '
            f"experts; expected as many in each. For such experts {INSTEAD}"
        )
    experts = enumerate(zip(*linears, strict=True))
    return ExpertBlock(name, owner, tuple(Expert(number, f"{name}[{number}]", names) for number, names in experts))


_ONE_VALUE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
