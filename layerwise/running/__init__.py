"""One run of a calibration.

plan               options, layers, targets and stages, decided before anything runs
run                goes through the stages, and resumes from a checkpoint
calibration        a run that quantizes
search             a run that measures formats
one_stage/         the work of one stage: calibrated, or measured in each format
outcome            what is kept of a stage: this rank's rows
kv_cache           the option for a key/value cache, and its scales
checkpoint_notes   what a checkpoint notes of stages, looked at before a run goes on from it
events             what a run tells while it goes on: events, a bar, a log
result             what `calibrate` returns

The life of a layer in a calibration, on every rank; an arrow marks what all ranks do together:

    recorded     the model runs on each batch, with stand-ins for its    inputs/recording/recorder.py
                 layers; what the layer is called with is kept. Two
                 runs mostly serve all layers
 -> gathered     FSDP's shards become full, plain weights, once for      weights/hold.py
                 all batches
    run          each rank runs the layer on its own batches, watches    one_stage/calibrate_stage.py: observe
                 its linears, and adds up statistics                     statistics/collector.py
 -> agreed       the ranks agree which linears share an input            statistics/collector.py: agree
 -> smoothed     factors for columns are found, and folded in;           folding/smoothing.py
                 only if the algorithm has them
 -> decided      statistics of a group of linears are summed up on one   one_stage/decide.py, statistics/statistics.py
                 rank, and this rank decides about the group             stages/sharing.py, algorithms/
 -> exchanged    each rank sends what it has rounded to all others       one_stage/exchange.py
    written      the quantized values replace the gathered weights; the  weights/rounding.py: put_values
                 batches run again if the next layer is to get outputs   one_stage/calibrate_stage.py
                 of the quantized layer
 -> sharded      FSDP takes the gathered weights back into its shards    weights/hold.py
    kept         of the full result each rank keeps the box of its own   outcome.py, weights/shards.py
                 shards, and puts it into these
 -> saved        every `save_every` layers these boxes become a DCP      run.py: _save, resume/checkpoints.py
                 checkpoint; a rename commits it

A layer that a checkpoint has is recorded, gathered and run to make the inputs of the next one, and nothing else; its
boxes are loaded (`restore_outcome` in outcome.py). run.py takes every layer through this, in the order of the model.
"""
