"""Which format each weight gets: a decision over plain records; nothing here runs a model.

candidates     what could be done with each group of weights: the bits it takes and the error it makes
solver         picks one candidate for each group: least error within a number of bits
assignment     the result by name of weight: what `calibrate` takes in place of one recipe
"""
