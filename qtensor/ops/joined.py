"""`torch.cat` of flat weights, as DistributedDataParallel's first broadcast makes it: sent part by part, and cut again.

DDP (like other code that syncs a module's state before training) flattens the parameters of each dtype, broadcasts rank
0's and copies the pieces back:

    view(-1) each -> cat -> c10d.broadcast_ -> slice, view each -> copy_

`Joined` stands for the flat tensor: it is a list of the flat pieces, with no data of its own. A broadcast sends every
part of a quantized piece as bytes, and a dense piece as it is; a slice gives the piece back. So all ranks get rank 0's
bytes. Any other operation raises.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import device_of
from fsdp_hooks.torch_private import make_wrapper
from qtensor.spec.registry import describe
from qtensor.tensor.contents import bytes_of, initial_value
from qtensor.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten
c10d = torch.ops.c10d


class Joined(Tensor):
    """Flat pieces, one behind the other; made by torch.cat of flattened quantized weights.

    Attributes:
        pieces: 1-D tensors, plain ones and flattened quantized ones.
    """

    pieces: Sequence[Tensor]

    def __new__(cls, pieces: Sequence[Tensor]) -> Self:
        """Wrap `pieces`, aliased; internal."""
        self: Any = make_wrapper(cls, (sum(piece.numel() for piece in pieces),), pieces[0].dtype, pieces[0].device)
        self.pieces = list(pieces)
        return self  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all is done in __new__."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's type is that of the C function it has by default
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is c10d.broadcast_.default and isinstance(args[0][0], Joined):
            return args[0], broadcast_flat(func, args[0][0].pieces, args[1:], kwargs or {})
        if func is aten.slice.Tensor and (piece := args[0].piece(*args[1:])) is not None:
            # an alias, because an op must return a new tensor
            return func(piece, 0, 0, piece.numel())
        raise NotImplementedError(
            f"{func} is not defined for flattened quantized weights that were joined; DistributedDataParallel "
            "broadcasts them, and nothing else is done to them"
        )

    def piece(self, dim: int = 0, start: int = 0, end: int = -1, step: int = 1) -> Tensor | None:
        """Return the piece at start:end; None if no piece begins and ends there."""
        stands = 0
        for piece in self.pieces:
            if (dim, start, end, step) == (0, stands, stands + piece.numel(), 1):
                return piece
            stands += piece.numel()
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch's own has no types
        return f"Joined({list(self.pieces)!r})"


def broadcast_flat(func: Any, pieces: Sequence[Tensor], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcast pieces in place, and wait for them; returns the last Work.

    Raises:
        RuntimeError: on all ranks, before anything is sent, if they hold pieces of different formats.
    """
    # a rank that broadcasts fewer parts would leave the others in a collective that never ends
    _check_same_formats(dist.ProcessGroup.unbox(rest[0]), pieces)
    work = None
    for piece in pieces:
        for part in bytes_of(piece) if isinstance(piece, QuantizedTensor) else [piece]:
            sent = part.contiguous()
            _, work = func([sent], *rest, **kwargs)
            work.wait()
            # a part that is not contiguous was received into a copy
            if sent is not part:
                part.copy_(sent)
    return work


def _check_same_formats(group: dist.ProcessGroup, pieces: Sequence[Tensor]) -> None:
    formats = [_format(piece) for piece in pieces]
    # the maxima of a number and of its negative are opposite only if all ranks have the same number
    digest = int.from_bytes(hashlib.sha256("; ".join(formats).encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device_of(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = both.tolist()
    if largest != -smallest:
        raise RuntimeError(
            "broadcasting the weights of a module: ranks hold them in different formats; quantize them by the same "
            f"recipes everywhere. Nothing has been sent. This rank has {', '.join(formats)}"
        )


def _format(piece: Tensor) -> str:
    if not isinstance(piece, QuantizedTensor):
        return f"{piece.numel()} dense values"
    kept = "" if initial_value(piece) is None else " with its initial value"
    return describe(piece._lens.described or piece.shape, piece.recipe) + kept
