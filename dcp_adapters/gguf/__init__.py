"""Quantized weights as one GGUF file, which llama.cpp runs: the codes and block scales are the bytes of the source.

    library.py         the package `gguf`, which reads and writes the container
    blocks.py          MXFP4 and NVFP4 as ggml's blocks: the same bytes in another order
    architectures.py   which tensor of a model is which of a file, and the order of its rows
    like.py            what an existing file of the same model tells: metadata, shapes, numbers of heads
    plan.py            the tensors of the file; all that cannot be exported is found here
    export.py          export_gguf
    checking.py        what is in a file, by whatever tool, and how far from the dense tensors: the command `check`

It is built on hf/: sources, the plan of linears and scales, and the groups of tensors are those of export_hf.
"""
