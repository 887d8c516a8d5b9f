"""What states are kept in: the choice, and what it is refused for; pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import local_of
from qtensor.formats.mxfp8 import BLOCK
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.states.kinds import ELEMENTWISE, MATRICES, is_elementwise
from qtensor.states.remainders import refuse_recipe
from qtensor.tensor.quantized_tensor import QuantizedTensor

MASTERS = ("fp32", "remainder")
MOMENTS = ("fp32", "bfloat16", "float8")
ROUNDING = ("stochastic", "nearest")
STATES = ("device", "host")


def moments_beside(masters: str, moments: str | None) -> str:
    """Return what moments are kept in: what is asked for, or what goes with the masters."""
    if moments is not None:
        return moments
    return "float8" if masters == "remainder" else "fp32"


@dataclass(frozen=True)
class Storage:
    """What masters and moments are kept in between steps, how they are rounded to it, and in which memory they are."""

    masters: str = "fp32"
    moments: str = "fp32"
    rounding: str = "stochastic"
    states: str = "device"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("masters", self.masters, MASTERS),
            ("moments", self.moments, MOMENTS),
            ("rounding", self.rounding, ROUNDING),
            ("states", self.states, STATES),
        ):
            if value not in known:
                raise ValueError(
                    f"MasterWeightOptimizer({name}={value!r}): expected one of {', '.join(map(repr, known))}"
                )

    @property
    def compresses(self) -> bool:
        """Whether anything is kept in less than fp32."""
        return self.masters != "fp32" or self.moments != "fp32"

    @property
    def on_host(self) -> bool:
        """Whether all of it is in host memory between steps."""
        return self.states == "host"

    def has_remainder(self, param: Tensor) -> bool:
        """Return whether a parameter's master is kept as a remainder; one in fp32 is its own master."""
        return self.masters == "remainder" and (is_quantized(param) or param.dtype != torch.float32)

    def moment_of(self, param: Tensor) -> str:
        """Return what a parameter's moments are kept in: blocks need rows of whole blocks."""
        if self.moments == "float8" and (param.ndim < 2 or param.shape[-1] % BLOCK):
            return "fp32"
        return self.moments


def is_quantized(param: Tensor) -> bool:
    """Return whether a parameter's shard is quantized."""
    return isinstance(local_of(param), QuantizedTensor)


def check_storage(storage: Storage, kind: type[torch.optim.Optimizer], named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if states cannot be kept so.

    Raises:
        NotImplementedError: the optimizer may look at more than one element at a time, or at gradients together.
        ValueError: a parameter's recipe, dtype or cut has no such states.
    """
    asked = f"masters={storage.masters!r}, moments={storage.moments!r}"
    if storage.on_host:
        asked += f", states={storage.states!r}"
    if not is_elementwise(kind) and kind not in MATRICES:
        known = ", ".join(sorted(one.__name__ for one in ELEMENTWISE | MATRICES))
        raise NotImplementedError(
            f"MasterWeightOptimizer({kind.__name__}, {asked}): states are expanded for some weights at a time, and "
            f"{kind.__name__} is not known to step each element by itself; use one of torch.optim's {known}, have the "
            f"class say elementwise = True if it does, or leave {'these' if storage.on_host else 'both'} arguments out"
        )
    for name, param in named:
        if why := _refuse(storage, param):
            raise ValueError(f"MasterWeightOptimizer({asked}): {name or tuple(param.shape)} {why}")


def _refuse(storage: Storage, param: Tensor) -> str | None:
    local = local_of(param)
    if storage.has_remainder(param):
        if isinstance(local, QuantizedTensor):
            why = refuse_recipe(local.recipe)
            if why is not None:
                return f'cannot have its master as a remainder: {why}; use masters="fp32"'
        elif param.dtype != torch.bfloat16:
            return f'is {param.dtype}, whose master is no bf16 and 16 bits; use masters="fp32", or bf16 weights'
        elif not isinstance(local, HighPrecisionWeight) and type(local) not in (Tensor, torch.nn.Parameter):
            return f'is a {type(local).__name__}, whose bits are not known; use masters="fp32"'
    if storage.moment_of(param) == "float8" and isinstance(param, DTensor) and local.shape[-1] % BLOCK:
        return (
            f"is cut along its rows of {param.shape[-1]} into {local.shape[-1]}, no multiple of {BLOCK}, which is what "
            'a scale of 8-bit moments is for; cut it elsewhere, or use moments="bfloat16"'
        )
    return None
