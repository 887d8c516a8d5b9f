"""Many tensors at once: what counts as small, and copies of lists."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fsdp_hooks.torch_private import foreach_copy
from qtensor.scales.high_precision import HighPrecisionWeight

SMALL = 2**18  # elements of a weight that goes with others
STACK = 2**22  # elements that are stacked at a time
BY_ROW = frozenset({"cpu"})  # where copying row by row is quick, if no view of each row is made for it
LISTED = {Tensor, nn.Parameter, HighPrecisionWeight}  # classes that are copied by the list


def copy_many(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Do target.copy_(source) for many tensors, by one call for each pair of dtypes: a GPU is slow to begin each."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        # a class of another library may know no lists
        if not {type(target), type(source)} <= LISTED:
            target.copy_(source)
            continue
        alike.setdefault((target.dtype, source.dtype), []).append((target, source))
    for some in alike.values():
        foreach_copy([target for target, _ in some], [source for _, source in some])


def copy_rows(targets: Sequence[Tensor], source: Tensor) -> None:
    """Do target.copy_(row) for each row of `source` [n, ..], all of one shape and dtype."""
    if source.device.type in BY_ROW:
        torch.unbind_copy(source, out=list(targets))
    elif source.itemsize == 1:  # as bytes: some devices copy no lists of float8
        rows = source.view(torch.uint8).unbind()
        foreach_copy([target.view(torch.uint8) for target in targets], list(rows))
    else:
        foreach_copy(list(targets), list(source.unbind()))
