"""A checkpoint on disk: opened as logical tensors, verified, removed.

checkpoint.py        the tensors of a checkpoint, read one at a time
inspect.py           what is in a checkpoint or a Hugging Face directory: names, recipes, sizes
read_manifest.py     what it says about its quantized tensors
saves.py             the newest save of a directory that verifies; removing older ones
removal.py           which saves may go, in which order, and how
part_values.py       values of scales and payloads that no healthy weight has
numeric_error.py     how far one tensor's values are from another's
kept.py              how well each quantized tensor is kept
verifying/           is it what was saved? every chunk is read once; findings are collected, not raised
reading/             metadata and chunks, without executing anything in them
"""
