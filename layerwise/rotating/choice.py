"""Which modules are to be rotated: the options, and the modules that they name, each checked by itself."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.wrappers import plain_modules, plain_parameters
from layerwise.rotating.online import check_linear, find_linears
from qtensor.products.input_rotation import is_size
from qtensor.spec.selection import check_lists, matches, unmatched

# The names of Llama and its relatives in transformers.
READS = ("*q_proj", "*k_proj", "*v_proj", "*qkv_proj", "*gate_proj", "*up_proj", "*gate_up_proj", "*lm_head")
WRITES = ("*embed_tokens", "*o_proj", "*down_proj")
MADE, TAKEN = "v_proj", "o_proj"  # the linears of an attention that make values, and take them
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLACES = ("stream", "values")


@dataclass(frozen=True, kw_only=True)
class RotationOptions:
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
    online: Sequence[str] | Mapping[str, int]

    def __post_init__(self) -> None:
        names = [*self.online] if isinstance(self.online, Mapping) else self.online
        check_lists("rotate_", where=self.where, reads=self.reads or (), writes=self.writes or (), online=names)
        if not {*self.where} <= {*PLACES} or not (self.where or names):
            raise ValueError(f"rotate_: where={self.where!r}; expected one or both of {', '.join(map(repr, PLACES))}")
        if not is_size(self.block):
            raise ValueError(f"rotate_: block={self.block!r} is not a power of two from 2 on")
        for pattern, block in self.blocks.items():
            if not is_size(block):
                raise ValueError(
                    f"rotate_: online= has {block!r} for {pattern!r}, which is not a power of two from 2 on"
                )
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"rotate_: seed={self.seed!r} is neither an integer nor None")
        if self.head_dim is not None and (type(self.head_dim) is not int or self.head_dim < 1):
            raise ValueError(f"rotate_: head_dim={self.head_dim!r} is not a positive integer")
        if self.tied not in ("refuse", "untie"):
            raise ValueError(f"rotate_: tied={self.tied!r} is neither 'refuse' nor 'untie'")

    @property
    def blocks(self) -> dict[str, int]:
        """The patterns of `online`, each with its block."""
        return dict(self.online) if isinstance(self.online, Mapping) else dict.fromkeys(self.online, self.block)


@dataclass(frozen=True)
class Axis:
    """What is rotated: the residual stream, the values of one attention, whose heads are rotated alike, or inputs.

    Attributes:
        what: its name in messages.
        period: how many channels the stream has, or a head, or a linear takes.
        maker: fqn of the linear that makes the values, or whose inputs are rotated at run time; empty for the stream.
        online: the block, if inputs are rotated at run time (then without signs); else 0.
    """

    what: str
    period: int
    maker: str = ""
    online: int = 0


@dataclass(frozen=True, eq=False)
class Chosen:
    """The modules to change, by fqn.

    Attributes:
        reads, writes: those of the residual stream; empty if that is not rotated.
        values: (fqn of the values' linear, fqn of the linear that reads them, head_dim).
        stream: the residual stream, if it is rotated.
        online: fqns of linears whose inputs are rotated at run time.
    """

    reads: Mapping[str, nn.Linear]
    writes: Mapping[str, nn.Linear | nn.Embedding]
    values: Sequence[tuple[str, str, int]]
    stream: Axis | None
    online: Mapping[str, Axis]

    def names(self) -> list[str]:
        """Return all fqns, each once."""
        pairs = (name for pair in self.values for name in pair[:2])
        return list(dict.fromkeys([*self.writes, *self.reads, *pairs, *self.online]))


def choose(model: nn.Module, asked: RotationOptions) -> Chosen:
    """Return the modules that the options name, each checked by itself.

    Raises:
        ValueError, TypeError: patterns, modules, widths or parameters that do not fit, by name.
    """
    # A shard may hold a part of a block, and a rotation needs whole ones.
    for name, param in plain_parameters(model):
        if isinstance(param, DTensor):
            raise TypeError(f"rotate_: {name} is sharded (a DTensor); rotate the model before fully_shard")
    modules = dict(plain_modules(model))
    reads, writes, stream = {}, {}, None
    if "stream" in asked.where:
        reads = {name: _check_linear(name, found) for name, found in _find_named(modules, asked.reads, READS, "reads")}
        writes = {
            name: found if isinstance(found, nn.Embedding) else _check_linear(name, found)
            for name, found in _find_named(modules, asked.writes, WRITES, "writes")
        }
        stream = Axis("the residual stream", _width(reads, writes, asked.block))
    values = list(_find_values(modules, asked)) if "values" in asked.where else []
    online = dict(_find_online(model, modules, asked, taken={*reads, *(reader for _, reader, _ in values)}))
    chosen = Chosen(reads, writes, values, stream, online)
    for name in chosen.names():
        check_plain(name, modules[name])
    return chosen


def _find_named(
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


def _check_linear(name: str, module: nn.Module) -> nn.Linear:
    return check_linear("rotate_", name, module)


def _width(reads: Mapping[str, nn.Linear], writes: Mapping[str, nn.Linear | nn.Embedding], block: int) -> int:
    """Return how many channels the residual stream has; all modules must agree."""
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


def _find_values(modules: Mapping[str, nn.Module], asked: RotationOptions) -> Iterator[tuple[str, str, int]]:
    found = False
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        reader = f"{parent}.{TAKEN}".removeprefix(".")
        if last != MADE or reader not in modules:
            continue
        found = True
        # With grouped queries o_proj reads each head of values several times, so only a head's size has to fit both.
        head = asked.head_dim or getattr(modules[parent], "head_dim", None)
        made, taken = _check_linear(name, module).out_features, _check_linear(reader, modules[reader]).in_features
        if type(head) is not int or head < 1 or made % head or taken % head:
            raise ValueError(
                f"rotate_: heads of {head!r} channels do not divide the {made} of {name} and the {taken} of {reader}; "
                "give head_dim="
            )
        # A block across two heads would mix values that attention weighs apart.
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


def _find_online(
    model: nn.Module, modules: Mapping[str, nn.Module], asked: RotationOptions, taken: Collection[str]
) -> Iterator[tuple[str, Axis]]:
    """Find linears whose inputs are rotated at run time; `taken`: those whose columns follow what they read already."""
    # With duplicates: a tied weight is used elsewhere, too, on inputs that no hook rotates.
    uses = Counter(id(param) for _, param in plain_parameters(model, remove_duplicate=False))
    for name, linear, block in find_linears("rotate_", modules, asked.blocks):
        if name in taken:
            raise NotImplementedError(
                f"rotate_: {name}, which online= names, takes what is rotated without it; leave it out of online=, or "
                "the other rotation out by where="
            )
        if uses[id(linear.weight)] > 1:
            raise NotImplementedError(
                f"rotate_: the weight of {name}, which online= names, has other names or uses in the model, where its "
                "inputs would not be rotated with it"
            )
        yield name, Axis("inputs at run time", linear.in_features, name, block)


def check_plain(name: str, module: nn.Module) -> None:
    """Raise TypeError or ValueError unless all parameters of a module are plain tensors with values."""
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
        if param.is_inference():
            raise TypeError(
                f"{what} was made under torch.inference_mode(), so it cannot be written; make the model outside of it"
            )
        if not bool(torch.isfinite(param).all()):
            raise ValueError(
                f"{what} holds values that are not finite (NaN or infinities), which a rotation would spread over "
                "their blocks"
            )
