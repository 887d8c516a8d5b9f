"""Rotations: other weights, the same function, and values that low-precision blocks hold better.

hadamard    the product of a weight with blocks of Hadamard matrices
tracing     what reaches the modules of a model on one batch
online      linears whose inputs are rotated at run time, by globs
choice      options, and the modules that they name
plan        which dims of which weights are rotated; what does not fit is refused
proof       that the model is one whose function the plan does not change, by signs alone
written     which parameters of a model a rotation has changed, for the results of a calibration
"""
