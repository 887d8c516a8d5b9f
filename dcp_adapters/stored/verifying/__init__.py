"""Is a checkpoint what was saved? Every chunk is read once; findings are collected, not raised.

verify.py           all that is asked, in its order
findings.py         findings and counts
file_check.py       are the data files there, long enough, and shared by no two chunks?
manifest_faults.py  does the manifest fit what is stored?
digest_check.py     are the recorded digests those of the tensors?
deep.py             what the tensors mean: payload, scale, history and master of one step?
"""
