"""From a run into a directory that engines load.

quantizing.py      dense weights that become quantized on their way
config.py          the model's own description, which is exported with the weights
plan.py            which tensors go into which file, decided from names, shapes, formats and scales
outputs.py         what a plan consists of: the tensors that a tensor of the source becomes, and files of them
engine_scales.py   which scales engines share or divide by
expected.py        which names the files must have, and whether the plan has all of them and no other
prepare.py         from what a caller gives to a plan that all ranks share
groups.py          which tensors are gathered together
making.py          gathered tensors -> those that engines read; streams/ builds on these, too
export.py          export_hf: prepare, then write; writing.py writes and publishes
"""
