"""Vectors to test kernels against: hard inputs, and the bytes and values that each recipe makes of them.

    README.md                what is in a file, and a reader of ten lines
    <recipe>.safetensors     one for each recipe

Nothing here is code: `importlib.resources.files("qtensor.vectors")` is the folder, and it may be copied anywhere. An
oracle in rational arithmetic that shares no code with this package writes the files, tests/qtensor/vectors.
"""
