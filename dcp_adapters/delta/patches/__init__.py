"""A delta: what it leads from and to, and its file.

layout.py        which tensors a state has, and one numbering of all their units
state_digest.py  one value of a state, to which shards add their terms
encoder.py       changes in the order of the numbering to frames
patch.py         a delta: its two states, and its frames
patch_format.py  a delta as a file, and back
"""
