"""What layers are called with: recorded from the parent, replayed batch by batch.

batches           the batches of a rank, each kept as it was when it came
recorder          what each layer is called with, for every batch
parent_run        one run of the parent for one batch, which records calls
batch_progress    what all of these runs have shown of a batch
stand_ins         what takes the layers' places in that run
taints            tensors that only the layers themselves would have filled
filled_containers containers that the parent finds filled as by its layers
ambient           what the parent switches on around a call
calls             one recorded call, and where each of its arguments comes from
shared_objects    refuses objects that change while several batches share them
caches            sets key/value caches back before every call
replay            runs a stage on one batch after the other
rehearsal         looks, before anything is changed, for what cannot be replayed
collectives       refuses layers that would wait for other ranks
hooks             calls a layer without FSDP's hooks
stores            where tensors wait: device, CPU or disk
structure         takes values apart into leaves, and puts them together
contents          hashes of objects
"""
