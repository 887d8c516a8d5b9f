"""Code written by hand proves itself where it is to run: once, on fixed numbers, against the definition on the CPU.

Such code was compiled, interpreted and measured, but never with each GPU, driver and version of Triton that there is,
and some of it asks for a GPU's own conversions. So before it runs on a device for the first time, it runs there on
numbers that reach each of its branches, and every byte is compared:

    Kernel.run(x)  --this kind of call, on this device: for the first time?-->  difference(..)
                                                                               ""      it runs, from here on
                                                                               a text  never on this device

Never while a graph is captured: the comparison waits for the device. What was not tried by then does not run there.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SHOWN = 4  # inputs of one entry


def beside(args: tuple[Any, ...], name: str, place: int, entries: int) -> list[Tensor]:
    """Return what an entry of the output is made of, if entries follow each other as their inputs do."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor) and arg.numel():
            first, behind = place * arg.numel() // entries, -(-(place + 1) * arg.numel() // entries)
            found.append(arg.reshape(-1)[first : max(behind, first + 1)])
    return found


@dataclass(frozen=True)
class Probes:
    """What code written by hand is tried with.

    Attributes:
        kind: of a call's arguments: calls of other kinds run other code.
        calls: kind -> arguments of one or more calls, on the CPU.
        definition: what is right, for the same arguments.
        any_nan: whether one NaN is as good as another, since a conversion makes it.
        source: (arguments, name and place of an entry, how many there are) -> what it is made of.
    """

    kind: Callable[..., Hashable]
    calls: Callable[[Any], Iterable[tuple[Any, ...]]]
    definition: Callable[..., Any]
    any_nan: bool = False
    source: Callable[[tuple[Any, ...], str, int, int], list[Tensor]] = beside

    def difference(self, by_hand: Callable[..., Any], device: torch.device, kind: Hashable) -> str:
        """Return the first entry that `by_hand` makes otherwise on a device; "" if there is none."""
        place = device if flushes_denormals() else torch.device("cpu")
        for args in self.calls(kind):
            there = moved(args, device)
            wanted = self.definition(*moved(args, place))
            found = dict(named(by_hand(*there)))
            for name, right in named(wanted):
                if why := first_difference(found[name], right, any_nan=self.any_nan):
                    at, text = why
                    inputs = [bits(each) for each in self.source(args, name, at, right.numel())]
                    return f"{name or 'entry'} {at} of {', '.join(inputs) or 'several inputs'} {text}"
        return ""


class Written(NamedTuple):
    """Code written by hand, which comes with what it is tried with: none runs untried."""

    run: Callable[..., Any]
    probes: Probes


def can_try(device: torch.device) -> bool:
    """Return whether results can be read now: not while a graph is captured on the device's stream."""
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def flushes_denormals() -> bool:
    """Return whether the CPU computes without them here (torch.set_flush_denormal), unlike the definition."""
    least = torch.ones(1, dtype=torch.int32, device="cpu").view(torch.float32)
    return not bool((least * 1.0).view(torch.int32))


def first_difference(found: Tensor, wanted: Tensor, *, any_nan: bool) -> tuple[int, str] | None:
    """Return (place, what is there) of the first entry whose bytes differ; None if there is none."""
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        expected = f"{wanted.dtype} {tuple(wanted.shape)}"
        return 0, f"is one of {found.dtype} {tuple(found.shape)}, expected {expected}"
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    other = found.view(INTEGERS[found.itemsize]) != wanted.view(INTEGERS[found.itemsize])
    if any_nan and found.is_floating_point():
        other &= ~(found.isnan() & wanted.isnan())
    places = other.nonzero()
    if not places.numel():
        return None
    place = int(places[0])
    return place, f"is {bits(found[place : place + 1])}, expected {bits(wanted[place : place + 1])}"


def bits(values: Tensor) -> str:
    """Return the bits of a few numbers, and their values."""
    shown = values[:SHOWN].contiguous().cpu()
    size = shown.itemsize
    numbers = shown.view(INTEGERS[size]).tolist()
    each = [f"0x{number & (1 << 8 * size) - 1:0{2 * size}X}" for number in numbers]
    if shown.dtype in (torch.bfloat16, torch.float16, torch.float32):
        each = [f"{one} ({value:g})" for one, value in zip(each, shown.to(torch.float32).tolist(), strict=True)]
    return " ".join(each) + (" .." if values.numel() > SHOWN else "")


def where(device: torch.device) -> str:
    """Return a device and the Triton that compiles for it, in words for a report."""
    triton = getattr(sys.modules.get("triton"), "__version__", "of no known version")
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}, Triton {triton}"


def moved(args: Iterable[Any], device: torch.device) -> tuple[Any, ...]:
    """Return arguments, the tensors among them on a device."""
    return tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)


def named(outputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a result by their names."""
    if isinstance(outputs, Tensor):
        yield name, outputs
    elif isinstance(outputs, dict):
        for key, value in outputs.items():
            yield from named(value, f"{name}{key}")
    elif isinstance(outputs, tuple | list):
        several = sum(value is not None for value in outputs) > 1
        for number, value in enumerate(outputs):
            yield from named(value, f"{name}{number}." if several else name)
