"""Quantized tensors in PyTorch distributed checkpoints.

Payloads and scales are stored as plain tensors, and stock DCP reshards them. The rooms, from the lowest to the highest;
each imports only what stands above it here, qtensor and fsdp_hooks:

    torch_private.py  what torch does not promise and this package relies on
    plain/            what knows nothing of quantized tensors: words, boxes, files
    format/           what is stored, in records that all others share
    stored/           a checkpoint on disk: read without executing anything in it (reading/), inspected, verified
    save/             the save planner, and what is written in which order; staging/: copies in host memory
    load/             the load planner: compare, read in place, convert
    convert/          a checkpoint on disk into another format
    hf/               Hugging Face directories: export and import
    gguf/             GGUF files: export
    digests/          one value for all weights: of a model, a checkpoint, a directory, received tensors
    delta/            exact deltas between two states of the same tensors; coding/: changes as few bytes
    streams/          the tensors of an export into engines that are running
    cli/              the command line, `python -m dcp_adapters`

Importing this package imports what saves and loads need. The other public names come with their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dcp_adapters.format.entry import Entry
from dcp_adapters.format.expand import expand
from dcp_adapters.format.manifest import BaseLink, Manifest
from dcp_adapters.load.planner import QuantizedLoadPlanner
from dcp_adapters.save.atomic_writer import AtomicFileSystemWriter
from dcp_adapters.save.overwrite import remove_replaced
from dcp_adapters.save.planner import QuantizedSavePlanner
from dcp_adapters.save.staging.stager import QuantizedStager
from dcp_adapters.stored.read_manifest import read_manifest
from dcp_adapters.stored.reading.reader import SafeFileSystemReader
from dcp_adapters.stored.saves import LatestVerified, Retained, Skipped, keep_latest, latest_verified

if TYPE_CHECKING:
    from dcp_adapters.delta.apply import apply_deltas
    from dcp_adapters.delta.chain import Anchors, removable
    from dcp_adapters.delta.files import PatchedCopy, WrittenDelta, patched_copy, write_delta
    from dcp_adapters.delta.live import HeldVersion
    from dcp_adapters.delta.patch import Delta
    from dcp_adapters.delta.patch_format import delta_from_bytes, delta_to_bytes, open_delta, save_delta
    from dcp_adapters.delta.retention import checkpoint_bases, remove_checkpoints
    from dcp_adapters.digests.digest import digest, tensor_digests
    from dcp_adapters.gguf.export import export_gguf
    from dcp_adapters.hf.exporting.export import export_hf
    from dcp_adapters.hf.exporting.shared_scales import fused_linears
    from dcp_adapters.hf.reading.importing import import_hf
    from dcp_adapters.streams.buckets import TensorRecord
    from dcp_adapters.streams.process_group import GroupReceiver, GroupSender, join_group
    from dcp_adapters.streams.shared_memory import SharedMemoryReceiver, SharedMemorySender
    from dcp_adapters.streams.transport import Incoming, WeightStreamError
    from dcp_adapters.streams.vllm_source import vllm_source
    from dcp_adapters.streams.weight_stream import WeightStream

__all__ = [
    "Anchors",
    "AtomicFileSystemWriter",
    "BaseLink",
    "Delta",
    "Entry",
    "GroupReceiver",
    "GroupSender",
    "HeldVersion",
    "Incoming",
    "LatestVerified",
    "Manifest",
    "PatchedCopy",
    "QuantizedLoadPlanner",
    "QuantizedSavePlanner",
    "QuantizedStager",
    "Retained",
    "SafeFileSystemReader",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "Skipped",
    "TensorRecord",
    "WeightStream",
    "WeightStreamError",
    "WrittenDelta",
    "apply_deltas",
    "checkpoint_bases",
    "delta_from_bytes",
    "delta_to_bytes",
    "digest",
    "expand",
    "export_gguf",
    "export_hf",
    "fused_linears",
    "import_hf",
    "join_group",
    "keep_latest",
    "latest_verified",
    "open_delta",
    "patched_copy",
    "read_manifest",
    "removable",
    "remove_checkpoints",
    "remove_replaced",
    "save_delta",
    "tensor_digests",
    "vllm_source",
    "write_delta",
]

# public name -> the module that it comes from, with its first use
_HOMES = {
    "apply_deltas": "dcp_adapters.delta.apply",
    "Anchors": "dcp_adapters.delta.chain",
    "removable": "dcp_adapters.delta.chain",
    "PatchedCopy": "dcp_adapters.delta.files",
    "WrittenDelta": "dcp_adapters.delta.files",
    "patched_copy": "dcp_adapters.delta.files",
    "write_delta": "dcp_adapters.delta.files",
    "HeldVersion": "dcp_adapters.delta.live",
    "Delta": "dcp_adapters.delta.patch",
    "delta_from_bytes": "dcp_adapters.delta.patch_format",
    "delta_to_bytes": "dcp_adapters.delta.patch_format",
    "open_delta": "dcp_adapters.delta.patch_format",
    "save_delta": "dcp_adapters.delta.patch_format",
    "checkpoint_bases": "dcp_adapters.delta.retention",
    "remove_checkpoints": "dcp_adapters.delta.retention",
    "digest": "dcp_adapters.digests.digest",
    "tensor_digests": "dcp_adapters.digests.digest",
    "export_gguf": "dcp_adapters.gguf.export",
    "export_hf": "dcp_adapters.hf.exporting.export",
    "fused_linears": "dcp_adapters.hf.exporting.shared_scales",
    "import_hf": "dcp_adapters.hf.reading.importing",
    "TensorRecord": "dcp_adapters.streams.buckets",
    "GroupReceiver": "dcp_adapters.streams.process_group",
    "GroupSender": "dcp_adapters.streams.process_group",
    "join_group": "dcp_adapters.streams.process_group",
    "SharedMemoryReceiver": "dcp_adapters.streams.shared_memory",
    "SharedMemorySender": "dcp_adapters.streams.shared_memory",
    "Incoming": "dcp_adapters.streams.transport",
    "WeightStreamError": "dcp_adapters.streams.transport",
    "vllm_source": "dcp_adapters.streams.vllm_source",
    "WeightStream": "dcp_adapters.streams.weight_stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
