"""Hugging Face directories: out of a run to an inference engine, and from one into a run.

The rooms, from the lowest to the highest:

    files/      the files of a directory, whatever their layout
    layouts/    the layouts, one file each: add one here
    models/     what a model calls its tensors, and what its files call them
    reading/    from a directory into a run: import_hf
    checking/   what engines would misread in a directory
    sources/    where an export takes tensors from
    exporting/  from a run into a directory: export_hf

The bytes of quantized weights stay the same, both ways.
"""
