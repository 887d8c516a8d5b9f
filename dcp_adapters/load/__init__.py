"""Loading: target and checkpoint are compared, then payloads are read in place or converted.

planner.py          QuantizedLoadPlanner
compare.py          what keeps a checkpoint from being loaded into a target; placements.py: placements DCP cannot load
together.py         what all ranks have between them: stages of a pipeline, experts
coverage.py         do the chunks that are read make up what is written?
one_memory.py       targets that lie on each other's memory, as tied weights do
unpickling.py       entries of bytes, by torch's safe unpickler
conversion.py       the conversion of one tensor while it is loaded
all_conversions.py  those of one load together, and their agreement on shared scales
"""
