"""Scales that reach beyond a shard or a tensor.

agreement.py           what a shard claims of such scales, and how it takes what was agreed on
cut_blocks.py          square blocks that a shard boundary cuts
shared_scales.py       weights under one scale: share_scales
high_precision.py      shards that stay dense until they are gathered: storage="high_precision";
high_precision_ops.py  and what operations mean to them

The story of scales, told here once. Quantizing makes a scale from the largest magnitude under it (its amax). A rank
holds a piece of a weight, so it does not see all that is under some scales:

    the scale of            is shared by                                            where
    a block along K         nobody: cuts along K fall between blocks
    a row                   the ranks that hold pieces of the row                   tensor parallelism cuts K
    a square block          the ranks that hold pieces of the block                 a boundary runs through it
    a tensor                all ranks that hold a piece of the weight               anything cuts the weight
    several weights         those weights, on all their ranks                       share_scales says so

Bytes that do not depend on the number of ranks need one value for each of these. It is found in three stages:

    1. claim    each shard lays the amaxes it sees end to end             agreement.py, cut_blocks.py
                (many small shards at once: optim/batches.py)
    2. agree    the maximum of all claims, by one all-reduce a group      fsdp_hooks/scale_sync.py: over which ranks
                for the whole model                                       fsdp_hooks/ranks/exchange.py: the message, and
                                                                          the proof that all ranks mean the same weights
                then the maximum over weights that share one scale,       fsdp_hooks/ranks/scale_partners.py
                of numbers that are there already
    3. write    the values are quantized under what was agreed on         tensor/contents.py, optim/batches.py
                bytes alone move onto the largest scale                   agreement.py: QuantizedScales.adopt
                a dense shard notes it for its gathers                    high_precision.py

Who begins it: a step (optim/step_agreement.py, which asks in the same message whose masters moved), `sync_scales` and
the building of a MasterWeightOptimizer (fsdp_hooks/scale_sync.py), a load of dense values (model/loading.py) and a
merge (merging/merge.py). One rank alone, whose weights share no scale, skips stages 1 and 2.

Afterwards two questions can be asked of any piece of a weight, without the other ranks: is a scale the one that its
values ask for (numerics/own_scales.py), and do the bytes follow from the master (numerics/requantizing.py)?
"""
