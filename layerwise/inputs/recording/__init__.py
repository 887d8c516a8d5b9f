"""What each layer is called with.

recorder.py           for every batch
parent_run.py         one run of the parent for one batch, which records calls
batch_progress.py     what all of these runs have shown of a batch
taints.py             tensors that only the layers themselves would have filled
filled_containers.py  containers that the parent finds filled as by its layers
shared_objects.py     refuses objects that change while several batches share them
refusals.py           what else cannot be recorded, and why
"""
