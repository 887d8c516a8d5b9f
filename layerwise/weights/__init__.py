"""Where weights live, and how a stage gets them and gives them back.

hold        gathers or moves the weights of a stage, and gives them back
on_disk     fills a stage on the meta device from safetensors
rounding    full weights rounded, and their values put in place, a few rows at a time
shards      a rank's own box of a calibrated weight
snapshot    whether somebody wrote into the weights of a stage
own_hooks   hooks that belong to the user of a model, and not to FSDP
without_fsdp  modules whose weights are held, without FSDP's hooks
whole       full tensors in place of pieces of tensor parallelism, and of weights that gathers quantize
"""
