"""Muon on sharded matrices: momentum and update stay with the shards, a whole matrix is orthogonalized by one rank.

    each rank    momentum of its piece -> update before it is orthogonalized, bf16      arithmetic.py
    exchange     pieces -> the matrix's owner                                           exchange.py
    owner        torch.optim.Muon on the whole matrix -> orthogonal matrix, bf16        arithmetic.py
    exchange     its pieces -> the ranks that hold them
    each rank    master of its piece moves

pieces.py      which piece of a matrix each rank holds
plan.py        which matrices travel together, who owns which, what is sent to whom; pure
exchange.py    does what a plan says, by one all-to-all for each mesh dim that cuts, there and back
arithmetic.py  what torch.optim.Muon computes, split where the matrix has to be whole
step.py        a step: ranks agree which matrices take part, then all of the above

All but the orthogonalization is elementwise, and torch's own is run on the matrix that one process would have, of the
same shape, dtype and strides. So the bytes are those of one process on every mesh.

Nothing of it is imported, and no call comes here, unless the optimizer is Muon.
"""
