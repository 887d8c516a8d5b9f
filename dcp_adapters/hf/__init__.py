"""Quantized weights in Hugging Face directories: out of a run to an inference engine, and from one into a run.

    layout.py      what a layout is: tables of tensors and JSON; compressed_tensors.py and modelopt.py are the two
    names.py       what engines call things: which linears they fuse, how experts are spelled
    sources.py     where an export takes tensors from: live shards, a state dict, a checkpoint
    prefixes.py    under which keys of these the weights are
    plan.py        which tensors go into which file, decided from names, shapes and formats alone
    shared_scales.py   which scales engines share or divide by
    config.py      the model's own description, which goes along
    export.py      export_hf: agree, then write; writing.py gathers, writes and publishes

    directory.py   what is in a directory: JSON and headers, held beside each other
    schemes.py     which of its linears are quantized, and how; claims.py: what its JSON says of that
    entries.py     the directory as a DCP checkpoint: entries, chunks, slices; delayed.py: a delayed scale's history
    reader.py      HuggingFaceReader, through which stock DCP loads it
    importing.py   import_hf: compare, materialise (materialise.py), load

The stored bytes are those of the weights, both ways.
"""
