"""Exact deltas: what changed between two states of the same tensors, byte for byte.

damage.py            the error of a delta that is not what was written
zstd.py              the compression library, and what to do where it is not installed
changes.py           two equal-shaped tensors, or two shards, to positions and steps, and back
layout.py            which tensors a state has, and one numbering of all their units
state_digest.py      one value of a state, to which shards add their terms
codec.py             a run of changes as compressed bytes
encoder.py           changes in the order of the numbering to frames
patch.py             a delta: what it leads from and to, and its frames
patch_format.py      a delta as a file, and back
make.py              a delta from two sources
chain.py             deltas in a row; full versions every so often, and what may be removed
stored_states.py     checkpoints, directories and tensors as sources; with deltas applied
shards.py            what a rank holds of a state dict
live.py              the version that a rank sent last, and what changed since
apply.py             live weights to a later version: all of it or nothing
"""
