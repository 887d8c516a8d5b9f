"""Scales that reach beyond a shard or a tensor.

agreement.py           what a shard brings to an agreement, and how it takes the outcome
cut_blocks.py          square blocks that a shard boundary cuts
shared_scales.py       weights under one scale: share_scales
high_precision.py      shards that stay dense until they are gathered: storage="high_precision";
high_precision_ops.py  and what operations mean to them
"""
