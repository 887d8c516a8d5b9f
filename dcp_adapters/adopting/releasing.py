"""`release`: quantized weights of ours become another library's tensors again, in place and with their bytes."""

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    """Make quantized weights of nn.Linear another library's tensors, in place and with their bytes.

    The way back of `adopt`: what is adopted again has the same bytes, and a model that was adopted gives the outputs
    that it gave before that. The library must be installed. Its tensors share memory with ours where the layout is the
    same. Ties, biases, hooks and `requires_grad` stay.

    Args:
        model: any module; its quantized weights in memory, and not sharded.
        library: "torchao".
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
        >>> report = adopt(model)  # doctest: +SKIP
        >>> names = release(model, "torchao")  # doctest: +SKIP
        ```
    """
    if library not in GIVES:
        raise ValueError(
            f"release: no way back to {library!r}, only to {', '.join(GIVES)}; write a directory that it reads by "
            "dcp_adapters.export_hf"
        )
    check_lists("release", include=include or (), exclude=exclude or ())
    if importlib.util.find_spec(library) is None:
        raise ModuleNotFoundError(f"release: {library} is not installed")
    held = dict(_quantized(model))
    wanted = ("*",) if include is None else tuple(include)
    left = tuple(exclude or ())
    for pattern in (*unmatched(wanted, held), *unmatched(left, held)):
        raise ValueError(f"release: pattern {pattern!r} matches no nn.Linear with a quantized weight")
    chosen = {fqn: module for fqn, module in held.items() if matches(fqn, wanted) and not matches(fqn, left)}
    made: dict[int, nn.Parameter] = {}  # id of a weight of ours -> the library's parameter, the same for tied ones
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
        module.register_parameter("weight", made[id(module._parameters["weight"])])
    return [f"{fqn}.weight".lstrip(".") for fqn in chosen]


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for fqn, module in plain_modules(model):
        weight = module._parameters.get("weight")
        if uses_linear(module) and weight is not None and isinstance(local_of(weight), QuantizedTensor):
            yield fqn, module


def _released(weight: Any, library: str) -> nn.Parameter:
    if isinstance(weight, DTensor):
        raise ValueError("it is sharded; release before fully_shard and parallelize_module")
    if weight.is_meta:
        raise ValueError("it is on the meta device; load it first")
    with torch.no_grad():
        given: Tensor = GIVES[library](weight.detach())
    return nn.Parameter(given, requires_grad=weight.requires_grad)
