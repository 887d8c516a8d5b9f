"""The tensor: a wrapper of the logical shape around its parts.

quantized_tensor.py  QuantizedTensor and quantize
contents.py          its parts, read and written
moves.py             to another device
pickling.py          into a file and back; old_paths.py: the names that older files use
made_anew.py         parameters that others build anew by their class
"""
