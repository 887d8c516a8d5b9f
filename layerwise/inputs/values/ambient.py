"""What a model switches on around a layer's call: autocast, default dtype, attention kernels.

A layer that is replayed alone computes the same only under the same switches. So they are noted when the model calls
the layer's stand-in, and set again whenever the layer runs.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")  # the kernels that sdpa_kernel() switches


@dataclass(frozen=True)
class Ambient:
    """The switches at one moment.

    Attributes:
        autocast: for each device type whether autocast is on, and its dtype.
        dtype: what new tensors are made in if nobody says so.
        attention: for each of ATTENTION whether it may be used.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dtype: torch.dtype
    attention: tuple[bool, ...]

    @classmethod
    def now(cls, devices: Iterable[str]) -> "Ambient":
        """Read the switches; `devices`: types of devices, to which the CPU is always added."""
        # A layer may compute on the CPU even if all its arguments are on a GPU.
        known = sorted(one for one in {"cpu", *devices} if torch.amp.is_autocast_available(one))
        return cls(
            tuple((one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in known),
            torch.get_default_dtype(),
            tuple(getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in ATTENTION),
        )

    @contextmanager
    def set(self) -> Iterator[None]:
        """Return a context manager in which the switches are these."""
        before = Ambient.now(device for device, _, _ in self.autocast)
        with ExitStack() as stack:
            for one, other in zip(self.autocast, before.autocast, strict=True):
                if one != other:
                    device, enabled, dtype = one
                    stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            stack.callback(_apply, before)
            _apply(self)
            yield


def _apply(wanted: Ambient) -> None:
    if torch.get_default_dtype() != wanted.dtype:
        torch.set_default_dtype(wanted.dtype)
    for kernel, enabled in zip(ATTENTION, wanted.attention, strict=True):
        if getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() != enabled:
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(enabled)
