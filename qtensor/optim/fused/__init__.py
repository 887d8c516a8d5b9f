"""The fused step of MasterWeightOptimizer: masters, moments and parts in one pass over memory, on CUDA.

step.py        the fused step: what takes it, when it is launched
decision.py    which parameters take it, and why others do not: pure
tasks.py       what a parameter's step reads and writes, kept as long as its facts are the same
facts.py       these facts: all that can change between two steps
counts.py      how many steps each shard has taken
plan.py        the rows of the table and the launches: pure
table.py       the table of pointers
launches.py    launches of the kernels, which alone import Triton
kernel.py      the kernels
probe.py       a kernel proves itself on a device
trials.py      which kernels can be used, and why parameters take the general way
compressed/    the same for masters as remainders and moments in 8 bits
"""

FUSED_ON = frozenset({"cuda"})  # devices
