"""A checkpoint on disk: opened as the tensors it means, verified, written durably.

checkpoint.py        the tensors of a checkpoint, read one at a time
inspect.py           what is in it: names, recipes, sizes
read_manifest.py     what it says about its quantized tensors
verify.py            is it what was saved? every chunk is read once; findings are collected, not thrown
findings.py          findings and counts
part_values.py       could a quantizer have written these scales and payloads?
errors.py            how far values are from those that are right
durable.py           files that survive a loss of power
progress.py          the bar of a long command
"""
