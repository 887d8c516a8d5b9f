"""One run of a calibration.

plan               options, layers, targets and stages, decided before anything runs
agreement          checks that all ranks are about to do the same
run                goes through the stages, and resumes from a checkpoint
calibration        a run that quantizes
search             a run that measures formats
errors             what each format would cost each linear of a stage
calibrate_stage    one stage, from gathered weights to quantized ones
decide             all decisions of a stage, shared by the ranks
exchange           quantized weights on their way from the rank that decided to all
outcome            what is kept of a stage: this rank's rows
kv_cache           the option for a key/value cache, and its scales
notes              what a checkpoint notes of stages, looked at before a run goes on from it
events             what a run tells while it goes on
result             what `calibrate` returns
"""
