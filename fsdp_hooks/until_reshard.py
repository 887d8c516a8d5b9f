"""What is made of a gathered weight once, and lives until FSDP2 reshards it.

FSDP2 frees, with the gathered bytes, the storages of the tensors that `fsdp_post_all_gather` returned beside the
weight, and before each gather gives them as much memory as their elements need. Here these tensors have no elements, so
no gather costs any memory. When something is made of the weight (its transpose, say), they are put onto its storage:

    gathered    made                kept                                    resharded
    held  []    [] on a storage     all micro-batches of this gather        FSDP2 frees the storage
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class UntilReshard:
    """Keeps what was made of a gathered weight.

    Attributes:
        held: what FSDP2 is given beside the weight, one for each tensor that is made.

    Args:
        count: how many tensors are made.
        device: where.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.held = tuple(torch.empty(0, dtype=torch.uint8, device=device) for _ in range(count))
        self._made: dict[str, Tensor] = {}
        self._of: tuple[object, ...] = ()

    def keep(self, of: Sequence[Tensor], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what `make` returns: made now, or earlier since the gather if nobody wrote to `of` since then.

        Args:
            of: the gathered weight, and its parts: torch counts writes to some at the one, to some at the others.
            make: returns `count` new tensors by name, each with a storage of its own.
        """
        # writes to inference tensors are not counted
        if any(each.is_inference() for each in of):
            return make()
        now = tuple((each.shape, each._version) for each in of)
        if now != self._of or not all(each.untyped_storage().size() for each in self._made.values()):
            made = make()
            with torch.no_grad():
                for held, each in zip(self.held, made.values(), strict=True):
                    held.set_(each.untyped_storage(), 0, (0,))  # type: ignore[call-overload]
            self._made, self._of = made, now
        return dict(self._made)
