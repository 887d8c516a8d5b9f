"""One run of a calibration.

plan               options, layers, targets and stages, decided before anything runs
agreement          checks that all ranks are about to do the same
run                goes through the stages, and resumes from a checkpoint
calibrate_stage    one stage, from gathered weights to quantized ones
outcome            what is kept of a stage: this rank's rows
events             what a run tells while it goes on
result             what `calibrate` returns
"""
