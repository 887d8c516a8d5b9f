"""What kernels written by hand are tried with, once on each device, before they run there (fsdp_hooks/kernels/probes).

numbers.py   values of all magnitudes and of none, and values beside ties
calls.py     calls of encode, decode and amax, for any recipe
turned.py    calls of what writes matrices the other way round

Nothing here names a format: values beside ties come from codes that are decoded, and how calls differ from what shares
a scale. A new format's kernels are tried without a line of its own.
"""
