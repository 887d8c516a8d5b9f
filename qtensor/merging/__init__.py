"""Updates (trained adapters, say) merged into quantized weights.

merge.py           merge_: which weights get an update, and what ranks exchange about them
weight_merge.py    one of these weights, on one rank
low_rank.py        an update of low rank, and the piece that one rank needs
merge_report.py    what was lost to rounding
written_memory.py  can this parameter be written in place?
"""
