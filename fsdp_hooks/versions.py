"""Version counters: writes that torch does not notice are counted by hand.

torch counts in-place operations on a tensor. If a saved tensor has another count in backward than in forward, backward
raises ("modified by an inplace operation") instead of computing with the new values. Only operations on a wrapper raise
the wrapper's count; writes into its parts do not, and neither do `_foreach_` operations, which torch hands over
uncounted. So code that writes parts otherwise calls `count_writes`.

Refills of what FSDP2 gathered do not count as writes: backward gathers the weights of its forward again into the same
tensors, and FSDP2 keeps the counts unchanged meanwhile, as it does for plain parameters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import is_tracing, local_of, without_torch_function


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count one in-place write into each tensor, and for a DTensor also into its local tensor."""
    if is_tracing():  # a graph tracks its writes in its own way
        return
    # autograd may have saved either, the DTensor or its local tensor
    found = [own for one in tensors for own in ((one, local_of(one)) if isinstance(one, DTensor) else (one,))]
    with without_torch_function():  # which asking a tensor of parts would go through
        torch.autograd.graph.increment_version([one for one in found if not one.is_inference()])
