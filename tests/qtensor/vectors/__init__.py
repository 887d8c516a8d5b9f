"""Who makes the vectors of qtensor/vectors, from docs/numerics.md alone: nothing here imports qtensor but the tests.

numbers.py   fp32, bf16 and the elements: rounded to nearest, to bits and back, in rational arithmetic
oracle.py    the formulas of the formats
cases.py     what is quantized: ties, turns of scales, limits, zeros, what is not finite, blocks that are cut
files.py     the recipes, and each one's file, byte for byte
__main__.py  python -m tests.qtensor.vectors write
"""
