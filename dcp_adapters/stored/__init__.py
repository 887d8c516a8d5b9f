"""A checkpoint on disk: opened as logical tensors, verified, written durably.

checkpoint.py        the tensors of a checkpoint, read one at a time
inspect.py           what is in a checkpoint or a Hugging Face directory: names, recipes, sizes
read_manifest.py     what it says about its quantized tensors
verify.py            is it what was saved? every chunk is read once; findings are collected, not raised
file_check.py        are the data files there, long enough, and shared by no two chunks?
manifest_faults.py   does the manifest fit what is stored?
deep.py              what the tensors mean: payload, scale, history and master of one step?
saves.py             the newest save of a directory that verifies; removing older ones
removal.py           which saves may go, in which order, and how
findings.py          findings and counts
part_values.py       values of scales and payloads that no healthy weight has
numeric_error.py     how far one tensor's values are from another's
digest_check.py      are the recorded digests those of the tensors?
reading/             metadata and chunks, without executing anything in them
"""
