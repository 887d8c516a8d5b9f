"""PlacedShard: a rank's piece of a tensor that is sharded by hand, with its place."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

FORGOTTEN = (
    "a PlacedShard, of which DCP's own planners know no place; save it with planner=QuantizedSavePlanner(), and load "
    "into it with planner=QuantizedLoadPlanner()"
)


@dataclass(frozen=True, eq=False)
class PlacedShard:
    """A rank's piece of a tensor that is sharded by hand, as an entry of a state dict in place of a DTensor.

    Saving takes the bytes of `local` for this box of the global tensor, loading writes into `local` in place. Other
    ranks may hold the tensor as they like, as long as all boxes make it up exactly once: a gap or an overlap is an
    error on all ranks before anything is written. Ranks with the same box are taken for replicas of each other. A rank
    without rows gives an empty `local`, or leaves the entry out.

    Args:
        local: this rank's piece, quantized or dense; no DTensor.
        global_shape: the logical shape of the whole tensor, as many dims as `local` has.
        offsets: where the piece begins in the whole, in elements, one for each dim. Columns of a quantized piece begin
            and end between blocks; rows need not.

    Raises:
        TypeError: `local` is no tensor, or a DTensor.
        ValueError: the piece does not lie inside of the global shape.

    Example:
        ```python
        >>> whole = quantize(torch.randn(64, 64), MXFP8BlockScaling())
        >>> state = {"weight": PlacedShard(whole[:48], (64, 64), (0, 0))}  # another rank has the other 16 rows
        >>> state["weight"].shape, tuple(state["weight"].local.shape)
        (torch.Size([64, 64]), (48, 64))
        ```
    """

    local: Tensor
    global_shape: Sequence[int]
    offsets: Sequence[int]

    def __post_init__(self) -> None:
        local: Any = self.local
        if not isinstance(local, Tensor) or isinstance(local, DTensor):
            raise TypeError(
                f"PlacedShard: local is a {type(self.local).__name__}, expected this rank's own tensor; a DTensor has "
                "its place already, and goes into the state dict as it is"
            )
        shape, offsets = (tuple(map(operator.index, given)) for given in (self.global_shape, self.offsets))
        inside = len(shape) == len(offsets) == self.local.ndim and all(
            at >= 0 and at + own <= full for at, own, full in zip(offsets, self.local.shape, shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"PlacedShard: a piece of {tuple(self.local.shape)} at {offsets} is not inside of {shape}; expected "
                "the place of the whole piece, in elements, one offset for each dim"
            )
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "offsets", offsets)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `local`."""
        return self.local.dtype

    # DCP asks for these where its own planners meet the record: they would pickle it, and keep one rank's piece
    def __create_write_items__(self, fqn: str, object: Any) -> NoReturn:  # noqa: A002 - DCP's name
        """Refuse a save with stock's planner."""
        raise ValueError(f"{fqn}: {FORGOTTEN}")

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse a load with stock's planner."""
        raise TypeError(FORGOTTEN)
