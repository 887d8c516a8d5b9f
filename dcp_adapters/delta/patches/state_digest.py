"""Make one value of a whole state, from sums of its parts, to which shards add their terms.

It is the digest of weight_sums.py over all that a delta restores: histories of delayed scales and entries of bytes
count, too. A state that has neither has the same digest there and here.
"""

from collections.abc import Mapping

import xxhash

from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.records.weight_sums import PartSum, tensor_digest, whole_digest


def state_digest(layout: StateLayout, sums: Mapping[str, int], blobs: Mapping[str, str]) -> str:
    """Digest a state: 32 hexadecimal digits.

    Args:
        layout: of the state.
        sums: key -> the byte sum of the whole part.
        blobs: name -> `blob_digest` of an entry of bytes.
    """
    digests = dict(blobs)
    for name, entry in layout.entries.items():
        digests[name] = tensor_digest(
            PartSum(part, dtype, shape, sums[entry.key(part)]) for part, (dtype, shape) in entry.parts().items()
        )
    return whole_digest(digests)


def blob_digest(data: bytes) -> str:
    """Digest one entry of bytes."""
    return xxhash.xxh3_128_hexdigest(data)
