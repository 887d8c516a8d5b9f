"""Mathematics that several algorithms share.

candidates.py  quantizers to choose from
search.py      finds the best scales among them (Mse, LocalHessian)
clipping.py    finds the best fraction of each amax (AWQ)
columns.py     the columns of a group's weights, as GPTQ rounds them
descent.py     rounds them again, one after the other
paired.py      weights that aim at outputs of the unquantized model (GPTAQ, Qronos)
arithmetic.py  full fp32 products, and one thread on CPU
"""
