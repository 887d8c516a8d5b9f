"""A checkpoint on disk into another format.

convert_checkpoint.py  one tensor at a time, without a model
conversion_outcome.py  which tensors were rounded, and by how much
"""
