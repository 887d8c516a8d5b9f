"""How tensors made of parts travel through FSDP2: all-gather hooks, agreement on scales, unsharding one module.

This package knows parts, not formats. It is the lowest of the packages and imports only torch.

    torch_private.py  what torch does not promise and this package relies on
    versions.py       version counters of writes that torch does not notice
    devices.py        is it the same device?
    wrappers.py       the names that a model itself gives, whatever is wrapped around it
    writable.py       can a tensor be written in place?
    lazy_bits.py      tensors whose memory holds other values than their own (conjugates, negatives)
    release.py        the version of the four packages
    ranks/            what ranks say to each other: errors, maxima, whole tensors
    kernels/          bytes at speed: compiled functions, digests, sums

    all_gather.py     the hooks that FSDP2 calls on a shard
    row_pieces.py     the same for shards with some rows of every matrix of a stack
    until_reshard.py  what is made of a gathered weight once, and freed with it
    scale_sync.py     shards that share a scale agree on it: sync_scales
    unshard.py        one module's parameters, whole, during a `with` block: unsharded

The life of a weight, from its building to its step, is drawn in qtensor/__init__.py.

Words: docs/glossary.md.
"""

from fsdp_hooks.scale_sync import sync_scales
from fsdp_hooks.unshard import unsharded

__all__ = ["sync_scales", "unsharded"]
