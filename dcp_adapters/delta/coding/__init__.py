"""Code what changed between two equal-shaped tensors, byte for byte, as few bytes.

damage.py     the error of bytes that are not what was written
zstd.py       the compression library, and what to do if it is not installed
changes.py    two tensors, or two shards, to positions and steps, and back
codec.py      a run of changes as compressed bytes
chunk.py      a stored chunk as what changed since an older version of it
"""
