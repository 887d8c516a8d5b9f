"""What a model calls its tensors, and what its files call them.

architectures.py  the model that a config names, on the meta device, and how transformers reads files into it
file_names.py     names in memory and names in the files, both ways
wanted_names.py   whose names a target has: the model's, or those of a part or a holder of it
prefixes.py       under which keys of a nested state dict the weights are
adapters.py       adapters of peft beside them
kept_dtypes.py    which tensors a change of dtype leaves as they are
"""
