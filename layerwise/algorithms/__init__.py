"""Algorithms: from the statistics of inputs to the scales and values of weights.

    algorithm.py  the interface: an `Algorithm`, what it gets (`Group`, `Inputs`) and what it returns (`Decision`)
    solvers/      mathematics that several algorithms share

One algorithm each (add one here):

    maximum.py  mse.py  local_hessian.py  smoothquant.py  awq.py  gptq.py  gptaq.py  qronos.py
    (paired.py: what GPTAQ and Qronos add to GPTQ, weights that aim at outputs of the unquantized model)
"""
