"""Loading: target and checkpoint are compared, then payloads are read in place or converted.

planner.py       QuantizedLoadPlanner
compare.py       what keeps a checkpoint from being loaded into a target; placements.py: what no target may be
coverage.py      the stored chunks make up what is read
convert.py       one tensor from recipe to recipe; conversions.py: all those of a load
"""
