"""Where an export takes tensors from.

sources.py      a checkpoint on disk, a directory of dense weights, or several sources as one
live_source.py  a state dict, and the shards in it
"""
