"""Which parts of a model are calibrated together.

layers      the modules that are calibrated one after another
targets     the weights to quantize in them
attentions  the modules that write keys and values into caches
experts     the modules that share tokens out among experts
stage       what is held at once (a layer, or all that is outside of them), and the method for all stages
cuts        which mesh dims cut weights beside FSDP: of tensor parallelism, or of expert parallelism
tensor_parallel  which ranks cut weights between them, and share batches; their hooks
caller      which function was called, for messages
sharing     which rank decides about which group of a stage
"""
