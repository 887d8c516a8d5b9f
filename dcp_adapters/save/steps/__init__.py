"""The options that a save may have, a step each; one that is off is not in the list.

In the order in which they run:

step.py            what a step may do, at which stage
item_sums.py       digest=True: the digests in the manifest
since_base.py      delta_to=...: what changed since a full save
unsound.py         verify="deep": weights that their masters or histories contradict are refused
checksum_table.py  checksums=True: a digest of every chunk, made as it is written
overwrite.py       a save over an older checkpoint
plan_cache.py      enable_plan_caching=True: plans that one save keeps for the next
coordinator.py     what ranks tell the coordinator, for all of them: agreement, and the manifest
"""
