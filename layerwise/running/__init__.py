"""A run: planned, agreed on by all ranks, taken through its stages; what it tells on the way, and what it comes to."""
