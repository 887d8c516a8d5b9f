"""The fused step of MasterWeightOptimizer: masters, moments and parts in one pass over memory, on CUDA.

step.py        the fused step: what takes it, when it is launched
decision.py    which parameters take it, and why others do not: pure
shards.py      the facts of a parameter's tensors
counts.py      how many steps each shard has taken
plan.py        the rows of the table and the launches: pure
table.py       the table of pointers
launches.py    launches of the kernels, which alone import Triton
kernel.py      the kernels
"""

from collections.abc import Iterable

from torch import Tensor

from qtensor.numerics.triton_kernels import available

FUSED_ON = {"cuda"}


def applies(masters: Iterable[Tensor]) -> bool:
    """Return whether some of these masters could take it: Triton is there, and they are where it runs."""
    first = next(iter(masters), None)
    return first is not None and first.device.type in FUSED_ON and available()
