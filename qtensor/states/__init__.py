"""Compressed states of training: what numbers an optimizer keeps in two bytes or one, and how they are rounded.

    master      = what the weight's own bytes say + a remainder of 16 bits           remainders.py
    moments     = E4M3 elements in blocks of 32 (MXFP8), the second as its root      moments.py

kinds.py        which optimizers step how, and what their states are called
draws.py        random bits of (seed, weight, step, global position), the same for every sharding
lattice.py      the numbers that remainders and moments can hold; rounding onto them
remainders.py   fp32 masters <-> parts and remainders, for quantized and for bf16 weights
moments.py      fp32 moments <-> MXFP8 parts

All of it is elementwise, or by blocks along rows, so that every sharding gives the same bytes. Rounding is stochastic:
a step smaller than half the distance of two numbers would otherwise be lost, again and again.
"""
