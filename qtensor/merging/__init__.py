"""Updates (trained adapters, say) merged into quantized weights.

merge.py           merge_: which weights get an update, and what ranks exchange about them
weight_merge.py    one of these weights, on one rank
low_rank.py        an update of low rank, and the piece that one rank needs
merge_report.py    what was lost to rounding
through_merge.py   a linear layer that computes with the merged weight, so that adapters train through their merge
merged_parts.py    the bytes of that weight, and what partners that share its scale have together
merge_aware.py     the switch that makes layers of peft do so
followers.py       linears that share their scale with adapted ones
mergeable.py       which layers of peft can, and why others can not
written_memory.py  can this parameter be written in place?
"""
