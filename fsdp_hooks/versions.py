"""Version counters: a write that torch does not see as one is counted by hand.

torch counts in-place operations on a tensor, and a backward whose saved tensor has another count than at its forward
raises ("modified by an inplace operation") instead of computing with the new values. A wrapper's count is raised by
operations on the wrapper alone: not by writes into its parts, and not by the `_foreach_` operations, which torch hands
over uncounted. So everything that writes parts calls `count_writes`.

Refills of what FSDP2 gathered are no writes: backward gathers the weights of its forward anew, into the same tensors,
and FSDP2 keeps the counts as they are meanwhile, as it does for plain parameters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import is_tracing, local_of


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count one in-place write into each of them, and for a DTensor into its local tensor, too."""
    if is_tracing():  # a graph has its own way to know what it writes
        return
    found = [own for one in tensors for own in ((one, local_of(one)) if isinstance(one, DTensor) else (one,))]
    torch.autograd.graph.increment_version([one for one in found if not one.is_inference()])
