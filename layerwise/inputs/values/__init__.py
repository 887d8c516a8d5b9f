"""Calls and the values in them.

batches.py    the batches of a rank, each kept as it was when it came
calls.py      one recorded call, and where each of its arguments comes from
ambient.py    what the parent switches on around a call
caches.py     sets key/value caches back before every call
stand_ins.py  what takes the layers' places while a call is recorded
stores.py     where tensors wait: device, CPU or disk
structure.py  takes values apart into leaves, and puts them together
contents.py   hashes of objects
"""
