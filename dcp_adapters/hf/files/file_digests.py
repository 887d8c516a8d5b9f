"""What a file of an export says of the bytes of its tensors, so that a changed one is found, and named.

    qtensor.digests    in the metadata of a safetensors file: JSON {tensor: 32 hex digits}, by name

A digest is that of weight_sums.py, of the tensor as the file has it: one part, named "". The rank that writes the file
makes it of the tensors in memory. It depends on nothing but these, so equal exports stay equal files.
"""

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dcp_adapters.hf.files.directory import Directory, FileTensor
from dcp_adapters.plain.words import short
from dcp_adapters.records.weight_sums import DIGEST, PartSum, tensor_digest
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums

DIGESTS = "qtensor.digests"
NO_DIGEST = "0" * 32  # holds the place of a digest, and is as long


def file_tensor_digest(dtype: torch.dtype, shape: Sequence[int], total: int) -> str:
    """Return the digest of a file's tensor, from the sum of its bytes."""
    return tensor_digest([PartSum("", dtype, shape, total)])


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the names of a file's tensors to their digests; the tensors are on the CPU."""
    totals = byte_sums([TensorPiece.whole(tensor) for tensor in tensors.values()]).tolist() if tensors else []
    # Sorted by name below, so that equal exports are equal files.
    found = zip(tensors.items(), totals, strict=True)
    return dict(
        sorted((name, file_tensor_digest(tensor.dtype, tensor.shape, total)) for (name, tensor), total in found)
    )


def to_note(digests: Mapping[str, str]) -> str:
    """Return digests as the metadata of a file has them."""
    return json.dumps(digests, separators=(",", ":"))


def from_note(text: str, file: str) -> dict[str, str]:
    """Read what `to_note` has written. Raises ValueError for anything else."""
    try:
        digests = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {DIGESTS} in its metadata is not JSON: {error}; export it again") from error
    values = digests.values() if isinstance(digests, dict) else [digests]
    wrong = [value for value in values if not isinstance(value, str) or not DIGEST.fullmatch(value)]
    if wrong:
        raise ValueError(
            f"{file}: {DIGESTS} in its metadata holds {short(wrong[0])}, expected 32 hex digits for each tensor; "
            "export it again"
        )
    return dict(digests)


def renewed_note(text: str, file: str, digests: Mapping[str, str]) -> str:
    """Return a file's note with these digests for the tensors that it lists. Raises ValueError as `from_note`."""
    return to_note({name: digests.get(name, digest) for name, digest in from_note(text, file).items()})


class RecordedDigests:
    """What the files of a directory say.

    Raises:
        ValueError: the metadata of a file say something else.
    """

    def __init__(self, directory: Directory) -> None:
        notes = directory.notes.get(DIGESTS, {})
        self._of = {file: from_note(text, file) for file, text in notes.items()}
        self.lacking = sorted({tensor.file for tensor in directory.tensors.values()} - self._of.keys())
        self.lost = [  # (file, tensor) that is recorded and not there
            (file, name)
            for file, digests in self._of.items()
            for name in digests
            if name not in directory.tensors or directory.tensors[name].file != file
        ]

    def has(self, tensor: FileTensor) -> bool:
        """Return whether the tensor's file says anything."""
        return tensor.file in self._of

    def problem(self, tensor: FileTensor, held: Tensor) -> str | None:
        """Return how a tensor differs from what its file says, in words; None if it does not."""
        expected = self._of[tensor.file].get(tensor.name)
        if expected is None:
            return f"the file's {DIGESTS} has no digest of it"
        (found,) = digests_of({tensor.name: held}).values()
        if found == expected:
            return None
        return f"its digest is {found}, the file's {DIGESTS} says {expected}: its bytes have changed"
