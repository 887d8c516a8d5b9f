"""Quantized weights in Hugging Face directories: out of a run to an inference engine, and from one into a run.

layout.py      what a layout is: tables of tensors and JSON; compressed_tensors.py and modelopt.py are the two
names.py       what engines call things: which linears they fuse, how experts are spelled
sources.py     where an export takes tensors from: live shards, a state dict, a checkpoint
plan.py        which tensors go into which file, decided from names, shapes and formats alone
export.py      export_hf: agree, gather, write, publish
"""
