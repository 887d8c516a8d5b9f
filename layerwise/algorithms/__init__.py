"""Algorithms: from the statistics of inputs to the scales and values of weights.

algorithm       the interface: an `Algorithm`, what it gets (`Group`, `Inputs`) and what it returns (`Decision`)
maximum, mse, local_hessian, smoothquant, awq, gptq, gptaq, qronos     one algorithm each
paired          what GPTAQ and Qronos share: weights that aim at outputs of the unquantized model
search          finds the best scales among the quantizers that candidates lists (Mse, LocalHessian)
clipping        finds the best fraction of each amax (AWQ)
columns         the columns of a group's weights, as GPTQ rounds them
descent         rounds them again, one after the other
arithmetic      full fp32 products, and one thread on CPU
"""
