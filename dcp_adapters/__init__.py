"""Quantized tensors in PyTorch distributed checkpoints.

Payloads and scales are stored as plain tensors, and stock DCP reshards them. From the lowest to the highest; a module
imports only what stands above it, qtensor and fsdp_hooks:

    words.py, tables.py    names and values in few words; tables for people
    tiling.py              do boxes cover a tensor exactly?
    plain_memory.py        the bytes of a tensor, where it has some
    torch_private.py       what torch does not promise and this package relies on
    part_places.py         where the parts of a shard lie
    recipe_names.py        recipes and dtypes by name
    entry.py               one tensor and its parts
    source.py              anything that has tensors: names at once, values one tensor at a time
    manifest.py            what a checkpoint says about its quantized tensors
    checksums.py           digests of what a checkpoint stores
    weight_sums.py         what digests of weights are made of, wherever the weights are
    masters.py             which tensor does a master belong to?
    soundness.py           does a tensor mean what it should: scales, histories, masters
    rotations.py           which linears take inputs that are rotated at run time
    expand.py              quantized leaves of a state dict as their parts

    coding/                what changed between two tensors, as few bytes
    reading/               checkpoints read without executing anything in them
    stored/                a checkpoint on disk: opened, inspected, verified
    staging/               copies in host memory for asynchronous saves
    save/                  the save planner, and what is written in which order
    load/                  the load planner: compare, read in place, convert
    hf/                    Hugging Face directories: export and import
    gguf/                  GGUF files: export
    digests/               one value for all weights: of a model, a checkpoint, a directory, received tensors
    delta/                 exact deltas between two states of the same tensors
    streams/               the tensors of an export into engines that are running
    cli/                   the command line, `python -m dcp_adapters`
"""

from dcp_adapters.cli.deltas import PatchedCopy, WrittenDelta, patched_copy, write_delta
from dcp_adapters.delta.apply import apply_deltas
from dcp_adapters.delta.chain import Anchors, removable
from dcp_adapters.delta.live import HeldVersion
from dcp_adapters.delta.patch import Delta
from dcp_adapters.delta.patch_format import delta_from_bytes, delta_to_bytes, open_delta, save_delta
from dcp_adapters.delta.retention import checkpoint_bases, remove_checkpoints
from dcp_adapters.digests.digest import digest, tensor_digests
from dcp_adapters.entry import Entry
from dcp_adapters.expand import expand
from dcp_adapters.gguf.export import export_gguf
from dcp_adapters.hf.export import export_hf
from dcp_adapters.hf.importing import import_hf
from dcp_adapters.hf.shared_scales import fused_linears
from dcp_adapters.load.planner import QuantizedLoadPlanner
from dcp_adapters.manifest import BaseLink, Manifest
from dcp_adapters.reading.reader import SafeFileSystemReader
from dcp_adapters.save.atomic_writer import AtomicFileSystemWriter
from dcp_adapters.save.overwrite import remove_replaced
from dcp_adapters.save.planner import QuantizedSavePlanner
from dcp_adapters.staging.stager import QuantizedStager
from dcp_adapters.stored.read_manifest import read_manifest
from dcp_adapters.stored.saves import LatestVerified, Retained, Skipped, keep_latest, latest_verified
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
