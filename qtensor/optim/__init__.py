"""MasterWeightOptimizer: any torch optimizer on fp32 masters.

master_weights.py   the optimizer: what it steps, what its state dicts show and bring back
master_step.py      its step, from gradients to written shards
masters.py          the fp32 value behind each weight; master_states.py: in state dicts
inner_step.py       the step of the inner optimizer, chunk by chunk, on gradients in fp32
fused/              the step of AdamW, Adam and SGD on CUDA, with the parts' write, in one pass
matrices/           the step of Muon: each whole matrix is orthogonalized by one rank of those that hold its pieces
compressed/         masters as remainders and moments in 8 bits: a step on states that are expanded for it
step_agreement.py   what ranks agree on in a step, by one all-reduce
batches.py          many small weights, written at once
replicas.py         do replicas hold the same bytes?
optimizer_modes.py  inner optimizers with modes (train, eval)

In which order to read: masters.py (what there is), inner_step.py (what moves it), step_agreement.py (what ranks tell
each other), `_move` in master_step.py (a step, made of these three); then, for CUDA, fused/step.py,
fused/tasks.py and fused/decision.py; for masters and moments in less than fp32, compressed/states.py and
compressed/step.py. The rest stands beside: each is called from one place.
"""
