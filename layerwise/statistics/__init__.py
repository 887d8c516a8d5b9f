"""What reaches linears.

watching     sees which inputs are multiplied with which weights
accumulated  statistics of one input in a batch, and of a group's inputs over this rank's batches
key_values   the largest keys and values that come to caches
expert_calls what a block of experts is called with, and what sends tokens to one of its experts
every_token  sends every token of a block to each of its experts, for statistics alone
collector    collects these for all groups of a layer
statistics   the groups that all ranks have together, and their totals over all ranks, one at a time
unquantized_inputs  the inputs of one batch in the unquantized model, beside those in the quantized one
lineage      which row of one tensor stands for the same token as which row of another
exact_sum    sums whose bits do not depend on order or ranks
"""
