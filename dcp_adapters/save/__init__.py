"""Saving: each rank's plan, the coordinator's part, and the order in which files are written.

planner.py         QuantizedSavePlanner
write_items.py     where each part's chunk lies
coordinator.py     what ranks tell the coordinator: agreement, and the manifest
item_sums.py       digest=True: the digests in the manifest
refusals.py        names that are taken, tensors without bytes
unsound.py         verify="deep": weights that their masters or histories contradict are refused
since_base.py      delta_to=...: what changed since a full save
plan_cache.py      plans that one save keeps for the next
overwrite.py       a save over an older checkpoint
atomic_writer.py   AtomicFileSystemWriter, whose commit is one rename
data_files.py      the files that it writes
archives.py        what torch.save writes of a tensor, without torch.save
"""
