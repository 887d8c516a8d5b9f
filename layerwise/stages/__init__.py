"""Which parts of a model are calibrated together.

layers     the modules that are calibrated one after another
targets    the weights to quantize in them
stage      what is held at once (a layer, or all that is outside of them), and the method for all stages
"""
