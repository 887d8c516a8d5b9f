"""Saving: the plan of each rank, the coordinator's part, and what is written to disk in which order.

planner.py         QuantizedSavePlanner
write_items.py     where each part's chunk lies
coordinator.py     the global plan: duplicates, manifest, table of checksums
plan_cache.py      what one save leaves to the next
overwrite.py       a save over an older checkpoint
atomic_writer.py   AtomicFileSystemWriter
"""
