"""Bytes at speed.

compiled.py       pure functions that run eagerly or compiled, with the same bytes
probes.py         code written by hand proves itself on a device
replays.py        calls that do the same again, on GPUs
digest.py         whether anybody wrote to a tensor, without a copy to compare with
digest_triton.py  the same for all tensors of a GPU, by one launch
byte_sums.py      sums that add up over the pieces of a tensor
"""
