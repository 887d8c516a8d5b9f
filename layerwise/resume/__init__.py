"""The identity of a run, and its state on disk, from which any number of ranks can continue.

fingerprint     what decides the outcome of a run, to compare with that of a checkpoint
weight_sums     digests of weights, the same for every sharding
checkpoints     the checkpoint directory: open, save and load windows, mark as finished
progress        progress.json, the record of what is done: a run goes on from its `next_layer` (running/run.py: _resume)
window_files    one window of layers on disk
"""
