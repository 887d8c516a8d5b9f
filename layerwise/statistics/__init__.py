"""What reaches linears.

watching     sees which inputs are multiplied with which weights
collector    statistics of these inputs over all batches of all ranks
exact_sum    sums whose bits do not depend on order or ranks
"""
