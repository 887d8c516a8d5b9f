"""`release`: quantized weights of ours become another library's again, in place and with their bytes."""

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dcp_adapters.adopting.outcome import Given
from dcp_adapters.adopting.sources import SOURCES
from dcp_adapters.plain.words import in_lines
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.wrappers import plain_modules
from qtensor.model.model_init import uses_linear
from qtensor.spec.selection import check_lists, matches, unmatched
from qtensor.tensor.quantized_tensor import QuantizedTensor

GIVES = {source.library: source.give for source in SOURCES if source.give is not None}


def release(
    model: nn.Module, library: str, *, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
) -> list[str]:
    """Make quantized weights of nn.Linear another library's, in place and with their bytes.

    The way back of `adopt`: what is adopted again has the same bytes, and a model gives the outputs that it gave before
    it was adopted, unless the report of `adopt` noted inputs. The library must be installed. Its tensors share memory
    with ours where the layout is the same. Ties, biases and hooks stay; `requires_grad` too, with torchao.

    Args:
        model: any module; its quantized weights in memory, and not sharded.
        library: "torchao"; or "compressed-tensors", whose modules are then compressed: `decompress_module` of that
            library makes them run, as it does after a load.
        include: globs over module fqns; every one must match an nn.Linear with a quantized weight. None: all of them.
        exclude: globs over the fqns of modules to leave as they are.

    Returns:
        The fqns of the parameters that were released, in model order.

    Raises:
        ValueError: the library has no public constructor for such tensors (write a directory by `export_hf` instead);
            weights that it has no tensor for, all of them named; sharded ones, or none. Nothing has been changed.
        TypeError: a string instead of a list of patterns.
        ModuleNotFoundError: the library is not installed.

    Example:
        ```python
        >>> report = adopt(model)
        >>> names = release(model, "torchao")
        ```
    """
    if library not in GIVES:
        raise ValueError(
            f"release: no way back to {library!r}, only to {', '.join(GIVES)}; write a directory that it reads by "
            "dcp_adapters.export_hf"
        )
    check_lists("release", include=include or (), exclude=exclude or ())
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        raise ModuleNotFoundError(f"release: {library} is not installed")
    held = dict(_quantized(model))
    wanted = ("*",) if include is None else tuple(include)
    left = tuple(exclude or ())
    for pattern in (*unmatched(wanted, held), *unmatched(left, held)):
        raise ValueError(f"release: pattern {pattern!r} matches no nn.Linear with a quantized weight")
    chosen = {fqn: module for fqn, module in held.items() if matches(fqn, wanted) and not matches(fqn, left)}
    made: dict[int, _Released] = {}  # id of a weight of ours -> what takes its place, the same for tied ones
    problems = []
    for fqn, module in chosen.items():
        weight = module._parameters["weight"]
        if id(weight) in made:
            continue
        try:
            made[id(weight)] = _released(weight, library)
        except ValueError as error:
            problems.append(f"{fqn}: {error}")
    if problems:
        raise ValueError(
            f"release: {len(problems)} weights cannot go back to {library}, and nothing has been changed; leave them "
            f"out by exclude=:{in_lines(problems)}"
        )
    for module in chosen.values():
        made[id(module._parameters["weight"])].put_into(module)
    return [f"{fqn}.weight".lstrip(".") for fqn in chosen]


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for fqn, module in plain_modules(model):
        weight = module._parameters.get("weight")
        if uses_linear(module) and weight is not None and isinstance(local_of(weight), QuantizedTensor):
            yield fqn, module


@dataclass(frozen=True, eq=False)
class _Released:
    """What takes the place of a weight in a module."""

    params: Mapping[str, nn.Parameter]
    given: Given | None

    def put_into(self, module: nn.Module) -> None:
        if "weight" not in self.params:
            del module.weight
        for name, param in self.params.items():
            module.register_parameter(name, param)
        if self.given is not None:
            for name, value in self.given.attributes.items():
                setattr(module, name, value)
            self.given.finish(module)


def _released(weight: Any, library: str) -> _Released:
    if isinstance(weight, DTensor):
        raise ValueError("it is sharded; release before fully_shard and parallelize_module")
    if weight.is_meta:
        raise ValueError("it is on the meta device; load it first")
    with torch.no_grad():
        given = GIVES[library](weight.detach())
    if isinstance(given, Given):
        return _Released({name: nn.Parameter(one, requires_grad=False) for name, one in given.tensors.items()}, given)
    return _Released({"weight": nn.Parameter(given, requires_grad=weight.requires_grad)}, None)
