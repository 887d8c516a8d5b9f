"""What ranks say to each other.

across_ranks.py    steps that may fail on some ranks only, so that all go on or all raise
waiting.py         a rank that waits long says for whom
scale_partners.py  which weights share a scale
exchange.py        maxima over a group, with proof that all ranks mean the same values
gathering.py       whole tensors out of their shards, many in one collective
"""
