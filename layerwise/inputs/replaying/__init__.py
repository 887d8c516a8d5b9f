"""A stage run on one batch after the other.

replay.py       runs it
rehearsal.py    looks, before anything is changed, for what cannot be replayed
collectives.py  refuses layers that would wait for other ranks
hooks.py        calls a layer without FSDP's hooks
evaluating.py   puts a model into eval mode, and back
"""
