"""Which modules of a model are another library's, and what of them cannot be adopted whatever the bytes are."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dcp_adapters.adopting.outcome import Outcome, Refused, Taken
from dcp_adapters.adopting.source import Marks, Source
from dcp_adapters.adopting.sources import SOURCES
from fsdp_hooks.wrappers import plain_modules
from qtensor.model.model_init import uses_linear
from qtensor.spec.registry import APPEARANCE_DTYPES
from qtensor.spec.selection import check_lists, matches, unmatched

OFFLOADED = "_hf_hook"  # where accelerate keeps what moves a module's tensors around each forward


@dataclass(frozen=True, eq=False)
class Candidate:
    """A module that a source knows.

    Attributes:
        fqn: of the module, in the plain model.
        module: it.
        source: who knows it.
        kind: the class that it is known by, without its module's name.
    """

    fqn: str
    module: nn.Module
    source: Source
    kind: str

    def param(self, name: str) -> str:
        """Return the fqn of one of its parameters."""
        return f"{self.fqn}.{name}".lstrip(".")

    @property
    def key(self) -> tuple[int, ...]:
        """The same for two modules whose tensors are tied."""
        return tuple(map(id, self.source.tensors(self.module)))

    def __str__(self) -> str:
        """Name the module, the library and the class."""
        return f"{self.fqn or 'the model itself'} ({self.source.library} {self.kind})"


def candidates_of(
    model: nn.Module, include: Iterable[str] | None, exclude: Iterable[str] | None, *, caller: str = "adopt"
) -> list[Candidate]:
    """Return the modules to adopt, in model order.

    Raises:
        ValueError: the model has none, or an include pattern matches none.
        TypeError: a string instead of a list of patterns.
    """
    check_lists(caller, include=include or (), exclude=exclude or ())
    found = {one.fqn: one for one in known(model)}
    if not found:
        libraries = ", ".join(dict.fromkeys(source.library for source in SOURCES))
        raise ValueError(
            f"{caller}: the model has no quantized modules of {libraries}; to quantize dense weights call "
            "qtensor.quantize_"
        )
    wanted = ("*",) if include is None else tuple(include)
    for pattern in unmatched(wanted, found):
        raise ValueError(f"{caller}: include pattern {pattern!r} matches none of the quantized modules")
    left = tuple(exclude or ())
    for pattern in unmatched(left, found):
        warnings.warn(f"{caller}: exclude pattern {pattern!r} matches none of the quantized modules", stacklevel=4)
    return [one for fqn, one in found.items() if matches(fqn, wanted) and not matches(fqn, left)]


def known(model: nn.Module) -> Iterator[Candidate]:
    """Yield all modules that a source knows, in model order."""
    for fqn, module in plain_modules(model):
        marks = Marks.of(module)
        for source in SOURCES:
            mark = marks.of_source(source)
            if mark is not None:
                yield Candidate(fqn, module, source, mark.rpartition(".")[2])
                break


def dense_dtype(model: nn.Module, chosen: Iterable[Candidate]) -> torch.dtype:
    """Return the dtype of most of the model's dense parameters; bfloat16 if it has none."""
    quantized = {id(tensor) for one in chosen for tensor in one.source.tensors(one.module)}
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if id(param) not in quantized and param.dtype in APPEARANCE_DTYPES and type(param) is nn.Parameter:
            sizes[param.dtype] += param.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.bfloat16


def why_not(model: nn.Module, chosen: Iterable[Candidate]) -> Mapping[str, str]:
    """Return fqn -> why a module cannot be changed: where its tensors are, or who else has them."""
    chosen = list(chosen)
    ours = {id(one.module) for one in chosen}
    holders: dict[int, str] = {}
    for fqn, module in plain_modules(model):
        if id(module) not in ours:
            holders |= {id(tensor): fqn for tensor in (*module._parameters.values(), *module._buffers.values())}
    problems = {one.fqn: _problem(one, one.source.tensors(one.module), holders) for one in chosen}
    return {fqn: problem for fqn, problem in problems.items() if problem is not None}


def _problem(one: Candidate, tensors: list[Tensor], holders: Mapping[int, str]) -> str | None:
    if type(one.module._parameters).__module__.startswith("compressed_tensors.offload"):
        return "compressed-tensors offloads its tensors; call compressed_tensors.offload.remove_dispatch first"
    if isinstance(one.module, FSDPModule) or any(isinstance(tensor, DTensor) for tensor in tensors):
        return "it is sharded already; adopt before fully_shard and parallelize_module"
    if any(tensor.is_meta for tensor in tensors):
        return "its tensors are on the meta device, or offloaded; load them into memory first"
    if OFFLOADED in vars(one.module):
        return (
            "accelerate moves its tensors around each forward; load the model without offloading (device_map=None), or "
            "call accelerate.hooks.remove_hook_from_submodules"
        )
    if _forward_is_lost(one):
        return (
            "its forward was replaced on this one module, by neither the library nor its class, and would be lost; put "
            "it into a class or a hook, or adopt before it is replaced"
        )
    tied = next((holders[id(tensor)] for tensor in tensors if id(tensor) in holders), None)
    return None if tied is None else f"its tensors are tied to {tied}, which is not adopted; adopt both or neither"


def _forward_is_lost(one: Candidate) -> bool:
    """Return whether a module has a forward of its own that `drops` would take: not its class's, nor the library's."""
    forward = vars(one.module).get("forward")
    if forward is None or "forward" not in one.source.drops:
        return False
    function = getattr(forward, "__func__", None)
    if any(vars(kind).get("forward", forward) is function for kind in type(one.module).__mro__):
        return False
    # functools.wraps gives a function the names of another; where it was written stays
    written_in = str(getattr(function, "__globals__", {}).get("__name__"))
    return written_in.partition(".")[0] != one.source.library.replace("-", "_")


def why_no_linear(one: Candidate, outcome: Outcome) -> str | None:
    """Return why a module cannot hold what its weight would become; None if it can, or if it is refused anyway."""
    if isinstance(outcome, Refused) and outcome.values is None:
        return None
    module: Any = one.module
    if not (uses_linear(module) if one.source.becomes is None else isinstance(module, nn.Linear)):
        return f"its module is of the class {type(module).__name__}, and quantized weights here belong to nn.Linear"
    shape = (module.out_features, module.in_features)
    if isinstance(outcome, Taken) and outcome.weight.shape != shape:
        return f"its weight would have the shape {tuple(outcome.weight.shape)}, where the linear has {shape}"
    return None
