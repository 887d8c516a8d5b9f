"""Which dims of which weights are rotated: a plan, made before anything is written.

    residual stream   x R in place of x. Embeddings and linears that write it: the dim of their outputs. Linears that
                      read it: their columns. Between them only RMSNorm, which commutes with R once its gain is moved
                      into the linears that read it.
    values            v R in place of v, in every head alike, between a v_proj and its o_proj
    inputs            x H in place of x, made of x at run time: the columns of one linear

This is a plan by names; `proof` shows whether the model is one that it fits.

    asked -> chosen: modules by their names -> what a run shows of them -> plan: a change for each weight
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fsdp_hooks.wrappers import plain_modules
from layerwise.rotating.choice import Axis, Chosen, check_plain
from layerwise.rotating.tracing import Trace

_SHOWN = 5  # names in one message


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm whose gain is moved into the linears behind it.

    Attributes:
        name: fqn of the module.
        weight: its parameter [K].
        kind: the gain is the weight ("norm"), or 1 + weight ("offset").
    """

    name: str
    weight: Tensor
    kind: Literal["norm", "offset"]

    def gain(self) -> Tensor:
        """Return the gain, float64 [K]."""
        return self.weight.detach().double() + (1.0 if self.kind == "offset" else 0.0)


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of one weight [N, K], or bias [N].

    Attributes:
        name: fqn of the parameter.
        tensor: the parameter.
        reads: whether its columns take what is rotated; those of an embedding make it.
        columns, rows: what these are rotated with, or None.
        norm: fqn of the norm whose gain goes into the columns, or None.
    """

    name: str
    tensor: Tensor
    reads: bool
    columns: Axis | None = None
    rows: Axis | None = None
    norm: str | None = None

    def effect(self) -> tuple[Axis | None, Axis | None, str | None]:
        """Return what it does, equal for two changes that do the same."""
        return self.columns, self.rows, self.norm


@dataclass(frozen=True, eq=False)
class RotationPlan:
    """What a rotation changes.

    Attributes:
        changes: one for every parameter that is written.
        norms: the norms in front of linears that read the stream, by fqn.
        folded: fqns of those whose gain is moved into these linears.
    """

    changes: Sequence[Change]
    norms: Mapping[str, nn.Module]
    folded: frozenset[str]

    def axes(self) -> list[Axis]:
        """Return everything that is rotated, each once."""
        return list(dict.fromkeys(axis for one in self.changes for axis in (one.columns, one.rows) if axis is not None))


def norms_of(model: nn.Module, chosen: Chosen) -> dict[str, nn.Module]:
    """Return the modules that may be norms of the stream, by fqn: they have one number for each of its channels."""
    if chosen.stream is None:
        return {}
    found = {}
    for name, module in plain_modules(model):
        weight = module._parameters.get("weight")
        if weight is not None and weight.shape == (chosen.stream.period,):
            found[name] = module
    return found


def plan_rotations(model: nn.Module, chosen: Chosen, trace: Trace) -> RotationPlan:
    """Plan a change for every parameter that is to be rotated.

    Args:
        model: all of it.
        chosen: the modules that the options name.
        trace: what a run of the model has shown.

    Raises:
        ValueError: the batch does not reach a module.
        NotImplementedError: norms, tied weights, or parameters beside the plan with which it would not be exact.
    """
    for name in chosen.names():
        if name not in trace.reached:
            raise ValueError(
                f"rotate_: the batch does not reach {name}, so nothing can be shown of it; give more tokens"
            )
    norms = norms_of(model, chosen)
    used = {name: norms[name] for name in _find_used_norms(trace)}
    folded = frozenset(name for name, module in used.items() if not _is_uniform(_weight_of(name, module)))
    changes = _merge(_list_changes(model, chosen, trace, folded))
    _check_uses(model, chosen, changes)
    if chosen.stream is not None:
        _check_rest(model, chosen, used, chosen.stream.period)
    return RotationPlan(changes, used, folded)


def _find_used_norms(trace: Trace) -> list[str]:
    """Return the norms whose output a reading linear takes."""
    for name, sources in trace.sources.items():
        if len(sources) > 1:
            several = ", ".join(sorted(str(source) for source in sources))
            raise NotImplementedError(
                f"rotate_: {name} takes the outputs of several modules ({several}), so no gain can be moved into it"
            )
    return [source for sources in trace.sources.values() for source in sources if source is not None]


def _weight_of(name: str, norm: nn.Module) -> Tensor:
    check_plain(name, norm)
    if isinstance(norm, nn.LayerNorm) or norm._parameters.get("bias") is not None:
        raise NotImplementedError(
            f"rotate_: {name} is a {type(norm).__name__}, which subtracts a mean or adds a bias and so does not "
            'commute with a rotation; take where=("values",)'
        )
    weight = norm._parameters["weight"]
    assert weight is not None
    return weight


def _is_uniform(weight: Tensor) -> bool:
    """Tell whether all channels have one gain: it commutes with a rotation, so it stays where it is."""
    return bool((weight == weight[0]).all())


def _list_changes(model: nn.Module, chosen: Chosen, trace: Trace, folded: frozenset[str]) -> Iterator[Change]:
    made = {name: Axis("the values of attentions", head, name) for name, _, head in chosen.values}
    taken = {reader: made[name] for name, reader, _ in chosen.values}
    modules = dict(plain_modules(model))
    for name in chosen.names():
        module = modules[name]
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        if isinstance(module, nn.Embedding):
            # Rows of an embedding are tokens; its columns are the channels that it writes.
            yield Change(f"{name}.weight", weight, reads=False, columns=chosen.stream)
            continue
        columns = chosen.stream if name in chosen.reads else taken.get(name, chosen.online.get(name))
        rows = chosen.stream if name in chosen.writes else made.get(name)
        source = next(iter(trace.sources.get(name, ())), None) if name in chosen.reads else None
        yield Change(f"{name}.weight", weight, True, columns, rows, source if source in folded else None)
        # A bias is added behind the product, so it is rotated with the rows, and never with the columns.
        if bias is not None and rows is not None:
            yield Change(f"{name}.bias", bias, reads=False, rows=rows)


def _merge(changes: Iterator[Change]) -> list[Change]:
    """Return one change for each parameter; raise if two names of a tied one need different changes."""
    by_parameter: dict[int, Change] = {}
    for one in changes:
        first = by_parameter.setdefault(id(one.tensor), one)
        # An output projection that is tied to the embedding reads by columns what that writes by columns: one change.
        if first.effect() == one.effect():
            continue
        if one.norm is not None and first.columns == one.columns and not first.reads:
            raise NotImplementedError(
                f"rotate_: {one.name} is tied to {first.name}, and the gain of {one.norm} would have to go into one of "
                'them alone; take tied="untie", which makes them two parameters'
            )
        raise NotImplementedError(
            f"rotate_: {one.name} is tied to {first.name}, and both would have to be changed in different ways"
        )
    return list(by_parameter.values())


def _check_uses(model: nn.Module, chosen: Chosen, changes: Sequence[Change]) -> None:
    changed, names = {id(one.tensor): one.name for one in changes}, {*chosen.names()}
    for name, module in plain_modules(model, adapters=True):
        for attribute, param in module._parameters.items():
            if id(param) in changed and name not in names:
                raise NotImplementedError(
                    f"rotate_: {name}.{attribute} is tied to {changed[id(param)]}, and is not rotated with it; name "
                    f"{name!r} in reads= or writes="
                )


def _check_rest(model: nn.Module, chosen: Chosen, norms: Mapping[str, nn.Module], width: int) -> None:
    """Refuse whatever else has a dim of the stream's width, since it may belong to the stream."""
    # Buffers, too: a scale for each channel commutes with signs, so the proof would not notice it. A mask of integers
    # is none.
    known = {*chosen.names(), *norms}
    rest = [
        f"{name}.{attribute} {list(found.shape)}".removeprefix(".")
        for name, module in plain_modules(model, adapters=True)
        for attribute, found in [*module._parameters.items(), *module._buffers.items()]
        if name not in known and found is not None and width in found.shape and found.is_floating_point()
    ]
    if rest:
        more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
        raise NotImplementedError(
            f"rotate_: {', '.join(rest[:_SHOWN])}{more} may belong to the residual stream of {width} channels, and is "
            "neither among the linears and embeddings that read and write it nor a norm right before those that read "
            "it; name linears in reads= or writes=, and do not rotate the stream of a model that has other parts in it"
        )
