"""Quantized weights in Hugging Face directories: out of a run to an inference engine, and from one into a run.

    layout.py            what a layout is: tables of tensors and JSON; compressed_tensors.py, modelopt.py, fp8.py and
                         gpt_oss.py are the four
    names.py             what engines call things: which linears they fuse, how experts are named (experts.py: which
                         linears a weight of all experts becomes)
    file_names.py        names in memory and names in the files, which transformers may change
    architectures.py     the model that a config names, on the meta device, and how transformers reads files into it

    sources.py           where an export takes tensors from: a state dict and shards (live_source.py), a checkpoint, a
                         dense directory
    prefixes.py          under which keys of a nested state dict the weights are; adapters.py: adapters beside them
    plan.py              which tensors go into which file, decided from names, shapes, formats and scales
    expected.py          which names the files must have, and whether the plan has all of them and no other
    shared_scales.py     which scales engines share or divide by
    config.py            the model's own description, which is exported with the weights (config_sections.py)
    kept_dtypes.py       which tensors a change of dtype leaves as they are
    quantizing.py        dense weights that become quantized on their way
    prepare.py           from what a caller gives to a plan that all ranks share
    groups.py            which tensors are gathered together
    making.py            gathered tensors -> those that engines read; streams/ builds on these, too
    export.py            export_hf: prepare, then write; writing.py writes and publishes

    directory.py         what is in a directory: its JSON and headers, which must agree; header.py: of one file,
                         file_digests.py: what a file says of its bytes
    schemes.py           which of its linears are quantized, and how; claims.py, plain_claims.py: what its JSON says of
                         that (patterns.py: its expressions), recorded.py: what our exports say besides; rotations.py:
                         which inputs it says are rotated
    as_checkpoint.py     the directory as a DCP checkpoint: entries, chunks; delayed.py: a delayed scale's history
    reader.py            HuggingFaceReader, through which stock DCP loads it
    importing.py         import_hf: compare, materialise (materialise.py), load; passed_over.py: what it leaves out
    wanted_names.py      whose names a target has: the model's, or those of a part or a holder of it

    stored_directory.py  the directory as the commands see it: whole tensors, one at a time
    verify_directory.py  is a directory sound?

The bytes of quantized weights stay the same, both ways.
"""
