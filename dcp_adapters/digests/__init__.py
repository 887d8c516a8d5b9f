"""One short value for all weights, wherever they are: on ranks, in a checkpoint, in a directory, in an engine.

shares.py     what this rank holds of each tensor of a live model, as pieces
summing.py    one all-reduce of all sums, with proof that the ranks mean the same tensors
stored.py     sums of a checkpoint or a directory, one chunk at a time
received.py   tensors that an engine or a stream received, read as a directory
engine.py     the names of an engine's tensors: joined linears cut apart
digest.py     digest, tensor_digests

What the digests are made of is in dcp_adapters/format/weight_sums.py.
"""
