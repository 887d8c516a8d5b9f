"""Values to parts and back, at speed, and what can be said of them exactly.

kernels.py         encode and decode: the one door, whatever runs behind it
transposing.py     matrices the other way round, and both ways at once; triton_transposes.py: its kernels for GPUs
triton_kernels/    kernels written by hand for GPUs, with the same bytes
in_place.py        parts that a kernel writes where they are
tiles.py           tensors as kernels take them; ragged.py: rows that end within a block
exact.py           from recipe to recipe, exactly where the values allow it; fineness.py: whether they do
requantizing.py    do parts belong to the values beside them?
own_scales.py      is a scale the one that its values ask for?
graph_key.py       what tells compiled graphs apart
"""
