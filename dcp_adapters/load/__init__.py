"""Loading: target and checkpoint are compared, then payloads are read in place or converted.

The life of a load, in the order in which files here are entered:

    state dict   every rank        planner.py          flattened
    compared     every rank        fitting.py          is what is stored right for it? All that can be asked before a
                                                       file is opened, once, in one order; see there for the files
    plan         every rank        read_items.py       what is read into the live parts, and into buffers of conversions
    agreed       the coordinator   together.py         what all ranks have between them; do their conversions fit?
    files looked every rank        stored/reading/     one byte from the end of each file, then what each chunk says it
                                                       holds; nothing has been written until here
    read         every rank        planner.py          straight into the parts; chunks of a delta are rebuilt before
    converted    every rank        all_conversions.py  each when its last piece is there, shared scales agreed on
    checked      every rank        one_memory.py       targets on one memory hold what was read for each of them

planner.py          QuantizedLoadPlanner
fitting.py          is what is stored right for this target?
compare.py          what keeps a checkpoint from being loaded into a target
state_forms.py      optimizer states in another form than the target's
live_parts.py       what is written in place
read_items.py       what is read into it
coverage.py         do the chunks that are read make up what is written?
together.py         what all ranks have between them: stages of a pipeline, experts
one_memory.py       targets that lie on each other's memory, as tied weights do
unpickling.py       entries of bytes, by torch's safe unpickler
conversion.py       the conversion of one tensor while it is loaded
all_conversions.py  those of one load together, and their agreement on shared scales
"""
