"""What a checkpoint says about its quantized tensors, read without a model and without a process group."""

import os
import warnings

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.api import CheckpointException

from dcp_adapters.records.manifest import MANIFEST, Manifest, manifest_of
from dcp_adapters.stored.reading.metadata_checks import own_buffer
from dcp_adapters.stored.reading.reader import SafeFileSystemReader


def read_manifest(checkpoint: str | os.PathLike[str] | StorageReader) -> Manifest:
    """Read what a checkpoint says about its quantized tensors; needs no model and no process group.

    Args:
        checkpoint: a directory, or a StorageReader.

    Raises:
        FileNotFoundError: there is no `.metadata`: the directory holds no checkpoint, or one whose saving never
            finished.
        ValueError: the checkpoint was not saved with QuantizedSavePlanner, or its manifest cannot be read.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> read_manifest("step-1000").tensors["weight"].shape
        (64, 64)
        ```
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else SafeFileSystemReader(checkpoint)
    where = getattr(reader, "checkpoint_id", checkpoint)
    try:
        metadata = reader.read_metadata()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{where}: no .metadata, so this is no checkpoint or one whose saving never finished; use the one before it"
        ) from error
    manifest = manifest_of(metadata)
    if manifest is not None:
        return manifest
    # the storage dropped the planner data (safetensors do), and has the manifest as an entry
    buffer = own_buffer(MANIFEST, metadata, dims=1, where=str(where))
    if buffer is None:
        raise ValueError(f"{where}: no entry {MANIFEST}: it was not saved with QuantizedSavePlanner")
    try:
        # DCP warns that it works in a single process, which is the intent
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({MANIFEST: buffer}, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        reasons = "; ".join(f"{type(failed).__name__}: {failed}" for failed, _ in error.failures.values())
        raise ValueError(f"{where}: the entry {MANIFEST} can not be read: {reasons}; use another checkpoint") from error
    return Manifest.from_tensor(buffer)
