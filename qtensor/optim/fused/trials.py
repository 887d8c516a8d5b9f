"""Which kernels can be used, tried once each, and why parameters take the general way, told once each."""

import logging
import warnings
from collections.abc import Callable, Collection, Hashable

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import use_kernels
from fsdp_hooks.kernels.probes import can_try

CAPTURED = "its kernel was not tried before a graph is captured, and cannot be meanwhile: step once before that"


class Trials:
    """What is known of the kernels of one way.

    Args:
        way: its name in warnings.
    """

    def __init__(self, way: str) -> None:
        self._way = way
        self._broken: dict[Hashable, str] = {}  # kernel -> why it cannot be used; "" if it can

    def why_not(self, kernel: Hashable, device: torch.device, attempt: Callable[[], None]) -> str:
        """Return why a kernel cannot be used, "" if it can; tried before a step depends on it.

        Args:
            kernel: what is compiled apart.
            device: where it runs.
            attempt: compiles it, and raises unless it proves itself.
        """
        if kernel not in self._broken:
            if not can_try(device):
                return CAPTURED
            try:
                attempt()
                self._broken[kernel] = ""  # an interrupt before that proves nothing
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # it is no better in the next step
                if use_kernels.mode == "compiled":
                    raise
                self._broken[kernel] = f"its kernel failed: {error}"
                warnings.warn(
                    f"MasterWeightOptimizer: the kernel of {self._way} failed ({type(error).__name__}: {error}); "
                    "parameters that need it take the general way, which is slower and gives the same bytes",
                    stacklevel=2,
                )
        return self._broken[kernel]


class Reasons:
    """Why parameters take the general way.

    Attributes:
        told: the last reason of each.

    Args:
        log: tells them at level DEBUG.
        required: whether a reason is an error.
        passing: those that never are: they pass by themselves, or the shard has nothing to step.
    """

    def __init__(self, log: logging.Logger, *, required: bool, passing: Collection[str]) -> None:
        self._log, self._required, self._passing = log, required, passing
        self.told: dict[Tensor, str] = {}

    def tell(self, param: Tensor, why: str) -> None:
        """Log why a parameter takes the general way; raise RuntimeError if it must not."""
        if self._required and why not in self._passing:
            raise RuntimeError(
                f"MasterWeightOptimizer(fused_step=True): a parameter of shape {tuple(param.shape)} and {param.dtype} "
                f"cannot take the fused step: {why}; leave fused_step out, so that it takes the general way"
            )
        if self.told.get(param) != why:
            self.told[param] = why
            self._log.debug("a parameter of shape %s takes the general way: %s", tuple(param.shape), why)
