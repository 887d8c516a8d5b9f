"""How an element is rounded on its way into the payload: to nearest, or stochastically in a write that is `armed`.

The codecs beside it hand every value to `onto_grid`. Unless armed it does nothing, and the conversion that
follows rounds to nearest. Compiled code has no trace of it, and armed writes are never compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing

_armed: ContextVar[torch.Generator | None] = ContextVar("qtensor.stochastic_rounding.armed", default=None)


def power_of_two_floor(x: Tensor) -> Tensor:
    """|x| with its mantissa bits cleared: the largest power of two <= |x|, for normal fp32 x."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def is_armed() -> bool:
    """Whether elements are being rounded stochastically; not for code that may be traced."""
    return _armed.get() is not None


@contextmanager
def armed(generator: torch.Generator | None) -> Iterator[None]:
    """Inside, formats round elements stochastically (None: to nearest)."""
    token = _armed.set(generator)
    try:
        yield
    finally:
        _armed.reset(token)


def onto_grid(scaled: Tensor, eps: float, smallest_normal: float) -> Tensor:
    """`scaled` itself, for the caller to round to nearest; where armed, `scaled` rounded onto the element's grid.

    Where armed, every value becomes one of its two neighbours on the grid, signs kept. Dividing by a step, which is a
    power of two, is exact, so a value that is on the grid already (0, say) does not change.

    Args:
        scaled: fp32, value / scale, clamped to the largest element.
        eps: the element's step between 1 and 2.
        smallest_normal: below it, steps are all of one size.
    """
    generator = None if is_tracing() else _armed.get()
    if generator is None:
        return scaled
    magnitude = scaled.abs()
    step = power_of_two_floor(magnitude).clamp(min=smallest_normal) * eps
    steps = magnitude / step
    lower = steps.floor()
    draws = torch.rand(scaled.shape, generator=generator, dtype=torch.float32, device=scaled.device)
    return torch.copysign((lower + (draws < steps - lower)) * step, scaled)


def onto_numbers(scaled: Tensor, numbers: Sequence[float]) -> Tensor:
    """`scaled` itself; where armed, each as one of its two neighbours among `numbers`: `onto_grid` of a table.

    Args:
        scaled: fp32; what is beyond the first or the last number becomes that.
        numbers: fp32 numbers, upwards.
    """
    generator = None if is_tracing() else _armed.get()
    if generator is None:
        return scaled
    table = table_of(numbers, scaled.device)
    bounded = scaled.clamp(numbers[0], numbers[-1])
    at = torch.bucketize(bounded, table[1:-1], right=True)  # of the lower neighbour
    # by numbers, and not table[at], which could be a mask whose size a GPU would have to tell
    lower, upper = (table.index_select(0, place.flatten()).view(at.shape) for place in (at, at + 1))
    draws = torch.rand(scaled.shape, generator=generator, dtype=torch.float32, device=scaled.device)
    return torch.where(draws < (bounded - lower) / (upper - lower), upper, lower)


def table_of(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers as fp32 [n]. A GPU fills them in: the CPU would wait for a copy of the list to it."""
    if device.type == "cpu" or is_tracing():
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    return torch.cat([torch.full((1,), number, dtype=torch.float32, device=device) for number in numbers])


def nearest(scaled: Tensor, largest: float, eps: float, smallest_normal: float) -> Tensor:
    """Each of `scaled` rounded to the nearest element, ties to even, saturating; fp32, signs of zeros kept.

    A step of the element is the power of two below the value times `eps`, and of one size below `smallest_normal`. At
    1.5 * 2^23 steps, fp32 has no bits for less than one step: so adding these rounds to whole steps, and subtracting
    them again is exact. This is several times faster than converting to float8 and back.
    """
    bounded = scaled.clamp(-largest, largest)
    steps = power_of_two_floor(bounded).clamp_(min=smallest_normal).mul_(eps * 1.5 * 2.0**23)
    return bounded.add_(steps).sub_(steps).copysign_(scaled)
