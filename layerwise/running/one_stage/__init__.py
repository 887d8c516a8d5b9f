"""The work of one stage, while its weights are gathered.

agreement.py        checks that all ranks are about to do the same
calibrate_stage.py  from gathered weights to quantized ones
decide.py           all decisions of a stage, shared by the ranks
exchange.py         quantized weights on their way from the rank that decided to all
errors.py           what each format would cost each linear, instead
"""
