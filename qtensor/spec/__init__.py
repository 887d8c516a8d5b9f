"""What a format is; no tensor is computed here.

recipes.py    frozen values that say how a tensor is quantized
format.py     a format: its parts, and the functions from dense values to parts and back
registry.py   which formats there are, and what follows from the parts of each
blocks.py     arithmetic that formats share: amaxes of blocks, powers of two
codecs/       elements: rounding to E4M3, E5M2, E2M1, and how they are packed
lens.py       how a view looks at the parts of a tensor
selection.py  modules chosen by name
"""
