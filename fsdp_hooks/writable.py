"""Whether tensors can be written in place, asked before the first of many is written.

torch refuses a write when it comes, and the tensors before it have been written by then. So who writes many asks for
all of them first:

    unwritable   meta tensors; those made in inference mode, outside of it; those whose elements share memory
                 (torch.Tensor.expand); CPU memory that is mapped for reading alone (a numpy.memmap of mode "r", say),
                 if the system tells
    meeting      tensors that lie on each other's memory, so that a write into one changes another
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

MAPS = Path("/proc/self/maps")  # of Linux


def unwritable(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> why a plain tensor cannot be written in place, and what to do; nothing for those that can.

    Args:
        tensors: plain ones: local tensors, the parts of quantized ones.
    """
    found = {name: why for name, tensor in tensors.items() if (why := _why_refused(tensor)) is not None}
    there = {name: tensor for name, tensor in tensors.items() if name not in found and tensor.is_cpu and tensor.numel()}
    # torch does not know of memory that is mapped for reading: the write would end the process
    guarded = _read_only() if there else []
    starts = [start for start, _ in guarded]
    for name, tensor in there.items() if guarded else ():
        first, end = span_of(tensor)
        # the last range that begins before the tensor ends
        place = bisect_right(starts, end - 1) - 1
        if place >= 0 and guarded[place][1] > first:
            found[name] = "its memory can only be read (a file mapped for reading, say); clone it"
    return found


def meeting(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield names of plain tensors whose memory reaches into each other's, if there are several."""
    spans: dict[torch.device, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            spans.setdefault(tensor.device, []).append((*span_of(tensor), name))
    for places in spans.values():
        group, reach = list[str](), 0
        for first, end, name in sorted(places):
            if first >= reach:
                yield from _several(group)
                group = []
            group.append(name)
            reach = max(reach, end)
        yield from _several(group)


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a plain tensor with elements, and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _why_refused(tensor: Tensor) -> str | None:
    if tensor.is_meta:
        return "it is on the meta device, without memory; call to_empty() first"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode, and can be written only there; clone it outside, or write it inside"
    if _repeats(tensor):
        return (
            f"its elements share memory (strides {tensor.stride()}, as torch.Tensor.expand makes them); give it memory "
            "of its own: .clone(memory_format=torch.contiguous_format)"
        )
    return None


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements share memory, or have strides that interleave without sharing (which nobody makes)."""
    if not tensor.numel():
        return False
    reach = 0  # of what smaller strides address
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _read_only() -> list[tuple[int, int]]:
    """Return the address ranges of this process that cannot be written, in order; none if the system does not tell."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=2)[:2] for line in lines]
    ranges = [place.split("-") for place, rights in fields if rights[1] != "w"]
    return sorted((int(first, 16), int(end, 16)) for first, end in ranges)


def _several(group: Iterable[str]) -> Iterator[list[str]]:
    names = list(group)
    if len(names) > 1:
        yield names
