"""Which dims of which weights are rotated, decided before anything is written.

    residual stream   x R in place of x. Embeddings and linears that write it: the dim of their outputs. Linears that
                      read it: their columns. Between them only RMSNorm, which commutes with R once its gain is moved
                      into the linears that read it.
    values            v R in place of v, in every head alike, between a v_proj and its o_proj

This is a plan by names; `proof` shows whether the model is one that it fits.

    asked -> chosen: modules by their names -> what a run shows of them -> plan: a change for each weight
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layerwise.rotating.tracing import Sight
from qtensor.selection import check_lists, matches, unmatched

# The names of Llama and its relatives in transformers.
READS = ("*q_proj", "*k_proj", "*v_proj", "*qkv_proj", "*gate_proj", "*up_proj", "*gate_up_proj", "*lm_head")
WRITES = ("*embed_tokens", "*o_proj", "*down_proj")
MADE, TAKEN = "v_proj", "o_proj"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLACES = ("stream", "values")
_SHOWN = 5  # names in one message


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `rotate_`, checked.

    Raises:
        ValueError, TypeError: an option is not one of the allowed values.
    """

    where: Sequence[str]
    block: int
    seed: int | None
    reads: Sequence[str] | None
    writes: Sequence[str] | None
    head_dim: int | None
    tied: Literal["refuse", "untie"]

    def __post_init__(self) -> None:
        check_lists("rotate_", where=self.where, reads=self.reads or (), writes=self.writes or ())
        if not self.where or not {*self.where} <= {*PLACES}:
            raise ValueError(f"rotate_: where={self.where!r}; expected one or both of {', '.join(map(repr, PLACES))}")
        if type(self.block) is not int or self.block < 2 or self.block & (self.block - 1):
            raise ValueError(f"rotate_: block={self.block!r} is not a power of two from 2 on")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"rotate_: seed={self.seed!r} is neither an integer nor None")
        if self.head_dim is not None and (type(self.head_dim) is not int or self.head_dim < 1):
            raise ValueError(f"rotate_: head_dim={self.head_dim!r} is not a positive integer")
        if self.tied not in ("refuse", "untie"):
            raise ValueError(f"rotate_: tied={self.tied!r} is neither 'refuse' nor 'untie'")


@dataclass(frozen=True)
class Axis:
    """What is rotated: the residual stream, or the values of one attention, whose heads are rotated alike.

    Attributes:
        what: in words.
        period: how many channels the stream has, or a head.
        maker: fqn of the linear that makes the values; empty for the stream.
    """

    what: str
    period: int
    maker: str = ""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm by its fqn, whose gain, its weight or 1 + weight ("offset"), goes into the linears behind it."""

    name: str
    weight: Tensor
    kind: Literal["norm", "offset"]

    def gain(self) -> Tensor:
        """Float64 [K]."""
        return self.weight.detach().double() + (1.0 if self.kind == "offset" else 0.0)


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of one weight [N, K], or bias [N].

    Attributes:
        name: fqn of the parameter.
        tensor: the parameter.
        reads: whether its columns take what is rotated (those of an embedding make it).
        columns, rows: what these are rotated with, or None.
        norm: fqn of the norm whose gain goes into the columns, or None.
    """

    name: str
    tensor: Tensor
    reads: bool
    columns: Axis | None = None
    rows: Axis | None = None
    norm: str | None = None

    def does(self) -> tuple[Axis | None, Axis | None, str | None]:
        """The same for two changes that do the same."""
        return self.columns, self.rows, self.norm


@dataclass(frozen=True, eq=False)
class Chosen:
    """The modules to change, by fqn.

    Attributes:
        reads, writes: those of the residual stream; empty where that is not rotated.
        values: (fqn of the values' linear, fqn of the linear that reads them, head_dim).
        stream: the residual stream, if it is rotated.
    """

    reads: Mapping[str, nn.Linear]
    writes: Mapping[str, nn.Linear | nn.Embedding]
    values: Sequence[tuple[str, str, int]]
    stream: Axis | None

    def names(self) -> list[str]:
        """All fqns, each once."""
        pairs = (name for pair in self.values for name in pair[:2])
        return list(dict.fromkeys([*self.writes, *self.reads, *pairs]))


@dataclass(frozen=True, eq=False)
class Plan:
    """A change for every parameter, and the norms in front of reading linears by fqn; `folded`: those with a gain."""

    changes: Sequence[Change]
    norms: Mapping[str, nn.Module]
    folded: frozenset[str]

    def axes(self) -> list[Axis]:
        """Everything that is rotated."""
        return list(dict.fromkeys(axis for one in self.changes for axis in (one.columns, one.rows) if axis is not None))


def choose(model: nn.Module, asked: Asked) -> Chosen:
    """The modules that the options name, checked by themselves.

    Raises:
        ValueError, TypeError: patterns, modules, widths or parameters that do not fit, by name.
    """
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise TypeError(f"rotate_: {name} is sharded (a DTensor); rotate the model before fully_shard")
    modules = dict(model.named_modules())
    reads, writes, stream = {}, {}, None
    if "stream" in asked.where:
        reads = {name: _linear(name, found) for name, found in _named(modules, asked.reads, READS, "reads")}
        writes = {
            name: found if isinstance(found, nn.Embedding) else _linear(name, found)
            for name, found in _named(modules, asked.writes, WRITES, "writes")
        }
        stream = Axis("the residual stream", _width(reads, writes, asked.block))
    values = list(_values(modules, asked)) if "values" in asked.where else []
    chosen = Chosen(reads, writes, values, stream)
    for name in chosen.names():
        _check_plain(name, modules[name])
    return chosen


def _named(
    modules: Mapping[str, nn.Module], patterns: Sequence[str] | None, usual: Sequence[str], argument: str
) -> Iterator[tuple[str, nn.Module]]:
    for pattern in unmatched(patterns or (), modules):
        raise ValueError(f"rotate_: the pattern {pattern!r} of {argument}= matches no module")
    found = [
        (name, module) for name, module in modules.items() if matches(name, usual if patterns is None else patterns)
    ]
    if not found:
        raise ValueError(
            f"rotate_: no module has one of the usual names of what {argument} the residual stream "
            f"({', '.join(usual)}); name them by {argument}="
        )
    return iter(found)


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise TypeError(f"rotate_: {name} is a {type(module).__name__}; only nn.Linear, as it is, can be rotated")
    return module


def _width(reads: Mapping[str, nn.Linear], writes: Mapping[str, nn.Linear | nn.Embedding], block: int) -> int:
    """The channels of the residual stream."""
    widths = {name: module.in_features for name, module in reads.items()}
    for name, module in writes.items():
        out = module.embedding_dim if isinstance(module, nn.Embedding) else module.out_features
        widths[f"{name} (writes)"] = out
    first, width = next(iter(widths.items()))
    for name, other in widths.items():
        if other != width:
            raise ValueError(
                f"rotate_: the residual stream has {width} channels in {first} and {other} in {name}; expected the "
                "same everywhere"
            )
    if width % block:
        raise ValueError(f"rotate_: block={block} does not divide the {width} channels of the residual stream")
    return width


def _values(modules: Mapping[str, nn.Module], asked: Asked) -> Iterator[tuple[str, str, int]]:
    found = False
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        reader = f"{parent}.{TAKEN}".removeprefix(".")
        if last != MADE or reader not in modules:
            continue
        found = True
        head = asked.head_dim or getattr(modules[parent], "head_dim", None)
        made, taken = _linear(name, module).out_features, _linear(reader, modules[reader]).in_features
        if type(head) is not int or head < 1 or made % head or taken % head:
            raise ValueError(
                f"rotate_: heads of {head!r} channels do not divide the {made} of {name} and the {taken} of {reader}; "
                "give head_dim="
            )
        if head % asked.block:
            raise ValueError(
                f"rotate_: block={asked.block} does not divide the {head} channels of a head of {name}; take a smaller "
                'block, or where=("stream",)'
            )
        yield name, reader, head
    if not found:
        raise ValueError(
            f'rotate_: no attention has {MADE} beside {TAKEN}, so its values cannot be rotated; take where=("stream",)'
        )


def _check_plain(name: str, module: nn.Module) -> None:
    if module._parameters.get("weight") is None:
        raise TypeError(f"rotate_: the weight of {name} is no parameter of its own (a parametrization?)")
    for attribute, param in module._parameters.items():
        if param is None:
            continue
        what = f"rotate_: {name}.{attribute}"
        if type(param) not in (Tensor, nn.Parameter):
            raise TypeError(f"{what} is a {type(param).__name__}; rotate the dense model, and quantize it afterwards")
        if param.dtype not in DTYPES:
            raise TypeError(f"{what} has dtype {param.dtype}; expected one of {', '.join(map(str, DTYPES))}")
        if param.is_meta:
            raise ValueError(f"{what} is on the meta device; load the weights first")


def norms_of(model: nn.Module, chosen: Chosen) -> dict[str, nn.Module]:
    """Modules that may be norms of the stream, by fqn: they have one number for each of its channels."""
    if chosen.stream is None:
        return {}
    found = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.shape == (chosen.stream.period,):
            found[name] = module
    return found


def planned(model: nn.Module, chosen: Chosen, sight: Sight) -> Plan:
    """A change for every parameter.

    Args:
        model: all of it.
        chosen: what it is made of.
        sight: a run of it.

    Raises:
        ValueError: the batch does not reach a module.
        NotImplementedError: norms, tied weights, or parameters beside the plan with which it would not be exact.
    """
    for name in chosen.names():
        if name not in sight.reached:
            raise ValueError(
                f"rotate_: the batch does not reach {name}, so nothing can be shown of it; give more tokens"
            )
    norms = norms_of(model, chosen)
    used = {name: norms[name] for name in _used(sight)}
    folded = frozenset(name for name, module in used.items() if not _uniform(_weight_of(name, module)))
    changes = _merged(_changes(model, chosen, sight, folded))
    _check_uses(model, chosen, changes)
    if chosen.stream is not None:
        _check_rest(model, chosen, used, chosen.stream.period)
    return Plan(changes, used, folded)


def _used(sight: Sight) -> list[str]:
    """Norms that a reading linear takes the output of."""
    for name, sources in sight.sources.items():
        if len(sources) > 1:
            several = ", ".join(sorted(str(source) for source in sources))
            raise NotImplementedError(
                f"rotate_: {name} takes the outputs of several modules ({several}), so no gain can be moved into it"
            )
    return [source for sources in sight.sources.values() for source in sources if source is not None]


def _weight_of(name: str, norm: nn.Module) -> Tensor:
    _check_plain(name, norm)
    if isinstance(norm, nn.LayerNorm) or norm._parameters.get("bias") is not None:
        raise NotImplementedError(
            f"rotate_: {name} is a {type(norm).__name__}, which subtracts a mean or adds a bias and so does not "
            'commute with a rotation; take where=("values",)'
        )
    weight = norm._parameters["weight"]
    assert weight is not None
    return weight


def _uniform(weight: Tensor) -> bool:
    """One gain for all channels commutes with a rotation, so it stays where it is."""
    return bool((weight == weight[0]).all())


def _changes(model: nn.Module, chosen: Chosen, sight: Sight, folded: frozenset[str]) -> Iterator[Change]:
    made = {name: Axis("the values of attentions", head, name) for name, _, head in chosen.values}
    taken = {reader: made[name] for name, reader, _ in chosen.values}
    for name in chosen.names():
        module = model.get_submodule(name)
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        if isinstance(module, nn.Embedding):
            yield Change(f"{name}.weight", weight, reads=False, columns=chosen.stream)
            continue
        columns = chosen.stream if name in chosen.reads else taken.get(name)
        rows = chosen.stream if name in chosen.writes else made.get(name)
        source = next(iter(sight.sources.get(name, ())), None) if name in chosen.reads else None
        yield Change(f"{name}.weight", weight, True, columns, rows, source if source in folded else None)
        if bias is not None and rows is not None:
            yield Change(f"{name}.bias", bias, reads=False, rows=rows)


def _merged(changes: Iterator[Change]) -> list[Change]:
    """One change for each parameter."""
    by_parameter: dict[int, Change] = {}
    for one in changes:
        first = by_parameter.setdefault(id(one.tensor), one)
        if first.does() == one.does():
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
    for name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if id(param) in changed and name not in names:
                raise NotImplementedError(
                    f"rotate_: {name}.{attribute} is tied to {changed[id(param)]}, and is not rotated with it; name "
                    f"{name!r} in reads= or writes="
                )


def _check_rest(model: nn.Module, chosen: Chosen, norms: Mapping[str, nn.Module], width: int) -> None:
    """Whatever else has a dim of the stream's width may belong to the stream."""
    known = {*chosen.names(), *norms}
    rest = [
        f"{name}.{attribute} {list(param.shape)}"
        for name, module in model.named_modules()
        for attribute, param in module._parameters.items()
        if name not in known and param is not None and width in param.shape
    ]
    if rest:
        more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
        raise NotImplementedError(
            f"rotate_: {', '.join(rest[:_SHOWN])}{more} may belong to the residual stream of {width} channels, and is "
            "neither among the linears and embeddings that read and write it nor a norm right before those that read "
            "it; name linears in reads= or writes=, and do not rotate the stream of a model that has other parts in it"
        )
