"""One short value for all weights, wherever they are: on ranks, in a checkpoint, in a directory, in an engine.

shares.py     what this rank holds of each tensor of a live model, as pieces
summing.py    one all-reduce of all sums, with proof that the ranks mean the same tensors
stored.py     sums of a checkpoint or a directory, one chunk at a time
received.py   tensors that an engine or a stream received, read as a directory
engine.py     the names of an engine's tensors: joined linears cut apart
digest.py     digest, tensor_digests

Look-alikes: a checksum tells whether a file is damaged (records/checksums.py); a digest, of these modules, whether two
places hold the same weights; fsdp_hooks/kernels/digest.py whether somebody wrote to a tensor in memory.

What the digests are made of is in dcp_adapters/records/weight_sums.py.
"""
