"""Column factors: where in a stage they can go, and folding them there.

probing          which modules of a layer can take factors, found by running it with changed weights
where_to_fold    the same for a stage, agreed on by all ranks
folds            folds factors, transforms the statistics, verifies the outputs
smoothing        all of it for one stage, with the factors that the algorithm gives
"""
