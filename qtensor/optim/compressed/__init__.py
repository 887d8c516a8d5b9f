"""MasterWeightOptimizer with compressed states: masters as remainders, moments in 8 or 16 bits (qtensor/states).

And with states in host memory, compressed or not.

storage.py   what is asked for, and what it is refused for
places.py    where the rows of a shard are in the whole tensor: what its draws are counted by
entries.py   the inner optimizer's states <-> what is kept of them between steps
masters.py   fp32 masters <-> what is kept of them between steps: a remainder beside the weight's bytes
expected.py  states shown in the form of a checkpoint that is to be loaded
stacks.py    many small weights that step as one, with the bytes of each by itself
states.py    what is kept, of one optimizer
guests.py    weights that are expanded, and the inner optimizer's groups with these alone
step.py      a step: chunks of weights are expanded, stepped by the inner optimizer, compressed and written
muon.py      a step of Muon, whose matrices other ranks may hold pieces of
host.py      states in host memory, of which a step has copies on the device
streaming.py in which order chunks are copied there, computed on and copied back

On CUDA, ../fused/compressed steps what it can of them in one pass, and leaves the rest to step.py.

Nothing of it is imported, and no call comes here, unless it was asked for.
"""
