"""Exact deltas: what changed between two states of the same tensors, byte for byte.

layout.py            which tensors a state has, and one numbering of all their units
state_digest.py      one value of a state, to which shards add their terms
encoder.py           changes in the order of the numbering to frames
patch.py             a delta: what it leads from and to, and its frames
patch_format.py      a delta as a file, and back
make.py              a delta from two sources
chain.py             deltas in a row; full versions every so often, and what may be removed
retention.py         the checkpoints of a run: what each is a delta to, and those that may go
stored_states.py     checkpoints, directories and tensors as sources; with deltas applied
shards.py            what a rank holds of a state dict
live.py              the version that a rank sent last, and what changed since
apply.py             live weights to a later version: all of it or nothing
"""
