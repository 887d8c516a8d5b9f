"""From a directory into a run.

schemes.py             which of its linears are quantized, and how
as_checkpoint.py       the directory as a DCP checkpoint; placed.py: which slice of which tensor a chunk of it is
reader.py              through which stock DCP loads it
importing.py           import_hf: compare, materialise (materialise.py: what is on meta), load
passed_over.py         what an import leaves out
handed_over.py         quantized weights made of tensors that transformers' loader reads
delayed.py             a delayed scale's history, made from one scale
stored_directory.py    the directory as the commands see it; verify_directory.py: is it sound?
"""
