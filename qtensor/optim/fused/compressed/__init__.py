"""The fused step on compressed states: parts, remainders and 8-bit moments in one pass over memory, on CUDA.

step.py        what takes it, when it is launched, and the general way beside it
decision.py    which weights take it, and why others do not: pure
tasks.py       what a weight's step reads and writes
table.py       a row of the table of pointers; places.py: the same, for kernels
launches.py    launches of the kernel, which alone import Triton
kernel.py      the kernels: which tiles a program takes, and how
careful.py     a tile's step for any numbers: the definition, operation by operation
usual.py       the same bytes with fewer instructions, for what numbers nearly always are
lattice.py     rounding onto lattices (qtensor/states/lattice.py)
draws.py       random bits (qtensor/states/draws.py)
probe.py       the kernel proves itself on a device
"""
