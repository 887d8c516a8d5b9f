"""What `verify` makes of the digests that a manifest records: sums of chunks as they are read, then a comparison."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import MANIFEST, Manifest
from dcp_adapters.records.weight_sums import PartSum, digested_parts, tensor_digest
from dcp_adapters.stored.reading.metadata_checks import METADATA, Fault
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums

OWN = frozenset({MANIFEST, CHECKSUMS})  # of these no digest is made


class DigestCheck:
    """The sums of one run.

    Args:
        records: of all entries, by name.
    """

    def __init__(self, records: Mapping[str, Any]) -> None:
        self.records, self.manifest = records, Manifest()
        self.read: dict[str, tuple[int, int]] = {}  # entry -> (sum of the bytes, elements) of the chunks read so far

    def see(self, index: MetadataIndex, data: Tensor) -> None:
        """Take a sound chunk of a tensor into account, if the manifest has digests."""
        if self.manifest.digests:
            total, counted = self.read.get(index.fqn, (0, 0))
            piece = TensorPiece(data, tuple(self.records[index.fqn].size), tuple(index.offset or ()))
            self.read[index.fqn] = total + int(byte_sums([piece])[0]), counted + data.numel()

    def faults(self) -> Iterator[Fault]:
        """Yield the tensors that have another digest; one that was not read whole is reported elsewhere."""
        for name, expected in self.manifest.digests.items():
            entry = self.manifest.tensors.get(name) or self._dense_entry(name)
            if entry is None:
                yield Fault(METADATA, name, f"{MANIFEST} has a digest of it, and no such tensor is stored")
                continue
            sums = []
            for part, (dtype, shape) in digested_parts(entry).items():
                total, counted = self.read.get(entry.key(part), (0, 0))
                # a chunk could not be read, and the sum of the others says nothing
                if counted != math.prod(shape):
                    break
                sums.append(PartSum(part, dtype, shape, total))
            else:
                if (digest := tensor_digest(sums)) != expected:
                    told = f"its digest is {digest}, {MANIFEST} says {expected}: its bytes have changed"
                    yield Fault("", name, told)

    def unrecorded(self) -> list[str]:
        """Return the tensors that have no digest though others have: they are compared by checksums alone."""
        if not self.manifest.digests:
            return []
        parts = {key for entry in self.manifest.tensors.values() for key in entry.part_keys()}
        names = {*self.manifest.tensors, *(name for name in self.records if self._dense_entry(name) is not None)}
        return sorted(names - parts - OWN - self.manifest.digests.keys())

    def _dense_entry(self, name: str) -> Entry | None:
        """Return the entry of a tensor that is stored under its own name; None if none is."""
        record = self.records.get(name)
        if not isinstance(record, TensorStorageMetadata):
            return None
        return Entry(name, None, tuple(record.size), record.properties.dtype)
